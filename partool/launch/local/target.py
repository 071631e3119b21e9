"""Target for the local machine: the agent is a child of the launcher or, with ``detach``, an independent process."""

from __future__ import annotations

import importlib.util
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from partool.catalog.machine import missing_devices
from partool.launch import logs
from partool.launch.checkpoints import checkpoint_folder, complete
from partool.launch.describe import errors_as_text
from partool.launch.store import Run, RunStore
from partool.launch.target import LaunchError, LogLine, LogQuery, Target
from partool.launch.telling import telling
from partool.plan.posix import no_ranks
from partool.plan.run import (
    LOGS,
    PLAN_FILE,
    SPEC_FILE,
    RunStatus,
    agent_command,
    agent_log,
    process_start,
    rank_command,
    rank_environment,
    read_status,
    write_status,
)
from partool.plan.types import Plan
from partool.strategies.targets import SCHEDULERS

_FORWARDED = tuple(
    number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGUSR2", "SIGHUP")
)  # without those that this system lacks
_START_TIMEOUT_S = 30.0


class LocalTarget:
    """Target for runs on this machine."""

    def check(self, plan: Plan | None = None) -> None:
        """Raise LaunchError if torch is missing (training needs it, although partool itself does not), or a device."""
        if reason := no_ranks():
            fix = f"launch it there, or render it here with --target {' or '.join(SCHEDULERS)}"
            raise LaunchError("PT519", reason, fix, exit_code=3)
        if importlib.util.find_spec("torch") is None:
            message, fix = "training needs torch, which is not installed", "pip install 'partool[train]'"
            raise LaunchError("PT501", message, fix, exit_code=3)
        if plan is not None and (reason := self.missing(plan)):
            fix = f"launch it where the accelerators are, or with --target {' or '.join(SCHEDULERS)}"
            raise LaunchError("PT513", reason, fix, exit_code=3)

    def missing(self, plan: Plan) -> str:
        """Return why this machine lacks the devices of a plan; empty if it may have them. Imports no torch."""
        wanted = plan.devices
        reason = missing_devices(wanted.backend, 1 if wanted.slice else wanted.per_node)
        return reason and f"the plan is for {wanted.per_node} x {wanted.accelerator}, and {reason}"

    def describe(self, plan: Plan, run: Run | None, *, resume: bool, step: int | None = None) -> str:
        """Return shell commands that show the files, environment and command lines of a launch."""
        run_dir = run.path if run else RunStore().root / f"{plan.name}-<time>-<random>"
        aside = []
        if run is not None and step is not None:
            later = [path for at, path in complete(checkpoint_folder(run, plan)).items() if at > step]
            aside = [f"{path}  (kept aside)" for path in later]
        agent = agent_command(None, run_dir / PLAN_FILE, run_dir, resume=resume)
        rank = rank_command(run_dir / PLAN_FILE, run_dir, resume=resume, module="partool_runtime.worker")
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(rank_environment(plan).items())]
        last = plan.devices.per_node - 1
        of_ranks = f"RANK=0..{last} LOCAL_RANK=0..{last} WORLD_SIZE={plan.devices.per_node} PARTOOL_ATTEMPT=1.."
        return "\n".join(
            [
                "# files",
                f"{run_dir}/{PLAN_FILE}  (hash {plan.hash[:12]})",
                f"{run_dir}/{SPEC_FILE}",
                *aside,
                f"# agent: up to {plan.launch.restarts} restarts, {plan.launch.window_s} s to checkpoint",
                _shell(agent),
                f"# {plan.devices.per_node} ranks, started by the agent",
                " ".join(["env", *variables, of_ranks, "MASTER_ADDR=127.0.0.1 MASTER_PORT=<free>", "\\"]),
                "  " + _shell(rank),
            ]
        )

    def launch(self, run: Run, plan: Plan, stops: Stops, *, resume: bool, detach: bool) -> int | None:
        """Start the agent and return its exit code; with ``detach``, return None without waiting for its end.

        While this method waits, stop signals are forwarded to the agent.
        """
        command = agent_command(None, run.plan_file, run.path, resume=resume)
        if detach:
            self._detach(run, command)
            return None
        environment = os.environ | {"PARTOOL_LAUNCHER_PID": str(os.getpid())}
        # In a separate process group, so that a terminal's Ctrl-C reaches the agent once, forwarded by this process.
        agent = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0)
        stops.go_to(agent)
        code = agent.wait()
        _settle(run, code)
        return code

    def status(self, run: Run) -> RunStatus:
        """Return the run's status from its folder and the process table."""
        return run.status()

    def cancel(self, run: Run, *, now: bool) -> bool:
        """Send the agent SIGTERM; with ``now``, also send SIGINT, which makes the agent stop without a checkpoint.

        Raises LaunchError PT514 for a run on another machine, where this machine's process numbers do not apply.
        """
        status = run.status()
        if not status.active or status.pid is None:
            return False
        if status.host != socket.gethostname():
            raise LaunchError("PT514", f"{run.id} runs on {status.host}", "cancel it there", exit_code=3)
        if process_start(status.pid) != status.process_start:
            return False
        with suppress(ProcessLookupError):
            os.kill(status.pid, signal.SIGTERM)
            if now:
                os.kill(status.pid, signal.SIGINT)
            return True
        return False

    def logs(self, run: Run, query: LogQuery) -> Iterator[LogLine]:
        """Yield lines of the ranks' output; raises NoLogsError."""

        def agents() -> list[Path]:
            attempts = [query.attempt] if query.attempt else range(1, run.status().attempt + 1)
            return [path for attempt in attempts if (path := agent_log(run.path, attempt)).exists()]

        return logs.read(run, query, run.status, agents)

    def errors(self, run: Run) -> str:
        """Return the error records of all ranks as text."""
        return errors_as_text(run.path)

    def _detach(self, run: Run, command: list[str]) -> None:
        """Start the agent in a separate session and wait until it has taken over the run."""
        log = run.path / LOGS / "agent.out"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            agent = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + _START_TIMEOUT_S
        while agent.poll() is None and read_status(run.path).pid != agent.pid:
            if time.monotonic() > end:
                agent.kill()
                raise LaunchError("PT507", f"the agent did not start within {_START_TIMEOUT_S:g} s", f"see {log}")
            time.sleep(0.05)
        if agent.returncode:
            last_message = telling(log.read_text(encoding="utf-8", errors="replace"))
            _settle(run, agent.returncode, last_message)
            message = f"the agent ended at once with exit code {agent.returncode}" + (
                f": {last_message}" if last_message else ""
            )
            raise LaunchError("PT507", message, f"see {log}")


