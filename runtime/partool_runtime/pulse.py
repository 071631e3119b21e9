"""What a rank tells its agent about its progress, through a page of memory that both share.

The agent makes a small file for each rank, on a file system in memory where there is one. The rank maps the file's
first page and removes the file's name. Telling costs no system call and never blocks, so that neither a full disk nor a
slow file server looks like a hang. After the page the file has room for the stacks of all threads, which the rank
writes when it gets ``SIGQUIT``, even if it waits in compiled code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

VARIABLE = "PARTOOL_PULSE"
"""Environment variable with the path of the file that the agent made for the rank."""
STACK_SIGNAL = signal.SIGQUIT
"""Signal on which a rank writes the stacks of its threads, as processes of Java do."""
PAGE_BYTES = mmap.PAGESIZE
"""Size of the shared page; stacks follow it."""

Phase = Literal[
    "starting", "loading", "preparing", "training", "compiling", "validating", "saving", "ending", "fetching", "logging"
]
"""What a rank does: ``starting`` imports modules and joins the other ranks, ``loading`` reads data, weights or a
checkpoint, ``preparing`` builds the model, ``ending`` comes after the last step. Within a step it is ``fetching`` the
step's data and ``logging`` its result, both of which may wait for a file system."""
PHASES: tuple[Phase, ...] = get_args(Phase)
IN_STEPS: tuple[Phase, ...] = ("training", "fetching", "logging")
"""Phases that are parts of a step."""
_RECORD = struct.Struct("=QQqqdQ")
"""Number of the message, phase, step, steps done, time, and the number once more: a message that is read while it is
written has two numbers."""
_READS = 100
"""Attempts to read a message while the rank writes one."""


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far a rank has come."""

    beats: int = 0
    """Counts everything that the rank has told; it stands still while the rank makes no progress."""
    phase: Phase = "starting"
    step: int = 0
    """Number of the last complete step; 0 before the first step of an attempt has ended."""
    steps_done: int = 0
    """Steps that this attempt has completed."""
    step_at: float = 0.0
    """Unix time at which that step ended; 0.0 before the first."""


class Pulse:
    """The rank's side. Without a file it does nothing that others see."""

    def __init__(self, file: BinaryIO | None = None) -> None:
        self._file = file
        self._page = mmap.mmap(-1 if file is None else file.fileno(), PAGE_BYTES)
        self._phase: Phase = "starting"
        self._step, self._steps_done, self._step_at, self._beats = 0, 0, 0.0, 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Pulse:
        """Return the pulse of a rank that an agent has started, and write stacks on ``SIGQUIT`` from now on.

        Without an agent the pulse does nothing. Raises OSError if the agent's file cannot be opened.
        """
        path = (os.environ if environment is None else environment).get(VARIABLE)
        if path is None:
            return cls()
        file = Path(path).open("r+b", buffering=0)  # noqa: SIM115 - open as long as the process lives
        with contextlib.suppress(OSError):
            os.unlink(path)
        pulse = cls(file)
        file.seek(PAGE_BYTES)
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
        pulse.enter("starting")
        return pulse

    def beat(self) -> None:
        """Tell that something was done."""
        self._beats += 1
        phase = PHASES.index(self._phase)
        message = _RECORD.pack(self._beats, phase, self._step, self._steps_done, self._step_at, self._beats)
        self._page[: _RECORD.size] = message  # in one copy; pack_into would clear the page first

    def enter(self, phase: Phase) -> None:
        """Tell that a phase begins."""
        self._phase = phase
        self.beat()

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Return a context manager that tells the beginning of a phase, and then the return to the phase before."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def stepped(self, step: int) -> None:
        """Tell that ``step`` steps are complete, one more than before."""
        self._step, self._steps_done, self._step_at = step, self._steps_done + 1, time.time()
        self.beat()


SILENT = Pulse()
"""The pulse of a rank without an agent."""


def read(page: mmap.mmap) -> RankProgress:
    """Return what a rank has told last."""
    for _ in range(_READS):
        first, phase, step, steps_done, step_at, beats = _RECORD.unpack(page[: _RECORD.size])
        if first == beats:
            break
    return RankProgress(beats, PHASES[phase] if phase < len(PHASES) else "starting", step, steps_done, step_at)
