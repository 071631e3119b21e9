"""Where the ranks' output goes: files, and for rank 0 the agent's own standard output as well."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

from partool.plan.run import LOGS, rank_log

_SHOW_CURSOR = "\x1b[?25h"


class RankLogs(LogsSpecs):
    """One file per rank, attempt and stream.

    On a terminal, rank 0 writes to it directly, so that it can draw there; its standard error still goes to the file,
    which would spoil the drawing. Otherwise :meth:`pump` copies what rank 0 writes.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(str(run_dir / LOGS))
        self.attempt = 0
        self._run_dir = run_dir
        self._terminal = sys.stdout.isatty()
        self._source: BinaryIO | None = None

    @property
    def root_log_dir(self) -> str:
        """The folder of all logs."""
        return str(self._run_dir / LOGS)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files of this attempt and tell the ranks which one it is (called by torch)."""
        self.pump()
        stdouts, stderrs = {}, {}
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            stdouts[local_rank] = str(rank_log(self._run_dir, self.attempt, rank, "stdout"))
            stderrs[local_rank] = str(rank_log(self._run_dir, self.attempt, rank, "stderr"))
            env["PARTOOL_ATTEMPT"] = str(self.attempt)
            env["PARTOOL_AGENT_PID"] = str(os.getpid())
        Path(stdouts[0]).parent.mkdir(parents=True, exist_ok=True)
        if self._terminal and envs[0]["RANK"] == "0":
            stdouts[0] = ""  # inherit
        elif envs[0]["RANK"] == "0":
            self._follow(Path(stdouts[0]))
        return LogsDest(stdouts, stderrs, error_files=dict.fromkeys(envs, os.devnull))

    def pump(self) -> None:
        """Copy what rank 0 has written since the last call to standard output, unless it writes there itself."""
        if self._source is None:
            return
        try:
            while chunk := self._source.read(1 << 16):
                sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        except (BrokenPipeError, OSError):  # nobody reads any more: no reason to stop training
            self._source = None
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """Copy the rest; make a terminal usable again that a killed rank may have left without a cursor."""
        self.pump()
        if self._source is not None:
            self._source.close()
        if self._terminal:
            with contextlib.suppress(OSError):  # the terminal may have been closed
                sys.stdout.write(_SHOW_CURSOR)
                sys.stdout.flush()

    def _follow(self, path: Path) -> None:
        if self._source is not None:
            self._source.close()
        path.touch()
        self._source = path.open("rb")
