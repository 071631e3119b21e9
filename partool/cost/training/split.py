"""Largest and last stage of the split of layers that :func:`partool.layout.stages.balance` makes, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from partool.cost.case import SCHEDULES, Column, Layouts
from partool.cost.training.passes import PassLimits
from partool.work.training import TrainingWork

_ROUNDED = 0.05
"""Layers by which the largest stage may exceed the smallest possible: the search rounds the times of embedding and head
to 1/20 of a layer's (:func:`partool.planner.search.layouts.splits`), so each is off by at most half of that."""
_FILE = SCHEDULES.index("file")
_TRIED = 4
"""Number of sizes of the largest stage to try for each of its possible forms."""


@dataclass(frozen=True)
class Split:
    """Limits of the stages of pipelined layouts; seconds are of both passes of a micro-batch unless named otherwise."""

    largest_s: Column
    """Seconds that the largest stage takes at least."""
    final_s: Column
    """Seconds that the last stage takes at least."""
    final_forward_s: Column
    """Seconds of the forward pass in ``final_s``."""
    first_s: Column
    """Seconds that the first stage takes at least."""
    inner_s: Column
    """Seconds that a stage between the first and the last takes at least."""
    with_more: Column
    """Number of stages, from the first on, of which those between first and last have a layer more than ``inner_s``."""
    layer_s: Column
    """Seconds that a layer takes at least."""
    most_last: Column
    """Number of layers that the last stage has at most."""
    most_layers: Column
    """Number of layers that any stage has at most."""


def split(job: TrainingWork, layouts: Layouts, pass_limits: PassLimits) -> Split:
    """Return the limits of each layout's stages, for layouts with several pipeline ranks.

    Every stage has a layer or more. If all layers cost the same, the largest stage is as small as whole layers allow,
    and stages between the first and the last have no fewer layers than the mean, rounded down; as many stages as layers
    are left over have one more.
    """
    stages = np.maximum(layouts.pp * layouts.chunks, 1)
    costs, layers, layer = pass_limits.costs, job.model.layers, pass_limits.layer_s
    head, embedding = costs.last.both_s, costs.first.both_s
    forward = costs.last.forward_s
    spare = layers - stages + 1.0
    if not pass_limits.alike:
        mean = pass_limits.both_s / stages
        # Of the last stage's layer, no more than all of its passes is a forward pass.
        final, first, most = head + layer, embedding + layer, 0.0 * mean + spare
        return Split(np.maximum(mean, final), final, forward + layer, first, layer, 0.0 * mean, layer, most, most)
    unit = next(iter(costs.layers.values()))
    each = unit.both_s
    best, exact = _largest(pass_limits.both_s / stages, stages, layers, (each, embedding, head))
    # Tiles recompute less in layers that recompute anyway, so shares of layers do not weigh exactly in the split.
    exact &= (np.asarray(layouts.mlp_tile_tokens) == 0) | (np.asarray(layouts.recompute_share) == 1.0)
    limit = best + _ROUNDED * each
    inner = _whole_layers(limit / each)
    others = _whole_layers((limit - embedding) / each) + np.maximum(stages - 2, 0) * inner
    final = np.where(exact, np.maximum(layers - others, 1), 1)
    least = np.where(exact, np.floor(layers / stages), 1)
    # Of a rank's stages, the first recompute; others may not recompute at all.
    some = ((layouts.chunks > 1) | (layouts.schedule == _FILE)) & (np.asarray(layouts.recompute_share) < 1.0)
    alone = np.where(some, pass_limits.bare_layer_s, each)
    first = np.where(embedding <= (1.0 - _ROUNDED) * each, least * alone, alone) + embedding
    most = np.where(exact, np.minimum(_whole_layers((limit - head) / each), spare), spare)
    return Split(
        best,
        final * alone + head,
        final * unit.forward_s + forward,
        first,
        least * alone,
        np.where(exact, layers % stages, 0),
        alone,
        most,
        np.where(exact, np.minimum(inner, spare), spare),
    )


def _largest(mean: Column, stages: Column, layers: int, times: tuple[Column, Column, Column]) -> tuple[Column, Column]:
    """Return the seconds of the largest stage, and a mask that is False where they are only a lower bound.

    ``times`` are the seconds of a layer, of the embedding and of the head. The largest stage is a whole number of
    layers, perhaps with embedding or head, and takes the mean of all stages or more. If none of the sizes tried for one
    of these forms suffices, the next size bounds what this form takes.
    """
    each, embedding, head = times
    best: Column = np.full(np.shape(mean), np.inf)
    exact = np.zeros(np.shape(mean), dtype=bool)
    for extra in (0.0, embedding, head):
        smallest = np.maximum(np.ceil((mean - extra) / each - 1e-9), 1.0)
        form_s = (smallest + _TRIED) * each + extra
        enough = np.zeros(np.shape(mean), dtype=bool)
        for more in reversed(range(_TRIED)):
            limit = (smallest + more) * each + extra
            first, last = _whole_layers((limit - embedding) / each), _whole_layers((limit - head) / each)
            holds = (first >= 1) & (last >= 1)
            holds &= first + last + np.maximum(stages - 2, 0) * _whole_layers(limit / each) >= layers
            form_s, enough = np.where(holds, limit, form_s), holds | enough
        best, exact = np.minimum(best, form_s), np.where(form_s < best, enough, exact)
    return best, exact


def _whole_layers(layers: Column) -> Column:
    count: Column = np.floor(layers + 1e-9)
    return count
