"""The processes of a run's trackers, as rank 0 starts, hears and ends them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from partool.plan.run import LOGS
from partool.plan.tracking import tracked_run
from partool.plan.types import Plan
from partool.process import python_command
from partool.spec.telemetry import TrackerSpec
from partool.strategies.trackers import TRACKERS
from partool_runtime.errors import ConfigurationError
from partool_runtime.trackers.orders import END_S

MODULE = "partool_runtime.trackers"


@dataclass(slots=True)
class _Follower:
    name: str
    process: subprocess.Popen[bytes]
    answers: bytes = b""
    ended: bool = False
    """True once the process has closed its output."""
    silent: bool = False
    """True once the process has ended, or its problem was told: nothing else is told of it."""


class Trackers:
    """Starts a process per tracker of the plan, which follows the event log; nothing here waits before :meth:`close`.

    Raises ConfigurationError PT540 if a tracker's package is missing.
    """

    def __init__(self, plan: Plan, run_dir: Path, warn: Callable[[str], None], tell: Callable[[str], None]) -> None:
        """``warn`` and ``tell`` record a warning and show a message."""
        self._run_dir, self._warn, self._tell = run_dir, warn, tell
        for tracker in plan.telemetry.trackers:
            _require(tracker.name)
        self._followers = [_Follower(each.name, _start(plan, run_dir, each)) for each in plan.telemetry.trackers]

    def hear(self) -> None:
        """Tell what the processes have answered since the last call; takes a few microseconds each."""
        for follower in self._followers:
            for kind, text in _answers(follower):
                self._take(follower, kind, text)
            if follower.ended:
                self._take(follower, "problem", "its process has ended")

    def close(self) -> None:
        """Tell all processes that the log is complete, and wait until they have ended, for five seconds together."""
        deadline = time.monotonic() + END_S
        for follower in self._followers:
            with suppress(OSError):  # it has ended
                os.write(_stdin(follower.process), f"end {END_S}\n".encode())
        for follower in self._followers:
            try:
                code = follower.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                code = None
            _kill_group(follower.process)  # and what it has started: W&B has a process of its own
            for kind, text in _answers(follower):
                self._take(follower, kind, text)
            if code != 0 and not follower.silent:
                what = "did not take all figures within" if code is None else "ended within"
                self._warn(f"PT558: {follower.name} {what} {END_S} s of the run's end; {self._later(follower)}")
            _close(follower.process)
        self._followers = []

    def _take(self, follower: _Follower, kind: str, text: str) -> None:
        if kind == "url":
            self._tell(f"{follower.name}: {text}")
        elif not follower.silent:
            follower.silent = True
            self._warn(f"PT557: {follower.name} was switched off: {text}; {self._later(follower)}")

    def _later(self, follower: _Follower) -> str:
        return f"partool report {self._run_dir.name} --to {follower.name} sends them from the event log"


def _require(name: str) -> None:
    """Raise ConfigurationError PT540 unless a tracker's package can be imported."""
    if importlib.util.find_spec(TRACKERS[name].package) is None:
        message = f"telemetry.trackers names {name}, whose package is not installed where rank 0 runs"
        fix = f"pip install 'partool[{name}]', or take {name} out of telemetry.trackers"
        raise ConfigurationError("PT540", message, fix)


def _start(plan: Plan, run_dir: Path, tracker: TrackerSpec) -> subprocess.Popen[bytes]:
    attempt = os.environ.get("PARTOOL_ATTEMPT", "1")
    log = run_dir / LOGS / f"attempt-{attempt}" / f"tracker-{tracker.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        process = subprocess.Popen(
            python_command(MODULE),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            process_group=0,  # a killed rank takes its group along, and this process sends the last figures
        )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    with suppress(OSError):  # it has ended already, which is noticed later
        os.write(_stdin(process), tracked_run(plan, run_dir, tracker).encode() + b"\n")
    return process


def _stdin(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    return process.stdin.fileno()


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        assert stream is not None
        stream.close()


def _answers(follower: _Follower) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of the lines that a process has written since the last call."""
    stream = follower.process.stdout
    assert stream is not None
    with suppress(BlockingIOError):
        while data := os.read(stream.fileno(), 1 << 16):
            follower.answers += data
        follower.ended = True
    *lines, follower.answers = follower.answers.split(b"\n")
    for line in lines:
        yield from json.loads(line).items()


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):  # the kernel may hold it, as in a read from a lost file server
        process.wait(1)
