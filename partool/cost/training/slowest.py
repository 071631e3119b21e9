"""Time outside of a step's micro-batches, on the slowest pipeline rank, for one layout or for many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partool.cost.case import Layouts
from partool.cost.training.step import StepParts, owned_elements
from partool.cost.training.sync import PassSeconds, RankParameters, sync, tensor_sync_s
from partool.work.training import TrainingWork


@dataclass(frozen=True)
class RankWork:
    """What each pipeline rank holds and computes; fields are arrays [ranks] or [ranks, layouts]."""

    parameters: RankParameters
    passes: PassSeconds
    """Seconds of a rank's passes over one micro-batch."""
    summed: Any
    """Number of parameters whose gradients tensor ranks sum once a step."""


@dataclass(frozen=True)
class Slowest:
    """Seconds of a step outside of its micro-batches; fields are numbers or arrays [layouts]."""

    gradient_s: Any
    """Exposed seconds of the collectives of gradients, on the rank whose collectives are exposed longest."""
    gather_s: Any
    """Exposed seconds of gathers, on the same rank."""
    slowdown_s: Any
    """Seconds by which collectives slow down the passes of the same rank."""
    offload_s: Any
    """Exposed seconds of offloading, beyond those of collectives, and seconds by which it slows down passes."""
    optimizer_s: Any
    tensor_s: Any
    """Seconds in which tensor ranks sum partial gradients once a step."""

    @property
    def total_s(self) -> Any:
        """Seconds of all parts together."""
        shared = self.gradient_s + self.gather_s + self.slowdown_s
        return shared + self.offload_s + self.optimizer_s + self.tensor_s


def slowest(job: TrainingWork, layouts: Layouts, base: StepParts, ranks: RankWork) -> Slowest:
    """Return the seconds outside of micro-batches; ``base`` has the mean costs of the pipeline ranks.

    The rank with most of the optimizer's state sets the time of the update and of offloading.
    """
    parameters = ranks.parameters
    shared = sync(job, layouts, parameters, ranks.passes)
    exposed = (shared.gradient_exposed_s + shared.gather_exposed_s) + 0.0 * parameters.dense
    at = np.argmax(exposed, axis=0)
    owned = owned_elements(job, layouts, parameters.dense, parameters.expert) + 0.0 * parameters.dense
    fullest = np.max(owned, axis=0) / np.maximum(np.mean(owned, axis=0), 1e-9)
    # Host link and network work concurrently: only the time beyond the network's collectives is exposed.
    offload_s = np.maximum(0.0, fullest * base.offload.exposed_s - _at(exposed, at))
    return Slowest(
        _at(shared.gradient_exposed_s + 0.0 * parameters.dense, at),
        _at(shared.gather_exposed_s + 0.0 * parameters.dense, at),
        _at(shared.slowdown_s + 0.0 * parameters.dense, at),
        offload_s + fullest * base.offload.slowdown_s,
        fullest * base.optimizer_s,
        np.where(np.asarray(layouts.tp) > 1, tensor_sync_s(job, layouts, np.max(ranks.summed, axis=0)), 0.0),
    )


def _at(values: Any, index: Any) -> Any:
    """Return each layout's value of the rank ``index``, from values [ranks] or [ranks, layouts]."""
    return np.take_along_axis(values, np.expand_dims(index, 0), axis=0)[0]
