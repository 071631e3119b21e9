"""Detection of steps that take longer than predicted, and of the likely reason: the machine, or a single term."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from partool.plan.types import Plan, Prediction
from partool_runtime.telemetry._figures import seconds
from partool_runtime.telemetry.summary import TOTAL

LEAST_STEPS = 5
"""Number of steady steps needed for a report; at the end of a run ``LEAST_AT_END`` steps suffice."""
LEAST_AT_END = 3
_ERRORS = 3.0
"""A step is slow if its time exceeds the prediction by more than this number of printed errors (±, one standard
deviation); 1 in 700 is by chance."""
_SHARE = 0.3
"""Waiting for cores counts as the reason for slow steps if it takes more than this share of the excess time."""
_CROWDED = 1.25
"""Load per core above which a machine counts as contended if waiting cannot be measured."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Load of the machine from other processes."""

    waited_s: float | None
    """Seconds per step for which the rank's longest waiting thread was runnable without a core; None if unknown."""
    load: float | None
    """Number of threads of the machine that run or are runnable (its one-minute load average)."""
    cores: int
    run_threads: int
    """Number of compute threads of this run's ranks on this machine."""


def slower(prediction: Prediction, times: Mapping[str, float], busy: Busy) -> str:
    """Return a text with the likely reason if a step is slow as :data:`_ERRORS` defines it; else an empty text.

    ``times`` holds the median of each measured term and of the step, in seconds.
    """
    planned, error, step = prediction.time.step_time_s, prediction.relative_error, times.get(TOTAL, 0.0)
    if step <= planned * (1.0 + _ERRORS * error) or planned <= 0.0:
        return ""
    what = f"steps take {seconds(step)}, {step / planned:.1f} times the predicted {seconds(planned)} + {error:.0%}"
    return f"{what}: {_contended(busy, step - planned) or _term(prediction, times)}"


def _contended(busy: Busy, excess_s: float) -> str:
    load = (
        "" if busy.load is None else f"load {busy.load:.1f} on {busy.cores} cores, {busy.run_threads} of it this run's"
    )
    if busy.waited_s is not None:
        if busy.waited_s < _SHARE * excess_s:
            return ""
        waits = f"a thread waits {seconds(busy.waited_s)} of each for a core"
        return f"the machine is contended, {waits}" + (f" ({load})" if load else "")
    if busy.load is None or busy.load < _CROWDED * busy.cores or busy.load < busy.run_threads + 1:
        return ""
    return f"the machine is contended ({load})"


def _term(prediction: Prediction, times: Mapping[str, float]) -> str:
    beyond = {name: value - prediction.time.terms_s.get(name, 0.0) for name, value in times.items() if name != TOTAL}
    worst = max(beyond, key=beyond.__getitem__, default="")
    if not worst or beyond[worst] <= 0.0:
        return "outside the measured terms"
    planned = prediction.time.terms_s.get(worst, 0.0)
    return f"{worst} is off the most, {seconds(times[worst])} for {seconds(planned)} (partool explain {worst})"


class SlowWatch:
    """Checks a rank's medians and returns a warning once, when steps are slower than predicted."""

    def __init__(self, plan: Plan, waited: Callable[[], Mapping[str, float] | None] | None = None) -> None:
        self._plan = plan
        self._waited = waited or waited_s
        on_cpu = plan.devices.backend == "cpu"
        self._threads = torch.get_num_threads() if on_cpu else 1
        self._before: Mapping[str, float] | None = None
        self._steps = 0
        self.said = ""

    def count(self) -> None:
        """Record the end of a steady step."""
        if self._steps == 0:
            self._before = self._waited()
        self._steps += 1

    def look(self, times: Mapping[str, float]) -> str:
        """Return the warning the first time that steps are slow; else an empty text."""
        if self.said:
            return ""
        self.said = slower(self._plan.prediction, times, self._busy())
        return self.said

    def _busy(self) -> Busy:
        now, waited = self._waited(), None
        if now is not None and self._before is not None and self._steps > 1:
            # Threads alternate in a step or work in parallel, so their waits must not be added.
            since = [value - self._before.get(thread, 0.0) for thread, value in now.items()]
            waited = max(since, default=0.0) / (self._steps - 1)
        load = None
        with suppress(OSError):
            load = os.getloadavg()[0]
        run_threads = self._plan.devices.per_node * self._threads
        return Busy(waited, load, os.cpu_count() or 1, run_threads)


def waited_s() -> dict[str, float] | None:
    """Return the seconds that each thread of this process has waited for a core so far, by thread id.

    Read from the second figure of ``/proc/*/schedstat`` (https://docs.kernel.org/scheduler/sched-stats.html); None
    without this file.
    """
    waits_s = {}
    try:
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError):  # a thread that has just ended
                waits_s[task.name] = int((task / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
    return waits_s
