"""Traces of chosen steps by torch's profiler, and snapshots of GPU memory.

The plan names the steps, or ``partool profile`` asks a running job: rank 0 sees the request, the ranks agree on it in
the sums of a step as they do on a stop, and the next steps are profiled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from partool.plan.profiling import (
    ProfileRequest,
    folder_of,
    out_of_memory_file,
    snapshot_file,
    take_request,
    trace_file,
)
from partool.spec.telemetry import ProfileSpec
from partool_runtime.torch_internals.memory_history import dump_snapshot, record_history, stop_history

FLAGS = 4
"""Number of a rank's flags: steps, first rank, last rank, and whether memory is wanted."""
_POLL_S = 1.0
"""Least time between two looks for a request, so that a slow file system costs little."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """A profile that the ranks agreed on."""

    first: int
    last: int
    mine: bool
    """Whether this rank writes a trace."""
    memory: bool


class StepProfiler:
    """Profiles steps.

    All ranks call :meth:`before` and :meth:`after` around every step; the chosen ranks write traces.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        device: torch.device,
        *,
        planned: ProfileSpec | None = None,
        warn: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Profile the ``planned`` steps; ``warn`` takes texts on what failed."""
        self._run_dir, self._rank, self._device, self._warn = run_dir, rank, device, warn
        self._planned = planned
        self._wanted: _Steps | None = None
        """The profile that begins with the next step or is under way."""
        self._trace: _Trace | None = None
        self._asked: ProfileRequest | None = None
        """A request that rank 0 has seen and the ranks have not agreed on; in steps without an exchange it waits."""
        self._looked_s = time.monotonic()

    def flags(self) -> list[float]:
        """Return what this rank adds to the sums of a step: on rank 0 the request that it sees, else zeros."""
        if self._rank == 0 and self._asked is None:
            self._asked = self._request()
        if (request := self._asked) is None:
            return [0.0] * FLAGS
        return [float(request.steps), float(request.first_rank), float(request.last_rank), float(request.memory)]

    def heard(self, flags: Sequence[float], steps_done: int) -> None:
        """Take the sums of all ranks' :meth:`flags` after ``steps_done`` steps; profiling begins with the next step."""
        steps, first, last, memory = (round(flag) for flag in flags)
        if steps > 0:
            mine = first <= self._rank <= last
            self._wanted = _Steps(steps_done + 1, steps_done + steps, mine=mine, memory=bool(memory))
            self._asked = None

    def before(self, step: int) -> None:
        """Begin step ``step``, counted from 1."""
        planned = self._planned
        if planned is not None and step == planned.steps[0] and self._wanted is None:
            first, last = planned.steps
            self._wanted = _Steps(first, last, mine=self._rank in planned.ranks, memory=planned.memory)
        wanted = self._wanted
        if wanted is not None and wanted.mine and step == wanted.first:
            self._trace = _Trace(self._device, memory=wanted.memory)
        if self._trace is not None:
            self._trace.begin(step)

    def after(self, step: int) -> tuple[int, int] | None:
        """End step ``step``; return the first and the last step of a profile that ended with it, on all ranks."""
        if self._trace is not None:
            self._trace.end()
        wanted = self._wanted
        if wanted is None or step < wanted.last:
            return None
        self._wanted = None
        if self._trace is not None:
            self._write(self._trace, folder_of(self._run_dir, wanted.first, wanted.last))
            self._trace = None
        return wanted.first, wanted.last

    def close(self) -> None:
        """End a profile that is under way, without a trace."""
        if self._trace is not None:
            self._trace.close()
            self._trace = None

    def _write(self, trace: _Trace, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trace.write(folder, self._rank)
        except (OSError, RuntimeError) as error:
            self._warn(f"the profile {folder} could not be written: {error}")
        finally:
            trace.close()

    def _request(self) -> ProfileRequest | None:
        now_s = time.monotonic()
        if self._wanted is not None or now_s - self._looked_s < _POLL_S:
            return None
        self._looked_s = now_s
        try:
            return take_request(self._run_dir)
        except (OSError, ValueError) as error:
            self._warn(f"the request for a profile cannot be read: {error}")
            return None


class _Trace:
    """A trace under way, of a rank's steps."""

    def __init__(self, device: torch.device, *, memory: bool) -> None:
        self._device = device
        self._memory = memory and device.type == "cuda"
        self._annotation: Any = None
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        if self._memory:
            record_history()
        self._profiler: Any = torch.profiler.profile(activities=activities)
        self._profiler.start()

    def begin(self, step: int) -> None:
        """Annotate a step."""
        self._annotation = torch.profiler.record_function(f"partool step {step}")
        self._annotation.__enter__()

    def end(self) -> None:
        """Wait for the device, and end the annotation."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None

    def write(self, folder: Path, rank: int) -> None:
        """Stop, and write the trace and a snapshot of memory; a reader sees whole files. Raises OSError."""
        self._profiler.stop()
        self._profiler, profiler = None, self._profiler
        if self._memory:
            dump_snapshot(snapshot_file(folder, rank))
        temporary = folder / f".rank-{rank}.json.gz"
        profiler.export_chrome_trace(str(temporary))
        temporary.replace(trace_file(folder, rank))

    def close(self) -> None:
        """Stop recording; calling again does nothing."""
        self.end()
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
        if self._memory:
            stop_history()
            self._memory = False


def snapshot_of_failure(run_dir: Path, rank: int, error: BaseException) -> Path | None:
    """Write a snapshot of the GPU's memory if ``error`` says that it is full; return its path, else None."""
    if not isinstance(error, torch.OutOfMemoryError) or not torch.cuda.is_available():
        return None
    file = out_of_memory_file(run_dir, rank)
    try:
        file.parent.mkdir(exist_ok=True)
        dump_snapshot(file)
    except (OSError, RuntimeError):
        return None
    return file
