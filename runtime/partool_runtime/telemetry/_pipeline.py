"""Reports of a pipeline's passes on their actions: the rank's waits, and the event ``pipeline`` on log steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from partool.plan.pipeline_log import Timed, pipeline_data
from partool.plan.types import Plan
from partool_runtime.telemetry._timers import HostClock, Spans
from partool_runtime.telemetry.summary import MeasuredValue, Measures

BUBBLE = "pipeline_bubble"
Ran = Sequence[Timed] | Callable[[], Sequence[Timed]]
"""Executed actions of a step, or a function that returns them; the function may wait, so it is called on log steps
only.
"""
_ACTIONS_PER_LOG_STEP = 2000
"""Maximum average number of actions written per log step; this number of actions takes about 40 kB."""
_ACTIONS_PER_PASS = 6
"""Maximum number of actions of a micro-batch on a stage: F, I and W, and sends and receives of two of these passes."""


class PipelineSteps:
    """Holds the actions of the current step."""

    def __init__(self, plan: Plan, spans: Spans, host: HostClock) -> None:
        self._spans, self._host = spans, host
        count = plan.layout.derived.accumulation * plan.layout.pipeline.chunks * _ACTIONS_PER_PASS
        self._every = math.ceil(count / _ACTIONS_PER_LOG_STEP)
        self._log_steps = 0
        self._last = plan.training.steps
        self._actions: Ran | None = None
        self._sent_bytes: int | None = None

    def take(self, actions: Ran, sent_bytes: int | None) -> None:
        """Store a step's actions, and the bytes sent in the step."""
        self._actions, self._sent_bytes = actions, sent_bytes
        if not callable(actions):
            self._add(actions)

    def measures(self) -> Measures:
        """Return the measured traffic of the latest step."""
        if self._sent_bytes is None:
            return Measures()
        return Measures(traffic={"pipeline": MeasuredValue(float(self._sent_bytes), "bytes of messages")})

    def log(self, step: int, *, steady: bool) -> dict[str, object] | None:
        """Return the data of a log step's event; None without actions, or on log steps left out to save space."""
        actions, self._actions = self._actions, None
        if actions is None:
            return None
        if callable(actions):
            actions = actions()
            self._add(actions)
        self._log_steps += 1
        if (self._log_steps - 1) % self._every and step != self._last:
            return None
        return pipeline_data(step, steady, time.time() - self._host.mark(), actions)

    def _add(self, actions: Sequence[Timed]) -> None:
        self._spans.add(BUBBLE, self._host, 0.0, sum(max(one.waited_s, 0.0) for one in actions))
