"""The ranks' output: log files, and copies of selected lines in the agent's output."""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

from partool.plan.run import LOGS, rank_log, starting_file
from partool.plan.terminal import of_ranks
from partool_runtime.agent.numa import Bindings
from partool_runtime.agent.options import Echo
from partool_runtime.agent.pulses import Pulses
from partool_runtime.pulse import VARIABLE

_SHOW_CURSOR = "\x1b[?25h"
_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20
"""Maximum bytes of a line that is shown whole; longer lines are shown in pieces."""


@dataclass(slots=True)
class _Followed:
    """A log file, and the position up to which it has been shown."""

    source: BinaryIO
    target: TextIO
    prefix: bytes
    """Text shown before every line; if the text is empty, bytes are copied unchanged."""
    begun: bytes = b""
    """Part of a line whose end has not been read yet."""


class RankLogs(LogsSpecs):
    """The log files of the ranks: one file per rank, attempt and stream.

    With ``rank0`` on a terminal, rank 0 writes its standard output directly to the terminal, so that it can draw a
    panel. Rank 0's standard error would spoil the panel, so it still goes to the file. Otherwise :meth:`pump` copies
    the ranks' output: rank 0's standard output unchanged, or with ``all`` every line of this node's ranks, prefixed
    with the rank's number.
    """

    def __init__(
        self, run_dir: Path, echo: Echo = "rank0", bound: Bindings | None = None, pulses: Pulses | None = None
    ) -> None:
        super().__init__(str(run_dir / LOGS))
        self.attempt = 0
        self._run_dir = run_dir
        self._echo = echo
        self._bound = bound
        self._pulses = pulses
        self._terminal = echo == "rank0" and sys.stdout.isatty()
        self._followed: list[_Followed] = []
        self._starting: list[Path] = []

    @property
    def root_log_dir(self) -> str:
        """The folder of all logs."""
        return str(self._run_dir / LOGS)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose this attempt's files; give the ranks its number, their bindings and pulses (called by torch)."""
        self._end_all()
        stdouts, stderrs = {}, {}
        self._starting = []
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            stdout, stderr = (rank_log(self._run_dir, self.attempt, rank, name) for name in ("stdout", "stderr"))
            stdout.parent.mkdir(parents=True, exist_ok=True)
            self._starting.append(starting_file(self._run_dir, self.attempt, rank))
            with contextlib.suppress(OSError):  # a rank without this file counts as a rank that has begun
                self._starting[-1].touch()
            stdouts[local_rank], stderrs[local_rank] = str(stdout), str(stderr)
            env["PARTOOL_ATTEMPT"] = str(self.attempt)
            env["PARTOOL_AGENT_PID"] = str(os.getpid())
            if self._bound is not None:
                env.update(self._bound.environment(local_rank))
            if self._pulses is not None and (pulse := self._pulses.open(rank)) is not None:
                env[VARIABLE] = str(pulse)
            if self._echo == "all":
                self._follow(stdout, sys.stdout, rank)
                self._follow(stderr, sys.stderr, rank)
            elif self._terminal and rank == 0:
                stdouts[local_rank] = ""  # empty: the rank inherits the agent's output
            elif self._echo == "rank0" and rank == 0:
                self._follow(stdout, sys.stdout)
        return LogsDest(stdouts, stderrs, error_files=dict.fromkeys(envs, os.devnull))

    @property
    def begun(self) -> bool:
        """True once a rank of this attempt has ended its first step or is about to end it."""
        return not all(file.exists() for file in self._starting)

    def pump(self) -> None:
        """Show the output that the ranks have written since the last call."""
        for followed in self._followed:
            while chunk := followed.source.read(_CHUNK_BYTES):
                self._show(followed, chunk)
        for stream in {id(followed.target): followed.target for followed in self._followed}.values():
            _flush(stream)

    def close(self) -> None:
        """Show the remaining output, and restore the cursor, which a killed rank may have left hidden on a terminal."""
        self._end_all()
        if self._terminal:
            with contextlib.suppress(OSError):  # the terminal may have been closed
                sys.stdout.write(_SHOW_CURSOR)
                sys.stdout.flush()

    def _follow(self, path: Path, target: TextIO, rank: int | None = None) -> None:
        path.touch()
        self._followed.append(_Followed(path.open("rb"), target, b"" if rank is None else b"[%d] " % rank))

    def _show(self, followed: _Followed, chunk: bytes) -> None:
        if not followed.prefix:
            _write(followed.target, of_ranks(chunk, followed.target))
            return
        *lines, followed.begun = (followed.begun + chunk).split(b"\n")
        if len(followed.begun) > _LONGEST_LINE_BYTES:
            lines, followed.begun = [*lines, followed.begun], b""
        text = b"".join(followed.prefix + line + b"\n" for line in lines)
        _write(followed.target, of_ranks(text, followed.target))

    def _end_all(self) -> None:
        """Show all remaining output, including lines without an end."""
        self.pump()
        for followed in self._followed:
            if followed.begun:
                rest = followed.prefix + followed.begun + b"\n"
                _write(followed.target, of_ranks(rest, followed.target))
                _flush(followed.target)
            followed.source.close()
        self._followed = []


def _write(stream: TextIO, data: bytes) -> None:
    try:
        stream.buffer.write(data)
    except OSError:  # the output's reader is gone, which is no reason to stop training
        _silence(stream)


def _flush(stream: TextIO) -> None:
    try:
        stream.buffer.flush()
    except OSError:
        _silence(stream)


def _silence(stream: TextIO) -> None:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
