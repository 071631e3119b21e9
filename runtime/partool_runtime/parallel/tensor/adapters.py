"""What adapters of projections exchange between tensor ranks, beside the products themselves."""

from __future__ import annotations

from functools import partial

import torch

from partool.layout.adapters import A
from partool.layout.tensor import by_name
from partool.plan.types import Plan
from partool_runtime.model import AnyDecoder
from partool_runtime.model.adapter import Adapted
from partool_runtime.parallel.tensor.ops import Team
from partool_runtime.torch_internals.collectives import finished, start_sum


def share_adapters(model: AnyDecoder, plan: Plan, team: Team) -> None:
    """Give adapters whose matrices' columns tensor ranks share what sums the squares of a row, in place.

    The parameters must already be this rank's parts.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows = by_name(plan.partition, list(names.values()))
    for module in model.modules():
        if not isinstance(module, Adapted) or module.magnitude is None:
            continue
        row = rows[names[id(module.get_parameter(A))]]
        if any(cut.dim == 1 for cut in row.cuts):
            module.sum_squares = partial(_summed, team.group_name)


def _summed(group_name: str, squares_O: torch.Tensor) -> torch.Tensor:
    return finished(start_sum(squares_O, group_name, in_place=True))
