"""Least and most seconds that the passes of a micro-batch may take, where only the exact layout decides.

A layout recomputes a share of each pipeline rank's layers, rounded up, and layers of several kinds cost differently.
The split of layers over ranks therefore decides how much is recomputed, and in which kind of layer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from partool.cost.case import RECOMPUTE, Column, Layouts
from partool.cost.kinds import Kind, kinds
from partool.cost.training.micro import Micro, micro
from partool.spec.model import ModelConfig
from partool.work.training import TrainingWork


@dataclass(frozen=True)
class PassLimits:
    """Seconds that all layers, embedding and head take together for one micro-batch."""

    costs: Micro
    """Costs if all kinds of layers recompute the same share."""
    forward_s: Column
    backward_s: Column
    """Seconds that backward passes take at least."""
    path_s: Column
    """Seconds of both passes, at least, without weight gradients."""
    most_backward_s: Column
    """Seconds that backward passes take at most."""
    layer_s: Column
    """Seconds that both passes of any layer take at least, if each stage recomputes its share of layers."""
    bare_layer_s: Column
    """Seconds that both passes of any layer take at least, whether it recomputes or not."""
    alike: bool
    """True if all layers cost the same, apart from what they recompute."""

    @property
    def both_s(self) -> Column:
        """Seconds that both passes take at least."""
        return self.forward_s + self.backward_s


def passes(job: TrainingWork, layouts: Layouts) -> PassLimits:
    """Return the least and the most seconds of passes under each layout."""
    if job.recompute is not None and len(set(job.recompute)) > 1:
        return _listed(job, layouts, job.recompute)
    costs, units = (priced := micro(job, layouts)), priced.layers.values()
    forward, backward = costs.total("forward_s"), costs.total("backward_s")
    path = forward + backward - costs.total("weight_s")
    least_layer = _least([unit.both_s - unit.recompute_s for unit in units])
    more = shared_most(job, layouts) / np.maximum(layouts.recompute_share, 1e-9)
    # Of a tiled network, layers that do not follow the policy recompute no more than the mean of all layers.
    more = more + ((np.asarray(layouts.mlp_tile_tokens) > 0) & (np.asarray(layouts.recompute_share) < 1.0))
    if len(units) == 1:
        recompute_s = job.model.layers * next(iter(units)).recompute_s
        alone = least_layer + next(iter(units)).recompute_s
        most = backward + (more - 1.0) * recompute_s
        return PassLimits(costs, forward, backward, path, most, alone, least_layer, alike=True)
    same = sum(count * costs.layers[kind].recompute_s for kind, count in costs.counts.items())
    least, most = _recompute_limits(job, layouts, costs, same, more)
    # Recomputation lengthens what is not weight gradients by half or more, as those take at most half of a pass.
    path = path - same + 0.5 * least
    backward = backward - same
    return PassLimits(costs, forward, backward + least, path, backward + most, least_layer, least_layer, alike=False)


def shared_most(job: TrainingWork, layouts: Layouts) -> Column:
    """Return the largest share of the layers that may recompute.

    A share 1/q of n layers is rounded up to at most 1 + (n - 1)/q layers on each pipeline rank. Without pipeline ranks
    the column ``recompute_share`` is already that of whole layers.
    """
    share = layouts.recompute_share
    rounded = share + (1.0 - share) * np.minimum(layouts.pp / job.model.layers, 1.0)
    return np.where(layouts.pp > 1, rounded, share)


def recorded(job: TrainingWork, layouts: Layouts) -> Layouts:
    """Return the rows that stand for exact layouts, which name one policy and the share of layers that recompute."""
    if job.recompute is None:
        return layouts
    some = [policy for policy in job.recompute if policy != "none"]
    policy = max((RECOMPUTE.index(one) for one in some), default=0)
    share = len(some) / len(job.recompute) if some else 1.0
    return layouts.with_columns(recompute=0 * layouts.recompute + policy, recompute_share=0 * layouts.pp + share)


def _least(columns: list[Column]) -> Column:
    least: Column = columns[0]
    for column in columns[1:]:
        least = np.minimum(least, column)
    return least


def _recompute_limits(
    job: TrainingWork, layouts: Layouts, costs: Micro, same: Column, more: Column
) -> tuple[Column, Column]:
    """Return the least and the most seconds of recomputation where layers differ.

    Without pipeline ranks the first layers recompute. With them, at least the share of all layers recomputes, and each
    of these layers takes as long as the quickest kind or longer. Where networks are tiled, all layers recompute, and
    the quickest kind is not known.
    """
    each, layers = [unit.recompute_s for unit in costs.layers.values()], job.model.layers
    tiled = np.asarray(layouts.mlp_tile_tokens) > 0
    least = np.where(tiled, 0.0, layers * _least(each))
    most = layers * more * -_least([-1.0 * one for one in each])
    count = np.rint(layouts.recompute_share * layers).astype(int)
    first = _first_layers(job.model)
    share = np.maximum(layouts.recompute_share, 1e-9)
    exact_s = sum(np.asarray(first[kind])[count] * unit.recompute_s / share for kind, unit in costs.layers.items())
    everywhere = np.asarray(layouts.recompute_share) == 1.0
    alone = (layouts.pp == 1) & ~tiled
    least = np.where(everywhere, same, np.where(alone, exact_s, least))
    return least, np.where(everywhere, same, np.where(alone, exact_s, np.maximum(most, least)))


@lru_cache(maxsize=16)
def _first_layers(model: ModelConfig) -> dict[Kind, tuple[int, ...]]:
    """Return, by kind, how many of the first n layers are of that kind, for n from 0 to all."""
    kinds_of_layers = kinds(model)
    return {
        kind: tuple(sum(one == kind for one in kinds_of_layers[:count]) for count in range(len(kinds_of_layers) + 1))
        for kind in dict.fromkeys(kinds_of_layers)
    }


def _listed(job: TrainingWork, layouts: Layouts, policies: tuple[str, ...]) -> PassLimits:
    """Return the seconds under the spec's list of policies: both limits are those of the list."""
    rows = {
        policy: layouts.with_columns(recompute=0 * layouts.recompute + RECOMPUTE.index(policy), recompute_share=1.0)
        for policy in dict.fromkeys(policies)
    }
    costs = {policy: micro(job, row) for policy, row in rows.items()}
    of = micro(job, recorded(job, layouts))
    units = [
        (count, costs[policy].layers[kind])
        for (policy, kind), count in Counter(zip(policies, kinds(job.model), strict=True)).items()
    ]

    def total(name: str) -> Column:
        layers: Column = sum(count * getattr(unit, name) for count, unit in units)
        model_total: Column = layers + getattr(of.first, name) + getattr(of.last, name)
        return model_total

    forward, backward = total("forward_s"), total("backward_s")
    least = _least([unit.both_s for _, unit in units])
    path = forward + backward - total("weight_s")
    return PassLimits(of, forward, backward, path, backward, least, least, alike=False)
