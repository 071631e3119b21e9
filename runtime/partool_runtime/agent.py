"""Starts the ranks of a plan on this node: ``python -m partool_runtime.agent PLAN --run-dir DIR [--resume]``.

Exit codes: 0 done; 75 every rank stopped on request after a checkpoint; 78 configuration error, never retry; 1
anything else. SIGTERM, SIGUSR2, SIGHUP and the first SIGINT ask the ranks to checkpoint and stop; a second SIGINT
kills them.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from partool.plan.run import LOCK_FILE, RunStatus, State, read_status, this_process, write_status
from partool.plan.types import Plan
from partool_runtime import _report
from partool_runtime._lifeline import end_with_parent
from partool_runtime._supervision import Supervision
from partool_runtime.errors import EXIT_CONFIGURATION, EXIT_DONE, EXIT_PREEMPTED, ConfigurationError
from partool_runtime.worker import load_plan

_STATES: dict[int, State] = {EXIT_DONE: "done", EXIT_PREEMPTED: "preempted"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the agent and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m partool_runtime.agent", description="Starts the ranks of a plan.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the run's folder")
    arguments = parser.parse_args(argv)
    return run_agent(arguments.plan, arguments.run_dir, resume=arguments.resume)


def run_agent(plan_file: Path, run_dir: Path, *, resume: bool, worker: str = "partool_runtime.worker") -> int:
    """Start a rank per device of the plan's node, as ``python -m worker``, and see it through.

    Returns the exit code; messages go to standard error, the state to ``status.json``. To be called from the main
    thread, once per process.
    """
    signals: list[signal.Signals] = []
    with _stop_signals(signals):
        if launcher := os.environ.pop("PARTOOL_LAUNCHER_PID", None):
            end_with_parent(int(launcher), signal.SIGTERM)
        run_dir.mkdir(parents=True, exist_ok=True)
        try:
            with _lock(run_dir):
                return _run(plan_file.resolve(), run_dir.resolve(), resume, worker, signals)
        except ConfigurationError as error:
            print(f"partool: {error}", file=sys.stderr)
            return EXIT_CONFIGURATION


def _run(plan_file: Path, run_dir: Path, resume: bool, worker: str, signals: list[signal.Signals]) -> int:
    keeper = _StatusKeeper(run_dir)
    try:
        plan = load_plan(plan_file)
        _check_size(plan)
        supervision = Supervision(plan.launch.shutdown_timeout_s, signals)
        # torch is imported only now: a signal or a bad plan is dealt with before that second has passed
        from partool_runtime._elastic import run_ranks

        run_ranks(
            plan,
            plan_file,
            run_dir,
            resume=resume,
            worker=worker,
            supervision=supervision,
            next_attempt=keeper.next_attempt,
        )
    except ConfigurationError as error:
        keeper.end(EXIT_CONFIGURATION, str(error).splitlines()[0])
        raise
    except BaseException as error:
        keeper.end(1, f"{type(error).__name__} in the agent: {error}")
        raise
    summary = _report.summarise(run_dir, keeper.status.attempt, supervision)
    keeper.end(supervision.exit_code, summary.reason)
    if summary.text:
        with contextlib.suppress(OSError):  # the terminal may have been closed; status and errors are in files
            print(summary.text, file=sys.stderr, flush=True)
    return supervision.exit_code


def _check_size(plan: Plan) -> None:
    devices, world_size = plan.devices, plan.layout.mesh.world_size
    if devices.nodes != 1:
        raise ConfigurationError(
            "PT506", f"the plan is for {devices.nodes} nodes; the local agent runs one", "set hardware.nodes to 1"
        )
    if devices.per_node != world_size:
        message = f"the plan's mesh has {world_size} ranks, its hardware {devices.per_node}"
        raise ConfigurationError("PT506", message, "make the plan again: partool plan --out")


class _StatusKeeper:
    """Keeps ``status.json`` up to date."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        try:
            before = read_status(run_dir)
        except FileNotFoundError:
            before = RunStatus(state="starting", created=time.time())
        now = {"started": time.time(), "ended": None, "exit_code": None, "reason": ""}
        self.status = before
        self._write(state="starting", **now, **this_process())

    def next_attempt(self) -> int:
        """Note that the ranks are being started (again); returns the number of this attempt, from 1."""
        self._write(state="running", attempt=self.status.attempt + 1)
        return self.status.attempt

    def end(self, exit_code: int, reason: str) -> None:
        self._write(state=_STATES.get(exit_code, "failed"), exit_code=exit_code, reason=reason, ended=time.time())

    def _write(self, **changes: object) -> None:
        self.status = self.status.model_copy(update=changes)
        write_status(self._run_dir, self.status)


@contextmanager
def _stop_signals(received: list[signal.Signals]) -> Iterator[None]:
    """Collect stop signals in ``received``; a launcher may have blocked them until now."""

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    numbers = [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, note) for number in numbers}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _lock(run_dir: Path) -> Iterator[TextIO]:
    """Hold the run's folder for this process; the kernel lets go of it however the process ends."""
    with (run_dir / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                "PT504", f"another agent is at work in {run_dir}", "partool status shows it"
            ) from None
        yield file


if __name__ == "__main__":
    sys.exit(main())
