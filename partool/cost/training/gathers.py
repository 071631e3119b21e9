"""Cost of ZeRO's ways to gather: exact messages and bytes of a step, and the temporary memory of a gather.

Shards are rows: a rank holds ``ceil(rows / ranks)`` rows of each parameter; the last ranks are padded, and the
padding is sent too. An all-gather and a reduce-scatter of ``n`` ranks send ``(n-1)/n`` of the whole per rank (Thakur,
Rabenseifner and Gropp, IJHPCA 2005); DeepSpeed's ZeRO-1 and 2 all-reduce a bucket by default and send twice as much.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, prod

from partool.layout.parameters import layer_parameters, parameters
from partool.plan.layout import DataLayout
from partool.spec.model import ModelConfig
from partool.spec.parallel import DataParallel, ZeroStage
from partool.work.gathers import Controls, Shape

Unit = Sequence[Shape]
"""Shapes of the parameters of one all-gather; where tensor ranks hold parts of parameters, shapes of one rank's
parts."""


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


def messages_of_unit(model: ModelConfig, controls: Controls, zero: ZeroStage = 1) -> int:
    """Return how many messages gather one layer (at least one, even if the layer has no gathered parameters)."""
    if controls.gather == "coalesced":
        return 1
    return max(1, sum(not controls.keeps(info.shape, zero) for info in layer_parameters(model, model.layers - 1)))


def kept_elements(model: ModelConfig, most: int) -> int:
    """Return the total number of elements of the parameters that have at most ``most`` elements each."""
    if most == 0:
        return 0
    dense = [info.elements for info in layer_parameters(model, model.layers - 1)]
    outer = [info.elements for info in parameters(model.model_copy(update={"layers": 1})) if info.layer is None]
    return model.layers * sum(size for size in dense if size <= most) + sum(size for size in outer if size <= most)


def controls_of(data: DataParallel, model: ModelConfig, *, pressed: bool) -> Controls:
    """Return how parameters are gathered: as the spec says, or with few messages where the spec says ``auto``.

    If ``pressed``, ``auto`` saves memory instead of messages.

    Sequential gathers keep vectors gathered: a layer has many of them, which take little memory but would need many
    messages.
    """
    gather = data.gather if data.gather != "auto" else "sequential" if pressed else "coalesced"
    prefetch = data.prefetch if data.prefetch != "auto" else 0 if pressed else 1
    small = longest_vector(model) if gather == "sequential" else 0
    return Controls(gather, prefetch, data.persistent if data.persistent != "auto" else small)


def controls_of_layout(data: DataLayout) -> Controls:
    """Return how a layout gathers parameters."""
    return Controls(data.gather, data.prefetch, data.persistent)


def longest_vector(model: ModelConfig) -> int:
    """Return the number of elements of the largest norm or bias; parameters of at most this size are many and small."""
    found = [*layer_parameters(model, 0), *layer_parameters(model, model.layers - 1)]
    return max((info.elements for info in found if len(info.shape) == 1), default=0)


def _messages(shapes: Iterable[Shape], ranks: int, element_bytes: int, *, apart: bool) -> Messages:
    sizes = [padded(shape, ranks) * element_bytes for shape in shapes]
    sizes = [size for size in sizes if size]
    if not sizes:
        return NOTHING
    return Messages(len(sizes) if apart else 1, sum(sizes) // ranks * (ranks - 1))