def _settle(run: Run, code: int, last_message: str = "") -> None:
    """Write the final status of a run whose agent could not write it; ``last_message`` is the agent's last message."""
    status = read_status(run.path)
    if status.active:
        reason = f"the agent was killed by {signal.Signals(-code).name}" if code < 0 else "the agent could not start"
        reason += f": {last_message}" if last_message else ""
        ended = {"state": "failed", "exit_code": code, "ended": time.time(), "reason": reason}
        write_status(run.path, status.model_copy(update=ended))


class Stops:
    """Forwards stop signals to a process; signals that arrive before the process exists are stored."""

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def go_to(self, process: subprocess.Popen[bytes]) -> None:
        """Send the process the stored signals, and later signals as they arrive."""
        self._process = process
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        while self.waiting:
            self.handle(self.waiting.pop(0), None)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: pass the signal on to the process, or store it if the process does not exist yet."""
        if self._process is None:
            self.waiting.append(number)
        elif self._process.returncode is None:
            self._process.send_signal(number)


@contextmanager
def stops_held_back() -> Iterator[Stops]:
    """Store the stop signals that arrive once a run is created and announced, until the run's process can receive them.

    The signals are also blocked. The new process inherits the block, so no signal reaches it before it can handle
    signals; the agent lifts the block. Signals that are still stored at the end are sent to this process.
    """
    stops = Stops()
    nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in _FORWARDED if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, stops.handle) for number in numbers}
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    try:
        yield stops
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        for number, handler in before.items():
            signal.signal(number, handler)
        for signal_number in stops.waiting:
            os.kill(os.getpid(), signal_number)


def _shell(command: list[str]) -> str:
    return shlex.join(command)


TARGET: type[Target] = LocalTarget
