"""Decides when a rank makes no progress: a state machine that uses no processes, clocks or signals itself."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from partool_runtime.pulse import IN_STEPS, Phase, RankProgress

Setting = Literal["auto", "off"] | int

STOPPED = "T"
"""State of a process that a signal has stopped, in proc(5)."""
SLACK_S = 60.0
"""Seconds that every limit has beyond multiples of a step: for garbage collection, page faults, other users."""
STOPPED_STEPS = 3.0
"""Steps without progress after which a stopped process counts as stalled."""
STALLED_STEPS = 8.0
"""Steps without progress after which any process counts as stalled: a stall of five steps beside a step is none."""
_PATIENCE_S: dict[Phase, float] = {"loading": 86_400.0, "saving": 7_200.0}
_USUAL_PATIENCE_S = 3_600.0
"""Seconds without progress outside of steps, and where a step waits for files. While loading, a rank may wait for the
data cache of another job; in a save, ranks wait up to half an hour for each other in each of several exchanges."""
_WARM_STEPS = 3
"""Steps of an attempt after which limits follow their times; the first steps compile and tune kernels."""
_MEASURED_STEPS = 50
_UPPER_SHARE = 0.9
_SUSPECT_S = 1.0
"""Seconds without progress after which a process's state is read."""


@dataclass(slots=True)
class _Watched:
    """What is known of a rank."""

    progress: RankProgress
    at: float
    """Time of the last progress."""
    interrupted: bool = True
    """True if something other than training happened since the last step ended."""
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASURED_STEPS))
    state: str = ""


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank that makes no progress."""

    rank: int
    idle_s: float
    progress: RankProgress
    state: str
    """State of its process in proc(5); empty where it cannot be read."""


class Watchdog:
    """Watches the ranks of one attempt; all times are in seconds of the same, arbitrary clock.

    A step's upper bar is the plan's prediction at its upper error bar, or the 90th percentile of the last 50 measured
    steps if that is longer. With ``auto`` a stopped process is stalled after three upper bars and a minute, another
    one after eight and a minute. Outside of steps, and in the first steps of an attempt, limits are an hour and more.
    A number of seconds takes the place of these limits in steps, and is the least outside of them.
    """

    def __init__(self, setting: Setting, predicted_s: float) -> None:
        """``predicted_s`` is the step time at the upper error bar."""
        self._setting = setting
        self._predicted_s = predicted_s
        self._ranks: dict[int, _Watched] = {}
        self.patient = True
        """True if some rank has not passed its limit."""

    def observe(self, progress: Mapping[int, RankProgress], now: float, state_of: Callable[[int], str]) -> Stall | None:
        """Take the progress of the ranks that run, and return the rank that holds the others up if one is stalled.

        A stopped rank is stalled by itself. Otherwise all ranks must have passed their limits, because a rank in a step
        may wait for one that compiles. ``state_of`` returns the state of a rank's process.
        """
        for rank, seen in progress.items():
            self._take(rank, seen, now)
        if self._setting == "off":
            return None
        for rank in progress:
            watched = self._ranks[rank]
            watched.state = state_of(rank) if now - watched.at >= _SUSPECT_S else ""
        overdue = [rank for rank in progress if now - self._ranks[rank].at >= self._limit_s(self._ranks[rank])]
        self.patient = len(overdue) < len(progress)
        if self.patient and not any(self.stopped(rank) for rank in overdue):
            return None
        rank = min(progress, key=lambda rank: self._order(self._ranks[rank]))
        watched = self._ranks[rank]
        return Stall(rank, now - watched.at, watched.progress, watched.state)

    def idle_s(self, rank: int, now: float) -> float:
        """Return the seconds since a rank's last progress."""
        return now - self._ranks[rank].at

    def stopped(self, rank: int) -> bool:
        """Return True if the process of a rank was last seen stopped."""
        return self._ranks[rank].state == STOPPED

    def upper_bar_s(self) -> float:
        """Return the upper bar of a step's time."""
        return max(self._predicted_s, *(_upper(each.steps_s) for each in self._ranks.values()), 0.0)

    def _take(self, rank: int, seen: RankProgress, now: float) -> None:
        if rank not in self._ranks:
            self._ranks[rank] = _Watched(seen, now)
            return
        watched, before = self._ranks[rank], self._ranks[rank].progress
        if seen.beats == before.beats:
            return
        watched.progress, watched.at = seen, now
        watched.interrupted |= seen.phase not in IN_STEPS
        if seen.steps_done == before.steps_done:
            return
        if before.steps_done and not watched.interrupted:
            watched.steps_s.append((seen.step_at - before.step_at) / (seen.steps_done - before.steps_done))
        watched.interrupted = seen.phase not in IN_STEPS

    def _limit_s(self, watched: _Watched) -> float:
        fixed_s = float(self._setting) if isinstance(self._setting, int) else 0.0
        bar_s = self.upper_bar_s()
        if watched.state == STOPPED:
            return fixed_s or STOPPED_STEPS * bar_s + SLACK_S
        if watched.progress.phase == "training" and watched.progress.steps_done >= _WARM_STEPS:
            return fixed_s or STALLED_STEPS * bar_s + SLACK_S
        return max(fixed_s, _PATIENCE_S.get(watched.progress.phase, _USUAL_PATIENCE_S), STALLED_STEPS * bar_s + SLACK_S)

    @staticmethod
    def _order(watched: _Watched) -> tuple[bool, int, float]:
        return watched.state != STOPPED, watched.progress.step, watched.at


def _upper(times_s: deque[float]) -> float:
    """Return the 90th percentile; 0.0 without values."""
    return sorted(times_s)[math.ceil(_UPPER_SHARE * len(times_s)) - 1] if times_s else 0.0
