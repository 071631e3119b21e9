"""Which rank orthogonalises which matrix, and which parts of matrices ranks send to each other.

All ranks of a pipeline position share the work: those of all copies of the training state, and all of its shards. This
module only computes with places of ranks and offsets, equally on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple

from partool.layout.matrices import MatrixStack, newton_schulz_flops
from partool.layout.tensor import Partition, by_name
from partool.plan.types import Plan
from partool_runtime.parallel.expert.apply import expert_placement
from partool_runtime.parallel.tensor.apply import placement_of
from partool_runtime.pieces import split_rows
from partool_runtime.placement import Placement, full_placement


class Matrix(NamedTuple):
    """One of the matrices that a parameter stacks row under row."""

    stack: MatrixStack
    number: int


class MatrixBlock(NamedTuple):
    """A block of a matrix that one rank holds."""

    local: tuple[slice, slice]
    """Offsets of the block in the rank's shard of the parameter."""
    inside: tuple[slice, slice]
    """Offsets of the block in the matrix."""

    @property
    def elements(self) -> int:
        """Number of elements of the block."""
        rows, columns = self.inside
        return int((rows.stop - rows.start) * (columns.stop - columns.start))


class HeldBlock(NamedTuple):
    """A block of a matrix in this rank's shard of a parameter."""

    name: str
    block: MatrixBlock


@dataclass(frozen=True, slots=True)
class Round:
    """One matrix of each owner: what this rank sends to the owners, and what it gets; lists are by place of a rank."""

    mine: Matrix | None
    """The matrix that this rank orthogonalises; None if it has none in this round."""
    sent: list[list[HeldBlock]]
    """Blocks of the owners' matrices that this rank sends to them."""
    received: list[list[MatrixBlock]]
    """Blocks of ``mine`` that this rank gets; together they cover the matrix once."""
    returned: list[list[MatrixBlock]]
    """Blocks of the result that this rank sends to all who hold them."""
    taken: list[list[HeldBlock]]
    """Blocks of the owners' results that this rank holds."""


class Holders:
    """What each rank of a pipeline position holds of each matrix, by the rank's place among them."""

    def __init__(self, plan: Plan, names: Sequence[str]) -> None:
        mesh, layout = plan.layout.mesh, plan.layout
        self.size = mesh.world_size // mesh.pp
        """Number of ranks."""
        self._tensor, self._expert, self._parts = mesh.tp, layout.expert_ranks, layout.expert_tensor
        self._sharers = mesh.dp_shard * mesh.cp if layout.data.zero else 1
        self._rows: dict[str, Partition] = by_name(plan.partition, names) if mesh.tp > 1 else {}
        self.part = lru_cache(maxsize=None)(self._part)
        """Returns the place of a rank's part of a parameter, before it is sharded by rows, and its rows of the part."""

    @property
    def of_copy(self) -> int:
        """Number of ranks that hold one copy of the training state."""
        return self._sharers * self._tensor

    def _part(self, stack: MatrixStack, place: int) -> tuple[Placement, range]:
        place %= self.of_copy
        shape = (stack.count * stack.rows, stack.columns)
        shard, tensor = divmod(place, self._tensor)
        shards = self._sharers
        if self._expert > 1 and stack.count > 1:
            shard, expert = divmod(place, self._expert)
            shards = self.of_copy // self._expert
            leaf = stack.name.rsplit(".", 2)[1]
            placement = expert_placement(leaf, shape, stack.count, (expert, self._expert), self._parts)
        elif self._rows:
            placement = placement_of(self._rows[stack.name], tensor, self._tensor)
        else:
            placement = full_placement(shape)
        return placement, split_rows(range(placement.local_shape[0]), shard, shards)

    def blocks(self, matrix: Matrix, place: int, *, counted: bool = False) -> list[MatrixBlock]:
        """Return the blocks of a matrix that a rank holds; ``counted`` leaves out what another tensor rank sends."""
        placement, rows = self.part(matrix.stack, place)
        return [] if counted and not placement.counts else list(_blocks(matrix, placement, rows))


def _blocks(matrix: Matrix, placement: Placement, rows: range) -> Iterator[MatrixBlock]:
    first = matrix.number * matrix.stack.rows
    for box in placement.boxes(rows):
        box_row, box_column = box.offsets
        start, stop = max(box_row, first), min(box_row + box.sizes[0], first + matrix.stack.rows)
        if start < stop:
            local_start = box.local[0].start + start - box_row
            inside = slice(start - first, stop - first), slice(box_column, box_column + box.sizes[1])
            yield MatrixBlock((slice(local_start, local_start + stop - start), box.local[1]), inside)


def shared_out(stacks: Sequence[MatrixStack], owners: int) -> list[list[Matrix]]:
    """Return each owner's matrices: the largest go first, each to the owner with the fewest FLOPs so far.

    (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: at most 4/3 of the best balance.)
    """
    matrices = [Matrix(stack, number) for stack in stacks for number in range(stack.count)]
    matrices.sort(key=lambda matrix: -newton_schulz_flops(matrix.stack.rows, matrix.stack.columns))
    by_owner: list[list[Matrix]] = [[] for _ in range(owners)]
    work = [(0.0, owner) for owner in range(owners)]
    for matrix in matrices:
        flops, owner = min(work)
        work[owner] = flops + newton_schulz_flops(matrix.stack.rows, matrix.stack.columns), owner
        by_owner[owner].append(matrix)
    return by_owner


def rounds(stacks: Sequence[MatrixStack], holders: Holders, place: int) -> list[Round]:
    """Return the exchanges of the rank ``place``, in the order in which all ranks make them."""
    each = zip_longest(*shared_out(stacks, holders.size))
    return [_round(matrices, holders, place) for matrices in each]


def _round(matrices: Sequence[Matrix | None], holders: Holders, place: int) -> Round:
    everyone, mine = range(holders.size), matrices[place]

    def from_copy(holder: int, owner: int) -> bool:
        return holder // holders.of_copy == owner // holders.of_copy

    def blocks_of(owner: int, *, counted: bool) -> list[HeldBlock]:
        matrix = matrices[owner]
        if matrix is None or (counted and not from_copy(place, owner)):
            return []
        return [HeldBlock(matrix.stack.name, one) for one in holders.blocks(matrix, place, counted=counted)]

    def of_mine(holder: int, *, counted: bool) -> list[MatrixBlock]:
        if mine is None or (counted and not from_copy(holder, place)):
            return []
        return holders.blocks(mine, holder, counted=counted)

    return Round(
        mine,
        [blocks_of(owner, counted=True) for owner in everyone],
        [of_mine(holder, counted=True) for holder in everyone],
        [of_mine(holder, counted=False) for holder in everyone],
        [blocks_of(owner, counted=False) for owner in everyone],
    )
