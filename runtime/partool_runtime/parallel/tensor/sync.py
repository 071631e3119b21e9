"""Sums partial gradients where several tensor ranks hold the same parameter and each computes a part of its gradient.

Norms of queries and keys see only one rank's heads. Norms on shares of the sequence see only one rank's tokens. Key
heads that several ranks hold get, on each rank, gradients only from the rank's query heads. The partial gradients are
summed once per step, after all micro-batches and after the reduction over data-parallel ranks. Each group of ranks
makes one all-reduce, however many parameters the ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from partool.layout.tensor import Partition
from partool.plan.types import Plan
from partool_runtime.mesh import Ranks
from partool_runtime.model import AnyDecoder
from partool_runtime.parallel.comm import sum_over
from partool_runtime.torch_internals import foreach
from partool_runtime.torch_internals.tensors import local


class TensorGradients:
    """Adds up the parts of gradients; all ranks that hold a parameter then have equal bits of its gradient."""

    def __init__(self, shared: Sequence[tuple[dist.ProcessGroup, Sequence[nn.Parameter]]]) -> None:
        self._shared = shared

    @classmethod
    def of(cls, model: AnyDecoder, plan: Plan, ranks: Ranks) -> TensorGradients | None:
        """Return the object that sums gradients; None if no rank has gradients to sum. A collective of all ranks.

        Call it when the parameters have memory, but before the first forward pass: afterwards modules may hold gathered
        parameters instead of sharded parameters.
        """
        size = ranks.tp.size
        sets = holder_sets(plan.partition, size) if size > 1 else []
        if not sets:
            return None
        groups = _open_groups(sets, ranks)
        by_set: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            placement = model.placements.get(name)
            if placement is not None and placement.shared_by:
                by_set.setdefault(placement.shared_by, []).append(parameter)
        return cls([(groups[members], by_set[members]) for members in sets if members in by_set])

    @staticmethod
    def names(model: AnyDecoder) -> frozenset[str]:
        """Return the names of this rank's parameters whose gradients are summed."""
        return frozenset(name for name, placement in model.placements.items() if placement.shared_by)

    @torch.no_grad()
    def add_up(self) -> None:
        """Sum the gradients of a step, in place."""
        for group, parameters in self._shared:
            parts = [_gradient(p) for p in parameters if p.requires_grad and local(p).numel() > 0]
            if not parts:
                continue
            summed = sum_over(torch.cat([part.flatten() for part in parts]), group)
            pieces = torch.split(summed, [part.numel() for part in parts])
            foreach.copy_(parts, [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)])


def holder_sets(rows: Sequence[Partition], ranks: int) -> list[tuple[int, ...]]:
    """Return the groups of tensor ranks that have parts of the same gradients, in the same order on all ranks."""
    summed = [row for row in rows if row.gradients == "summed"]
    holders = {row.holders(rank, ranks) for row in summed for rank in range(ranks) if all(row.spans(rank))}
    return sorted(members for members in holders if len(members) > 1)


def _open_groups(sets: Sequence[tuple[int, ...]], ranks: Ranks) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return this rank's process groups, by set of tensor ranks. Every rank takes part in opening all groups."""
    parts = {members: [tuple(team[member] for member in members) for team in ranks.tp.parts] for members in sets}
    opened = {members: ranks.groups.of(parts[members]) for members in sets}
    return {members: group for members, group in opened.items() if group is not None}


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a parameter's gradient; set it to zeros if no loss here depends on the parameter."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)
