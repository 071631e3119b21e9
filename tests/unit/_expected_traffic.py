"""Messages and bytes of a step, counted exactly for one rank: what tests expect of the runtime's counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

from partool.cost.sequence.dsp import sent
from partool.cost.sequence.types import Sent
from partool.cost.traffic.tensor import CollectiveCall, pass_calls
from partool.cost.training.gathers import Unit
from partool.cost.training.tensor_sums import sync_calls
from partool.layout.grid import Axis, turns
from partool.plan.layout import Layout
from partool.spec.parallel import ZeroStage
from partool.work.gathers import Controls, Shape
from partool.work.training import TrainingWork


def sent_by_stages(
    grid: tuple[int, int], ranks: int, rank: int, stages: Sequence[Sequence[Axis]], width: int, *, tensor: int = 1
) -> Sent:
    """Return how many elements a rank sends in ``stages``, each of which lists the axes of its layers.

    All stages begin and end with the same axis sharded.
    """
    parts = [sent(grid, ranks, rank, turn, width, tensor=tensor) for axes in stages for turn in turns(axes)]
    return Sent(sum(part.forward for part in parts), sum(part.backward for part in parts))


def tensor_calls(
    job: TrainingWork, layout: Layout, stages: Sequence[int], rank: int = 0, shard: int = 0
) -> list[CollectiveCall]:
    """Return the collectives of a step for tensor rank ``rank`` (i0 · d2 + i1), which runs ``stages``.

    ``shard`` is the rank's index among the ranks that share the state. Collectives of the norm of all gradients are not
    included.
    """
    if layout.mesh.tp == 1:
        return []
    return [*pass_calls(job, layout, stages), *sync_calls(job, layout, stages, rank, shard)]


@dataclass(frozen=True, slots=True)
class Messages:
    """Number of calls, and bytes that one rank sends, for collectives of one kind in a step."""

    calls: int
    sent_bytes: int

    def __add__(self, other: Messages) -> Messages:
        return Messages(self.calls + other.calls, self.sent_bytes + other.sent_bytes)

    def times(self, count: int) -> Messages:
        """Return the calls and bytes if the collectives run ``count`` times."""
        return Messages(count * self.calls, count * self.sent_bytes)


NOTHING = Messages(0, 0)


def padded(shape: Shape, ranks: int) -> int:
    """Return the number of elements, with the last ranks' padding, of a parameter whose rows are sharded over ranks."""
    return ceil(shape[0] / ranks) * ranks * prod(shape[1:])


def gathers(
    units: Sequence[Unit], controls: Controls, *, zero: ZeroStage, ranks: int, micro_batches: int, element_bytes: int
) -> Messages:
    """Return the calls and bytes of all-gathers in a step after the first; the last of ``units`` is the root module's.

    ZeRO-1 and 2 gather every unit once a step, ZeRO-3 once per pass and micro-batch, except the root, which stays
    gathered between its passes. Persistent parameters are gathered with one message per step.
    """
    if zero == 0 or ranks == 1:
        return NOTHING
    total = NOTHING
    for index, unit in enumerate(units):
        missing = [shape for shape in unit if not controls.keeps(shape, zero)]
        passes = 1 if zero < 3 else micro_batches * (1 if index == len(units) - 1 else 2)
        total += _messages(missing, ranks, element_bytes, apart=controls.gather == "sequential").times(passes)
    kept = [shape for unit in units for shape in unit if controls.keeps(shape, zero)]
    return total + _messages(kept, ranks, element_bytes, apart=False)


def reductions(
    units: Sequence[Unit], *, zero: ZeroStage, ranks: int, micro_batches: int, element_bytes: int
) -> Messages:
    """Return the calls and bytes of a step's reduce-scatters; ``units`` list the trained parameters."""
    if zero == 0 or ranks == 1:
        return NOTHING
    rounds = micro_batches if zero >= 2 else 1
    each = [_messages(unit, ranks, element_bytes, apart=False) for unit in units]
    return sum(each, NOTHING).times(rounds)


def kept_bytes(units: Sequence[Unit], controls: Controls, *, ranks: int, element_bytes: int) -> int:
    """Return the bytes that stay gathered between steps with ZeRO-3."""
    shapes = [shape for unit in units for shape in unit if controls.keeps(shape, 3)]
    return sum(padded(shape, ranks) for shape in shapes) * element_bytes


def _messages(shapes: Iterable[Shape], ranks: int, element_bytes: int, *, apart: bool) -> Messages:
    sizes = [padded(shape, ranks) * element_bytes for shape in shapes]
    sizes = [size for size in sizes if size]
    if not sizes:
        return NOTHING
    return Messages(len(sizes) if apart else 1, sum(sizes) // ranks * (ranks - 1))
