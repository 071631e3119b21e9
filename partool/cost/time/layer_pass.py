"""One pass of a layer or of the head: seconds by kind of work, on the device and on its host."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partool.cost.case import Column, at_rows
from partool.cost.sequence.types import ExchangeTime
from partool.work.base import Workload

_SECONDS = ("matmul_s", "attention_s", "elementwise_s", "tensor_s", "sequence_s", "expert_s", "host_s")
"""Columns of :class:`LayerPass`."""


@dataclass
class LayerPass:
    """Seconds of one pass of one layer (or of the head) over one micro-batch, by kind of work."""

    matmul_s: Column = 0.0
    attention_s: Column = 0.0
    elementwise_s: Column = 0.0
    tensor_s: Column = 0.0
    sequence_s: Column = 0.0
    expert_s: Column = 0.0
    shared: ExchangeTime = field(default_factory=ExchangeTime)
    """Parts of ``sequence_s``."""
    host_s: Column = 0.0
    """Seconds that the host needs to start the pass's operators."""
    exposed: dict[str, Column] = field(default_factory=dict)
    """Exposed seconds of tensor, sequence and expert communication, by time term."""

    def plus(self, other: LayerPass, share: float) -> LayerPass:
        """Return the pass with another one beside it in a share of the steps."""
        sums = {name: getattr(self, name) + share * getattr(other, name) for name in _SECONDS}
        exposed = {name: value + share * other.exposed[name] for name, value in self.exposed.items()}
        return replace(self, **sums, exposed=exposed)

    def of_rows(self, rows: Any) -> LayerPass:
        """Return the pass at the indices ``rows`` of its columns."""
        exposed = {name: at_rows(column, rows) for name, column in self.exposed.items()}
        columns = {name: at_rows(getattr(self, name), rows) for name in _SECONDS}
        return LayerPass(**columns, shared=self.shared.of_rows(rows), exposed=exposed)

    @property
    def compute_s(self) -> Column:
        """Seconds of computation on the device."""
        return self.matmul_s + self.attention_s + self.elementwise_s

    @property
    def device_s(self) -> Column:
        """Seconds of compute plus the communication that compute does not hide."""
        return self.compute_s + sum(self.exposed.values())

    def total_s(self, job: Workload) -> Column:
        """Return the seconds of a pass on the device and its host together."""
        return blended_s(job, self.device_s, self.host_s)


def blended_s(job: Workload, device_s: Column, host_s: Column) -> Column:
    """Return the longer of device and host time plus a part of the shorter; on a CPU both use the same cores.

    A host that runs far ahead hides all its work. Where the host has to wait for the device within a layer, as when
    random states are saved for recomputation, part of the shorter time is exposed too; a p-norm gives a value between
    maximum and sum.
    """
    if job.devices.backend == "cpu":
        return device_s + host_s
    power = job.stack.host_overlap
    larger = np.maximum(np.maximum(device_s, host_s), 1e-12)
    smaller = np.minimum(device_s, host_s)
    return larger * (1.0 + (smaller / larger) ** power) ** (1.0 / power)
