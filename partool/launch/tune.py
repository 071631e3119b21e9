"""Starts the runtime's tuning of kernels as a process, sends its requests and reads its events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partool.plan.types import Plan
from partool.process import python_command

Event = dict[str, Any]
FAULTED = 4
"""Exit code of a process in which a configuration caused a GPU fault; tuning then goes on in a new process."""
_RESTARTS = 8
_PATIENCE_S = 10.0
"""Seconds that a process gets to stop before it is killed."""


class TuneError(Exception):
    """The process ended without a measurement; the message says why."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Tuning:
    """Settings with which kernels are measured."""

    out: Path
    budget_s: float
    again: bool = False
    dry_run: bool = False
    kernels: tuple[str, ...] = ()
    """Kernels whose typical requests are measured if no requests are given; an empty list selects all kernels."""

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments of the process that measures kernels."""
        words = ["--out", str(self.out), "--budget", str(self.budget_s)]
        words += ["--again"] if self.again else []
        return words + (["--dry-run"] if self.dry_run else [])


def requests_of(plan: Plan, tuning: Tuning) -> list[Event]:
    """Return a plan's kernel requests that lack measurements (with ``again``, all requests), the most expensive first.

    Raises ``TableError`` if a table of the plan cannot be read.
    """
    from partool.planner.kernels.choose import coverage, requests
    from partool_kernels.registry.tables import bucket

    wanted = set(requests(plan, tuning.kernels))
    by_request: dict[str, tuple[float, float, Event]] = {}
    for line in coverage(plan).lines:
        request = line.asked.request
        if request is None or request not in wanted or (line.measured and not tuning.again):
            continue
        sent = {
            "kernel": request.kernel, "architecture": request.architecture, "dtypes": list(request.dtypes),
            "shape": request.width, "rows": bucket(request.rows), "flags": list(request.flags),
        }  # fmt: skip
        key = json.dumps(sent)
        lost, total_s, _ = by_request.get(key, (0.0, 0.0, sent))
        by_request[key] = (lost + line.total_lost_s, total_s + line.total_s, sent)
    return [sent for _, _, sent in sorted(by_request.values(), key=lambda each: (-each[0], -each[1]))]


def tune(requests: Sequence[Event] | None, tuning: Tuning) -> Generator[Event, None, None]:
    """Yield the process's events until it ends. Without ``requests``, it measures the kernels' typical requests.

    Raises :class:`TuneError` if the process could not measure. Closing or interrupting the generator ends the process,
    whose results so far are kept.
    """
    for _ in range(_RESTARTS):
        last: Event = {}
        for event in _process(requests, tuning):
            last = event
            if event["event"] != "failed":
                yield event
        if last.get("event") != "failed":
            return
        if last["code"] != FAULTED:
            raise TuneError(str(last["reason"]), int(last["code"]))
        yield {"event": "restarted", "reason": last["reason"]}
    raise TuneError(f"the GPU faulted {_RESTARTS} times: {last['reason']}", FAULTED)


def _process(requests: Sequence[Event] | None, tuning: Tuning) -> Generator[Event, None, None]:
    command = python_command("partool_runtime.tune", *tuning.arguments)
    if requests is None:
        command += ["--examples", *(word for name in tuning.kernels for word in ("--kernel", name))]
    environment = os.environ | {"PARTOOL_LAUNCHER_PID": str(os.getpid())}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    last: Event = {}
    try:
        with process.stdin as stdin:
            stdin.write("".join(json.dumps(each) + "\n" for each in requests or ()))
        for line in process.stdout:
            last = json.loads(line)
            yield last
        if process.wait() and last.get("event") != "failed":
            yield {"event": "failed", "reason": f"the measuring process ended with {process.returncode}", "code": 1}
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        process.stdout.close()
