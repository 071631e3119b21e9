"""Norms of whole parameters, of which ranks hold shards and parts; the matrices of experts have norms of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist

from partool.layout.matrices import is_scaled, scaled_matrices
from partool.layout.parameters import is_frozen
from partool.plan.types import Plan
from partool_runtime.mesh import Ranks
from partool_runtime.model.decoder import AnyDecoder
from partool_runtime.optim.steps import Shards
from partool_runtime.parallel.comm import UPDATES, counted_as, sum_over
from partool_runtime.pieces import in_matrices, local_rows
from partool_runtime.placement import Placement, full_placement
from partool_runtime.torch_internals.tensors import local


@dataclass(frozen=True, slots=True)
class WholePart:
    """What this rank holds of one matrix, or of a parameter that is no stack of matrices."""

    name: str
    """Name of the parameter."""
    rows: slice | None
    """Rows of this rank's shard of the parameter; None means all of the shard."""
    place: int
    """Index of the matrix among those of the whole model."""
    counts: bool
    """Whether this rank adds its part to the sum; False if another rank does so with an equal part."""


@dataclass(frozen=True)
class WholeNorms:
    """Adds up sums of squares of this rank's parts with those of the other ranks."""

    parts: tuple[WholePart, ...]
    total: int
    """Number of matrices of the whole model."""
    group: dist.ProcessGroup | None
    """All ranks; None if each of them holds all of every parameter."""
    device: torch.device

    def ordered(self, key: Mapping[str, int]) -> WholeNorms:
        """Return the same with parts in the order of ``key``, which maps names of parameters to numbers."""
        parts = tuple(sorted(self.parts, key=lambda part: key[part.name]))
        return WholeNorms(parts, self.total, self.group, self.device)

    @staticmethod
    def cut(shards: Shards, names: Sequence[str], parts: Sequence[WholePart]) -> Shards:
        """Return the shards of the parameters ``names`` cut into ``parts``; the parts share the shards' memory."""
        index = {name: at for at, name in enumerate(names)}

        def taken(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            each = ((tensors[index[part.name]], part.rows) for part in parts)
            return [tensor if rows is None else tensor[rows] for tensor, rows in each]

        return Shards(taken(shards.weights), taken(shards.gradients), [taken(moment) for moment in shards.moments])

    def add_up(self, sums: torch.Tensor) -> torch.Tensor:
        """Return the sums of all ranks, with equal bits on all ranks; ``sums`` has a column of float64 per part.

        Every element counts once, however many ranks hold it. All ranks have to call this function, also those without
        parts.
        """
        if self.group is None or self.total == 0:
            return sums
        places, counted = self._columns
        packed = sums.new_zeros(sums.shape[0], self.total)
        packed.index_copy_(1, places, sums * counted)
        with counted_as(purpose=UPDATES):
            sum_over(packed, self.group)
        return packed.index_select(1, places)

    @cached_property
    def _columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of this rank's parts, and 1 for each part that the rank counts, else 0."""
        places = torch.tensor([part.place for part in self.parts], dtype=torch.int64, device=self.device)
        counts = [float(part.counts) for part in self.parts]
        return places, torch.tensor(counts, dtype=torch.float64, device=self.device)


def alone(names: Iterable[str], device: torch.device) -> WholeNorms:
    """Return the norms of parameters that this rank holds whole."""
    parts = tuple(WholePart(name, None, place, True) for place, name in enumerate(names))
    return WholeNorms(parts, len(parts), None, device)


def open_norms(plan: Plan, model: AnyDecoder, names: Iterable[str], ranks: Ranks) -> WholeNorms:
    """Return the norms of the matrices of this rank's trained parameters ``names``."""
    counts = matrix_counts(plan, model)
    places = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    named = dict(model.named_parameters())
    parts: list[WholePart] = []
    for name in names:
        if local(named[name]).numel() == 0 or not is_scaled(plan.optimizer.adapt, named[name].ndim):
            continue
        # Copies of the training state are equal, so only the ranks of one copy count.
        counted = ranks.replicate.place == 0 and name not in model.copies
        rows_by_matrix: dict[int, slice | None] = {0: None}
        if counts[name] > 1:
            placement = model.placements.get(name) or full_placement(named[name].shape)
            rows_by_matrix = {**rows_of_matrices(placement, local_rows(named[name]), counts[name])}
        parts += [WholePart(name, rows, places[name] + number, counted) for number, rows in rows_by_matrix.items()]
    group = None if ranks.replicate.size == ranks.world_size else ranks.world
    return WholeNorms(tuple(parts), sum(counts.values()), group, ranks.device)


def matrix_counts(plan: Plan, model: AnyDecoder) -> dict[str, int]:
    """Return :func:`scaled_matrices` of the whole model, also of one that transformers builds."""
    adapt = plan.optimizer.adapt
    if plan.own_decoder:
        return scaled_matrices(plan.model, adapt, plan.frozen)
    shapes = {name: shape for name, shape in model.whole_shapes().items() if not is_frozen(name, plan.frozen)}
    # transformers stacks the matrices of experts in a dimension of its own.
    return {
        name: shape[0] if ".experts." in name and len(shape) == 3 else 1
        for name, shape in shapes.items()
        if is_scaled(adapt, len(shape))
    }


def rows_of_matrices(placement: Placement, rows: range, count: int) -> dict[int, slice]:
    """Return the rows of a rank's shard that belong to each of ``count`` matrices stacked row under row, by number.

    ``rows`` are those of the rank's part that the shard holds.
    """
    each = placement.shape[0] // count
    rows_by_matrix: dict[int, slice] = {}
    for box in placement.boxes(rows):
        at, first = box.local[0].start, box.offsets[0]
        for number, inside in in_matrices(first, first + box.sizes[0], each):
            start = at + number * each + inside.start - first
            stop = start + inside.stop - inside.start
            before = rows_by_matrix.get(number, slice(start, start))
            rows_by_matrix[number] = slice(min(before.start, start), max(before.stop, stop))
    return rows_by_matrix
