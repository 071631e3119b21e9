"""What adapters of projections exchange between tensor ranks, and which part of dropout's masks a rank has."""

from __future__ import annotations

from functools import partial

import torch

from partool.layout.adapters import A
from partool.layout.tensor import by_name
from partool.plan.types import Plan
from partool_runtime.model import AnyDecoder
from partool_runtime.model.adapter import Adapted
from partool_runtime.model.dropout import column_hashes
from partool_runtime.parallel.tensor.ops import Team
from partool_runtime.torch_internals.collectives import finished, start_sum


def share_adapters(model: AnyDecoder, plan: Plan, team: Team) -> None:
    """Give adapters whose matrices' columns tensor ranks share what depends on the other columns, in place.

    That is what sums the squares of a row, and the hashes of this rank's columns. Matrices that are not cut multiply
    shares of the tokens where norms do. The parameters must already be this rank's parts.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows = by_name(plan.partition, list(names.values()))
    for module in model.modules():
        if not isinstance(module, Adapted):
            continue
        name = names[id(module.get_parameter(A))]
        cut, projection = any(cut.dim == 1 for cut in rows[name].cuts), name.removesuffix(f".{A}")
        if cut and module.magnitude is not None:
            module.sum_squares = partial(_summed, team.group_name)
        if module.hashes is None:
            continue
        if cut:
            module.hashes = column_hashes(projection, model.placements[name].spans[1])
        elif team.length is not None and not rows[f"{projection}.weight"].cuts:
            module.held_tokens = (team.rank, team.ranks)


def _summed(group_name: str, squares_O: torch.Tensor) -> torch.Tensor:
    return finished(start_sum(squares_O, group_name, in_place=True))
