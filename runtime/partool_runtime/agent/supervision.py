"""The agent's decisions about its ranks: a state machine that uses no processes, clocks or signals itself."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from partool_runtime.agent.standing import Standing
from partool_runtime.errors import EXIT_CONFIGURATION, EXIT_DONE, EXIT_PREEMPTED

FAILURE_GRACE_S = 3.0
"""Seconds that the other ranks have, after a rank failed, to record their errors."""

FINISH_GRACE_S = 120.0
"""Seconds that the other ranks have to end after the first rank has finished; all of them have then saved."""

NO_CHECKPOINT = "no checkpoint within"
"""Beginning of the reason for which ranks are killed that were asked to stop."""

KILL_TIMEOUT_S = 30.0
"""Seconds that a rank has to end after SIGKILL; a process that a device blocks in the kernel outlives SIGKILL."""


class Reaction(Enum):
    """Next action that the agent must take."""

    WAIT = auto()
    STOP = auto()
    """Send the ranks that still run a request to checkpoint and stop."""
    KILL = auto()
    FINISH = auto()
    """End the attempt: no rank runs any more, or the ranks that still run cannot be killed."""


@dataclass(slots=True)
class Supervision:
    """Watches one attempt after another; all times are in seconds of the same, arbitrary clock."""

    shutdown_timeout_s: float
    finish_grace_s: float = FINISH_GRACE_S
    """Seconds that the other ranks have to end after the first rank has finished."""
    signals: list[signal.Signals] = field(default_factory=list)
    """Requests to stop, in order of arrival; a request holds for all attempts."""
    trouble_elsewhere: str = ""
    """Reason why the ranks must end although none of them failed: another node failed, or is gone."""
    stopped_elsewhere: bool = False
    """True once ranks of another node have stopped after a checkpoint."""
    early: bool = False
    """True once this attempt was ended before its first step, as requested: there was nothing to save."""
    early_elsewhere: bool = False
    """True once another node has ended its ranks before their first step, as requested."""
    finished_elsewhere: bool = False
    """True once all ranks of another node have finished."""
    stalled: str = ""
    """Reason why the ranks of this attempt are ended, if one makes no progress; empty if all do."""
    stalled_elsewhere: bool = False
    """True once a rank of another node makes no progress, or this node found that such a rank holds it up."""
    standing: Standing | None = None
    """The rank of this node that is the furthest behind."""
    standing_elsewhere: Standing | None = None
    """The rank of other nodes that is the furthest behind."""
    patient: bool = True
    """True if a rank of this node has not passed the watchdog's limit."""
    patient_elsewhere: bool = False
    """True if a rank of another node has not passed its limit: the ranks here may be waiting for it."""
    complete: bool = False
    """True if ranks had to be killed although the state after the last step is saved: the run has done its work."""
    saved: bool = False
    """True if a checkpoint was completed after the request to stop, although ranks had to be killed."""
    resumable: bool = False
    """True if the run has a complete checkpoint, from before the request to stop or from after it."""
    killed: str = ""
    """Reason why ranks of this attempt were killed; empty if no rank was killed."""
    codes: dict[int, int | None] = field(default_factory=dict)
    """Rank → exit code, negative if a signal ended the rank; None while the rank runs."""
    last_alive: dict[int, float] = field(default_factory=dict)
    """Time when each rank was last seen running."""
    _stop_sent: bool = False
    _deadline: float | None = None
    _why: str = ""
    _killed_at: float | None = None

    def begin_attempt(self) -> None:
        """Reset the state of the previous attempt's ranks."""
        self.early = self.saved = self.resumable = self.complete = self.stalled_elsewhere = False
        self.killed = self.stalled = ""
        self.codes = {}
        self.last_alive = {}
        self._stop_sent = False
        self._deadline = None
        self._why = ""
        self._killed_at = None

    def observe(
        self, codes: Mapping[int, int | None], now: float, *, begun: bool = True, at: float | None = None
    ) -> Reaction:
        """Record the ranks' exit codes and return the next action.

        ``begun`` is False as long as no rank can have anything to save; ``at`` is the Unix time, given if ``now`` is
        from another clock.
        """
        self.codes = dict(codes)
        self.last_alive.update({rank: now if at is None else at for rank, code in codes.items() if code is None})
        if None not in codes.values():
            return Reaction.FINISH
        if self.early:
            return self._kill(now, self.killed)
        if len(self.signals) > 1 and signal.SIGINT in self.signals:
            return self._kill(now, "interrupted a second time")
        if self.stalled and self.standing_elsewhere is None:
            return self._kill(now, self.stalled)
        if self.stalled:  # ranks of other nodes would end with these before their agents have their stacks
            self._allow(now, FAILURE_GRACE_S, self.stalled)
        elif any(code not in (None, EXIT_DONE, EXIT_PREEMPTED) for code in codes.values()):
            self._allow(now, FAILURE_GRACE_S, "another rank had failed")
        elif self.trouble_elsewhere:
            self._allow(now, FAILURE_GRACE_S, self.trouble_elsewhere)
        elif self.asked or EXIT_PREEMPTED in codes.values():
            if self.early_elsewhere or not (begun or self._stop_sent or EXIT_PREEMPTED in codes.values()):
                self.early = True
                return self._kill(now, "asked to stop before the first step")
            why = f"{NO_CHECKPOINT} {self.shutdown_timeout_s:g} s of the stop signal"
            self._allow(now, self.shutdown_timeout_s, why)
            if not self._stop_sent:
                self._stop_sent = True
                return Reaction.STOP
        elif self.finishing:
            why = f"not ended {self.finish_grace_s:g} s after the first rank had finished"
            self._allow(now, self.finish_grace_s, why)
        if self._deadline is not None and now >= self._deadline:
            return self._kill(now, self._why)
        return Reaction.WAIT

    @property
    def asked(self) -> bool:
        """True once the ranks have to stop."""
        return bool(self.signals) or self.stopped_elsewhere or self.early_elsewhere

    @property
    def finishing(self) -> bool:
        """True once a rank has finished all steps."""
        return EXIT_DONE in self.codes.values() or self.finished_elsewhere

    @property
    def killed_ranks(self) -> list[int]:
        """The ranks that the agent had to kill, or could not even kill."""
        return sorted(rank for rank, code in self.codes.items() if self.killed and code in (-signal.SIGKILL, None))

    @property
    def failed(self) -> bool:
        """True once a rank has failed by itself; ranks that stopped on request or were killed do not count."""
        return not self.killed and any(code not in (None, EXIT_DONE, EXIT_PREEMPTED) for code in self.codes.values())

    @property
    def preempted(self) -> bool:
        """True once a rank has stopped after a checkpoint, or before there was anything to save."""
        return self.early or EXIT_PREEMPTED in self.codes.values()

    @property
    def overdue(self) -> bool:
        """True if ranks were killed because they had not stopped in the time that a request to stop allows."""
        return self.killed.startswith(NO_CHECKPOINT)

    @property
    def exit_code(self) -> int:
        """The agent's exit code for a finished attempt."""
        codes = set(self.codes.values())
        if codes <= {EXIT_DONE}:
            return EXIT_DONE
        if EXIT_CONFIGURATION in codes:
            return EXIT_CONFIGURATION
        if self.complete and codes <= {EXIT_DONE, EXIT_PREEMPTED, -signal.SIGKILL, None}:
            return EXIT_DONE
        goes_on = self.saved or (self.overdue and self.resumable)
        killed: tuple[int | None, ...] = (-signal.SIGKILL, None) if goes_on else ()
        stopped = {EXIT_DONE, EXIT_PREEMPTED, *killed}
        return EXIT_PREEMPTED if self.early or codes <= stopped else 1

    @property
    def may_restart(self) -> bool:
        """True if the finished attempt failed in a way that another attempt may fix, and no stop was requested."""
        ended_early = self.signals or EXIT_PREEMPTED in self.codes.values() or None in self.codes.values()
        return self.exit_code == 1 and not ended_early

    def _allow(self, now: float, seconds: float, why: str) -> None:
        if self._deadline is None or now + seconds < self._deadline:
            self._deadline = now + seconds
            self._why = why

    def _kill(self, now: float, why: str) -> Reaction:
        self.killed = self.killed or why
        self._killed_at = now if self._killed_at is None else self._killed_at
        return Reaction.KILL if now < self._killed_at + KILL_TIMEOUT_S else Reaction.FINISH
