"""Lower bounds of a pipeline's time from the ranks that have most layers of one kind.

The pigeonhole principle holds for every split: of n layers, one of p ranks has n / p, rounded up, and if none has more,
several ranks have as many. The last of these waits for those before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partool.cost.case import HALVED, SCHEDULES, Column, Layouts, among
from partool.cost.kinds import Kind
from partool.cost.training.passes import PassLimits
from partool.cost.training.split import Split

_FILE = SCHEDULES.index("file")


@dataclass(frozen=True)
class Crowd:
    """Ranks that have most layers of one kind, or more of them; times are of one micro-batch."""

    busiest_s: Column
    """Seconds of both passes that some rank takes at least; 0 where nothing is known."""
    more_s: Column
    """Seconds of both passes that the busiest rank takes at least if it has a layer more of this kind."""
    forward_s: Column
    """Seconds of the forward pass of a rank with as many layers."""
    ranks: Column
    """Number of ranks that have as many layers at least, if none has more."""

    def span_s(self, layouts: Layouts, limits: Split) -> Column:
        """Return the least seconds of a step's passes.

        The last of these ranks starts after the first forward passes of the ranks before it, and ends before their last
        backward passes; a zero-bubble schedule fills the time after it with weight gradients.
        """
        before, several = self.ranks - 1.0, layouts.chunks > 1
        # A rank with several stages waits only for the first stage of each rank before it.
        unsplit_s = np.where(several, limits.first_s + (before - 1.0) * limits.inner_s, before * self.busiest_s)
        filled = np.where(several, 0.0, before * self.forward_s)
        waits = np.where(among(layouts.schedule, HALVED), filled, unsplit_s)
        waits = np.where((before > 0) & (self.busiest_s > 0), waits, 0.0)
        m = layouts.accumulation
        return np.minimum(m * self.busiest_s + waits, m * self.more_s)


def crowds(layouts: Layouts, pass_limits: PassLimits) -> list[Crowd]:
    """Return the ranks with most layers, for each kind of layer, of layouts with several pipeline ranks."""
    costs, pp = pass_limits.costs, layouts.pp
    bounded = np.logical_not((layouts.schedule == _FILE) | (np.asarray(layouts.mlp_tile_tokens) > 0))
    by_kind = []
    for kind, count in costs.counts.items():
        most = np.ceil(count / pp - 1e-9)
        by_kind.append(
            Crowd(
                np.where(bounded, _passes_s(layouts, pass_limits, kind, most), 0.0),
                np.where(bounded, _passes_s(layouts, pass_limits, kind, most + 1.0), 0.0),
                most * costs.layers[kind].forward_s,
                count - pp * (most - 1.0),
            )
        )
    return by_kind


def _passes_s(layouts: Layouts, pass_limits: PassLimits, kind: Kind, layers: Column) -> Column:
    """Return the least seconds of both passes of a rank with so many layers of a kind, and perhaps others.

    The share of layers to recompute is rounded up to a rank's whole layers. The first recompute, which may be others.
    """
    share, units = np.asarray(layouts.recompute_share), pass_limits.costs.layers
    recompute_s = {one: unit.recompute_s / np.maximum(share, 1e-9) for one, unit in units.items()}
    bare = {one: unit.both_s - unit.recompute_s for one, unit in units.items()}
    repeated = np.ceil(share * layers - 1e-9)
    added: Any = repeated * recompute_s[kind]
    for other in units:
        if other is not kind:
            added = np.minimum(added, bare[other] + repeated * np.minimum(recompute_s[kind], recompute_s[other]))
    least_s: Column = layers * bare[kind] + added
    return least_s
