"""The object with which a run saves and loads checkpoints."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from partool_runtime import threads
from partool_runtime.checkpoint import _folders, _writing
from partool_runtime.checkpoint._agreement import SavingRanks
from partool_runtime.checkpoint._arena import Arena
from partool_runtime.checkpoint._files import Files, FolderLock
from partool_runtime.checkpoint._manifest import CheckpointExtra, step_folder, steps_in
from partool_runtime.checkpoint._plan import State, WritePlan, blocks_to_write, make_plan, signature
from partool_runtime.checkpoint._reading import load_folder
from partool_runtime.errors import ConfigurationError

T = TypeVar("T")
_DAMAGED = "PT611"
"""Code of the error about a damaged checkpoint."""

_LOCK_WAIT_S = 10.0
"""Seconds to wait for the folder's lock, since rank 0 of the run's previous attempt may not have ended yet."""


@dataclass(frozen=True, slots=True)
class WriteStats:
    """Times and bytes of one checkpoint."""

    step: int
    path: str
    bytes: int
    """Bytes written by all ranks."""
    write_s: float
    """Seconds from the completed copy to the final rename of the folder."""
    blocked_s: float
    """Seconds for which training was blocked, including the wait for an earlier write."""


class Checkpointer:
    """Saves and loads the state of a run. Every method is a collective: all ranks call it, in the same order.

    A save succeeds on all ranks or fails on all. In ``async`` mode it returns once the state is copied into ordinary
    host memory, and its failure is raised by the next :meth:`save`, :meth:`wait`, :meth:`load` or :meth:`close`. At
    most one write is in flight. In ``sync`` mode it returns once the checkpoint is complete, and copies one block at a
    time, so that it takes memory for two blocks at most.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        mode: Literal["async", "sync"],
        rank: int,
        world_size: int,
        run: str = "last",
        timeout_s: float = 1800.0,
        files: Files | None = None,
        arena: Arena | None = None,
    ) -> None:
        """Open ``folder``, which is created if needed, and remove half-written files of a dead run.

        ``keep`` is the number of checkpoints to keep; ``run`` names the run in errors; ``timeout_s`` bounds how long
        ranks wait for each other while writing; ``files`` is for tests; state on the device of ``arena`` is copied
        through it, and state on another device without it. Raises ConfigurationError PT614 if another run
        writes into the folder at present, PT615 if the folder cannot be written to.
        """
        self._folder = folder
        self._run = run
        self._keep = keep
        self._mode = mode
        self._files = files or Files()
        self._arena = arena
        self._ranks = SavingRanks(rank, world_size, timeout_s)
        self._lock: FolderLock | None = None
        self._plan: tuple[tuple[object, ...], WritePlan] | None = None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self.last_write: WriteStats | None = None
        """Statistics of the newest complete checkpoint; an ``async`` save sets it when it is done."""
        self._ranks.on_first(self._take_over)

    def save(
        self,
        step: int,
        state: State,
        extra: CheckpointExtra,
        *,
        wait: bool = False,
        prune: bool = True,
        proven: int | None = None,
        best: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """Save ``state`` and ``extra`` as the checkpoint of ``step``; if ``wait``, return when it is complete.

        If ``prune``, older checkpoints beyond ``keep`` are deleted, except the checkpoint of step ``proven`` and
        those that ``best`` returns on rank 0, which may be called in another thread.
        ``state`` maps names to tensors, DTensors, or tensor-parallel ranks' parts of tensors and DTensors (``Placed``);
        ``extra`` is JSON of rank 0. Replicated values are saved once. Raises the errors of :meth:`wait`.
        """
        started_s = time.perf_counter()
        self.wait()
        json.dumps(extra)
        plan = self._planned(state)
        sync = self._mode == "sync"
        blocks = blocks_to_write(state, plan, self._arena)
        if not sync:
            blocks = blocks.copied()
        job = _writing.WriteJob(self._folder, step, extra, plan, blocks, self._keep, prune, proven, best)
        if sync:
            self._write(job, started_s, None)
        else:
            blocked_s = time.perf_counter() - started_s
            write = partial(self._write, job, time.perf_counter(), blocked_s)
            self._thread = threads.start(write, f"checkpoint-{step}")
        if sync or wait:
            self.wait()

    def wait(self) -> None:
        """Wait for the write in flight; raises ConfigurationError PT613 (disk full) or CheckpointError if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, newest first."""
        self.wait()
        return self._ranks.on_first(lambda: steps_in(self._folder))[::-1]

    def of_first(self, value: T) -> T:
        """Return the value that rank 0 gives, on all ranks."""
        return self._ranks.on_first(lambda: value)

    def set_aside_after(self, step: int) -> list[str]:
        """Rename the checkpoints of later steps, so that the run goes on from ``step``; return their new names."""
        self.wait()
        return self._ranks.on_first(lambda: _folders.set_aside_after(self._folder, step, self._files))

    def load(
        self, step: int, state: State, accept: Callable[[CheckpointExtra], None] | None = None, *, advise: bool = True
    ) -> CheckpointExtra:
        """Fill ``state`` in place from the checkpoint of ``step``, saved from any layout, and return its ``extra``.

        ``accept`` is called with ``extra`` before anything is filled, and raises an error if the checkpoint must not be
        loaded. Raises ConfigurationError PT610 (missing), PT611 (damaged) or PT612 (of another model); deletes nothing.
        Unless ``advise`` is False, the error of a damaged checkpoint names the newest intact one, which rank 0 then
        reads.
        """
        self.wait()
        run = self._run if advise else None
        return load_folder(step_folder(self._folder, step), state, self._ranks, run, accept=accept)

    def close(self) -> None:
        """Wait for the write in flight and release the folder; raises the errors of :meth:`wait`."""
        try:
            self.wait()
        finally:
            self._ranks.close()
            if self._arena is not None:
                self._arena.close()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _planned(self, state: State) -> WritePlan:
        key = signature(state)
        if self._plan is None or self._plan[0] != key:
            self._plan = key, make_plan(state, self._ranks)
        return self._plan[1]

    def _write(self, job: _writing.WriteJob, started_s: float, blocked_s: float | None) -> None:
        try:
            size_bytes = _writing.write(job, self._ranks, self._files)
        except Exception as error:  # raised by wait(), on the training thread
            self._error = error
            return
        write_s = time.perf_counter() - started_s
        path = str(step_folder(self._folder, job.step))
        self.last_write = WriteStats(job.step, path, size_bytes, write_s, write_s if blocked_s is None else blocked_s)

    def _take_over(self) -> None:
        try:
            self._files.make_folder(self._folder)
            self._lock = FolderLock(self._folder)
            give_up_s = time.monotonic() + _LOCK_WAIT_S
            while not self._lock.acquire():
                if time.monotonic() > give_up_s:
                    raise ConfigurationError(
                        "PT614",
                        f"another run is writing checkpoints into {self._folder}",
                        "give this run its own checkpoint.dir",
                    )
                time.sleep(0.1)
            _folders.clean(self._folder, self._files)
        except OSError as error:
            raise ConfigurationError("PT615", f"checkpoints cannot be written into {self._folder}: {error}") from error


@dataclass(frozen=True, slots=True)
class Resumed:
    """The checkpoint that was loaded."""

    step: int
    """Number of steps after which it was saved; 0 if there is none."""
    notes: tuple[str, ...] = ()
    """What the user must learn about newer checkpoints, which are damaged."""


def load_newest(checkpointer: Checkpointer, load: Callable[[int, bool], None], *, fallback: bool) -> Resumed:
    """Call ``load`` with the step of the newest checkpoint; a collective.

    If ``load`` finds the checkpoint damaged and ``fallback`` is True on rank 0, it is called with older steps, until a
    checkpoint is intact; the damaged ones are then renamed and kept. The second argument of ``load`` says whether an
    error about damage shall name the newest intact checkpoint. Raises the errors of ``load``; if no checkpoint is
    intact, that of the newest, and then renames nothing.
    """
    fallback = checkpointer.of_first(fallback)
    damaged: dict[int, ConfigurationError] = {}
    for step in checkpointer.steps():
        try:
            load(step, not fallback)
        except ConfigurationError as error:
            if not fallback or error.code != _DAMAGED:
                raise
            damaged[step] = error
            continue
        names = checkpointer.set_aside_after(step) if damaged else []
        return Resumed(step, tuple(map(_note, damaged, damaged.values(), names, [step] * len(names))))
    if damaged:
        newest = damaged[max(damaged)]
        raise ConfigurationError(newest.code, newest.message, "there is no intact checkpoint to fall back to")
    return Resumed(0)


def _note(damaged: int, error: ConfigurationError, name: str, step: int) -> str:
    return (
        f"PT659: the checkpoint of step {damaged} is skipped and kept as {name}, as {error.message}; "
        f"training goes on from step {step}"
    )
