"""Cost of ZeRO's ways to gather: exact messages and bytes of a step, and the temporary memory of a gather.

Shards are rows: a rank holds ``ceil(rows / ranks)`` rows of each parameter; the last ranks are padded, and the
padding is sent too. An all-gather and a reduce-scatter of ``n`` ranks send ``(n-1)/n`` of the whole per rank (Thakur,
Rabenseifner and Gropp, IJHPCA 2005); DeepSpeed's ZeRO-1 and 2 all-reduce a bucket by default and send twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence

from partool.layout.parameters import layer_parameters, parameters
from partool.plan.layout import DataLayout
from partool.spec.model import ModelConfig
from partool.spec.parallel import DataParallel, ZeroStage
from partool.work.gathers import Controls, Shape

Unit = Sequence[Shape]
"""Shapes of the parameters of one all-gather; where tensor ranks hold parts of parameters, shapes of one rank's
parts."""


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
    infos = [*layer_parameters(model, 0), *layer_parameters(model, model.layers - 1)]
    return max((info.elements for info in infos if len(info.shape) == 1), default=0)
