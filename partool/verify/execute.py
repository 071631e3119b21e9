"""Starts the dry runs of ranks in processes of their own: this package does not import torch."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from partool.catalog.machine import available_cores
from partool.diagnostics.record import CodedError
from partool.plan.posix import no_ranks
from partool.plan.rank_trace import RankTrace
from partool.plan.types import Plan
from partool.plan.verification import RANK_LIMIT_S
from partool.process import python_command

if TYPE_CHECKING:
    from types import FrameType

_MODULE = "partool_runtime.dry"
_LOOK_S = 0.5
"""Seconds between two looks at the time limit."""
_TERMINATED = 128 + signal.SIGTERM


class DryRunError(CodedError):
    """A dry run that cannot be made, or that failed where a real run would fail."""

    def __init__(self, code: str, message: str, help: str, places: Sequence[str] = ()) -> None:
        super().__init__(code, message, help)
        self.places = tuple(places)
        """Sections of the spec that the failing code belongs to."""


@dataclass
class DryProgress:
    """How far the dry runs of ranks are; another thread may read it."""

    ranks: int = 0
    """Number of ranks to execute; 0 before the first one is started."""
    finished: int = 0
    running: list[int] = field(default_factory=list)
    """Ranks that are being executed."""


def execute(
    plan: Plan, ranks: Sequence[int], progress: DryProgress | None = None, limit_s: float = RANK_LIMIT_S
) -> tuple[RankTrace, ...]:
    """Return the traces of ranks, in the order of ``ranks``; as many processes run at a time as there are cores.

    Raises :class:`DryRunError`, also for a rank that takes longer than ``limit_s``. The processes end with this call,
    also where one of them fails, or where the caller is interrupted or terminated.
    """
    if reason := no_ranks():
        raise DryRunError("PT516", reason, "make the plan without --verify here, and verify it there")
    jobs = min(len(ranks), available_cores())
    progress = progress or DryProgress()
    with tempfile.TemporaryDirectory(prefix="partool-") as name, _ending_when_terminated(), ExitStack() as ended:
        folder = Path(name)
        (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        pipes = [os.pipe() for _ in range(jobs)]
        for output, _ in pipes:
            ended.callback(os.close, output)
        try:
            first = _started(plan, ranks, [each for _, each in pipes], folder)
        finally:
            for _, each in pipes:
                os.close(each)
        ended.callback(_end, first)
        progress.ranks = len(ranks)
        jobs_started = [_Job(first, ranks[at::jobs], pipes[at][0], folder / f"errors-{at}") for at in range(jobs)]
        _wait_for(jobs_started, progress, limit_s)
    traces = {trace.rank: trace for job in jobs_started for trace in job.traces}
    return tuple(traces[rank] for rank in ranks)


def _started(plan: Plan, ranks: Sequence[int], outputs: Sequence[int], folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that imports torch, once, and copies itself for each of ``outputs``.

    It has a session of its own, by which it and its copies can be ended at once.
    """
    compiled = ["--compile"] if plan.layout.compile != "none" else []
    process_options = ["--outputs", *map(str, outputs), "--errors", str(folder), "--parent", str(os.getpid())]
    command = python_command(_MODULE, str(folder / "plan.json"), *map(str, ranks), *compiled, *process_options)
    # One thread each: fake tensors compute nothing, and the processes share the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "errors").open("wb") as errors:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env=environment,
            pass_fds=outputs,
            start_new_session=True,
        )


def _end(first: subprocess.Popen[bytes]) -> None:
    """End a process and its copies, if they run."""
    with suppress(ProcessLookupError):
        os.killpg(first.pid, signal.SIGKILL)
    first.wait()


def _wait_for(jobs: Sequence[_Job], progress: DryProgress, limit_s: float) -> None:
    """Read what processes print until all have ended."""
    with selectors.DefaultSelector() as waiting:
        for job in jobs:
            waiting.register(job.output, selectors.EVENT_READ, job)
        while waiting.get_map():
            for key, _ in waiting.select(_LOOK_S):
                if not key.data.read():
                    waiting.unregister(key.fileobj)
                    key.data.check()
            running = [key.data for key in waiting.get_map().values()]
            progress.finished = sum(len(job.traces) for job in jobs)
            progress.running = sorted(job.rank for job in running)
            for job in running:
                job.keep_to(limit_s)


class _Job:
    """A copy of the process, which dry-runs ranks one after the other and prints a line for each."""

    def __init__(self, first: subprocess.Popen[bytes], ranks: Sequence[int], output: int, errors: Path) -> None:
        self._first, self._ranks, self._errors = first, ranks, errors
        self.output = output
        self.traces: list[RankTrace] = []
        self._failure: dict[str, object] = {}
        self._exit: int | None = None
        self._unfinished = b""
        self._since_s = time.monotonic()

    @property
    def rank(self) -> int:
        """The rank that is being executed, or was last."""
        return self._ranks[min(len(self.traces), len(self._ranks) - 1)]

    def read(self) -> bool:
        """Read what there is; return whether there may be more."""
        chunk = os.read(self.output, 1 << 20)
        *lines, self._unfinished = (self._unfinished + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b'{"code"'):
                self._failure = json.loads(line)
            elif line.startswith(b'{"exit"'):
                self._exit = int(json.loads(line)["exit"])
            else:
                self.traces.append(RankTrace.model_validate_json(line))
            self._since_s = time.monotonic()
        return bool(chunk) and self._exit is None

    def keep_to(self, limit_s: float) -> None:
        """Raise :class:`DryRunError` if the rank has taken longer than ``limit_s``."""
        if time.monotonic() - self._since_s > limit_s:
            message = f"the dry run of rank {self.rank} took more than {limit_s:g} s and was ended"
            help = "a large model needs more: --rank-limit SECONDS; or the model's code has an endless loop"
            raise DryRunError("PT698", message, help)

    def check(self) -> None:
        """Raise :class:`DryRunError` if the copy, which has ended, or the first process has failed."""
        code = self._first.wait() if self._exit is None else self._exit
        if self._failure:
            failure = self._failure
            raise DryRunError(str(failure["code"]), str(failure["message"]), str(failure["help"]), _places(failure))
        if code < 0:
            message = f"the dry run of rank {self.rank} was ended by signal {-code}"
            raise DryRunError("PT598", message, "signal 9 without anyone's doing: this machine has too little memory")
        if code or len(self.traces) < len(self._ranks):
            files = (self._errors.with_name("errors"), self._errors)
            errors = "\n".join(file.read_text("utf-8", "replace") for file in files if file.exists())
            help = "a real run would fail in the same way, or the dry run has a fault: please report it"
            raise DryRunError("PT598", f"rank {self.rank} fails in its dry run: {_reason(errors)}", help)


@contextmanager
def _ending_when_terminated() -> Iterator[None]:
    """Let SIGTERM end the command as an exception does, so that it ends its processes."""
    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise SystemExit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _places(failure: dict[str, object]) -> list[str]:
    places = failure.get("places")
    return [str(place) for place in places] if isinstance(places, list) else []


def _reason(errors: str) -> str:
    """Return the error of a process that failed outside of its ranks: its traceback's last line."""
    lines = [line for line in errors.splitlines() if re.match(r"[\w.]+(Error|Exception|Interrupt)\b", line)]
    return "\n".join(lines[-1:] or errors.splitlines()[-3:]) or "no message"
