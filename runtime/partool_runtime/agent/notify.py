"""Tells people that a run has ended, failed or stalled: ``launch.notify``, sent by the agent of the first node.

Each notification is a process of its own: the user's command, or :mod:`partool_runtime.agent.webhook`. The agent waits
for them only at its end, and not longer than :data:`NOTIFY_S`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from partool.plan.event_log import event_log, last_events
from partool.plan.outline import outline
from partool.plan.run import LOGS, RunStatus, agent_log
from partool.plan.terminal import say
from partool.process import python_command
from partool.spec.launch import NotifySpec, Occasion

NOTIFY_S = 10.0
"""Seconds that the agent waits at its end for notifications."""
NOTIFY_LOG = "notify.log"
"""Name of the file in ``logs/`` with what commands print."""
_MOST_BYTES = 32_000
"""Bytes of a notification; a pipe takes them (64 KiB) whether somebody reads or not."""
_WEBHOOK = "partool_runtime.agent.webhook"


class Notifier:
    """Sends the notifications of one agent; a failure to send is one warning in the agent's log."""

    def __init__(self, plan_file: Path, run_dir: Path) -> None:
        """Nothing is sent if the plan names nobody, or cannot be read."""
        self._run_dir = run_dir
        self._spec: NotifySpec | None = None
        self._name = ""
        with contextlib.suppress(OSError, ValueError):  # said by whoever reads the plan to run it
            parts = outline(plan_file)
            self._spec, self._name = parts.launch.notify, parts.name
        self._running: list[subprocess.Popen[bytes]] = []
        self._stalled_attempt = 0
        self._attempt = 0

    def stalled(self, status: RunStatus, reason: str) -> None:
        """Send, once in an attempt, that a rank makes no progress; returns at once."""
        if status.attempt != self._stalled_attempt:
            self._stalled_attempt = status.attempt
            self._send("stall", status, reason)

    def ended(self, status: RunStatus) -> None:
        """Send that the run has ended, and wait for all notifications, at most :data:`NOTIFY_S` seconds."""
        self._send("failure" if status.state == "failed" else "end", status, status.reason)
        deadline = time.monotonic() + NOTIFY_S
        for process in self._running:
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self._warn(f"not taken within {NOTIFY_S:g} s")
                continue
            if code:
                self._warn(f"exit code {code}; {self._log} has what it said")
        self._running = []

    @property
    def _log(self) -> Path:
        return self._run_dir / LOGS / NOTIFY_LOG

    def _send(self, occasion: Occasion, status: RunStatus, reason: str) -> None:
        self._attempt = status.attempt
        if self._spec is None or occasion not in self._spec.on:
            return
        text = json.dumps(self._facts(occasion, status, reason))
        command = self._spec.command
        if command is None:
            address = self._spec.webhook or os.environ.get(self._spec.webhook_env or "")
            if not address:
                self._warn(f"the variable {self._spec.webhook_env} is not set where the agent runs")
                return
            command, text = python_command(_WEBHOOK), f"{address.strip()}\n{text}"
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0)
        except OSError as error:
            self._warn(f"{error.filename or command[0]}: {error.strerror}")
            return
        self._running.append(process)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # the command reads nothing
            process.stdin.write(text.encode())
        with contextlib.suppress(OSError):
            process.stdin.close()

    def _facts(self, occasion: Occasion, status: RunStatus, reason: str) -> dict[str, Any]:
        """Return what is told of the run."""
        run, reason = self._run_dir.name, reason.encode()[: _MOST_BYTES // 8].decode(errors="ignore")
        step, loss = last_loss(self._run_dir)
        words = {"end": f"is {status.state}", "failure": "failed", "stall": "makes no progress"}[occasion]
        return {
            "event": occasion,
            "run": run,
            "name": self._name,
            "state": status.state,
            "reason": reason,
            "attempt": status.attempt,
            "step": step,
            "loss": loss,
            "exit_code": status.exit_code,
            "run_dir": str(self._run_dir),
            "host": socket.gethostname(),
            "time": time.time(),
            "text": f"{run} {words}" + (f" after step {step}" if step else "") + (f": {reason}" if reason else ""),
        }

    def _warn(self, why: str) -> None:
        warning = f"PT559: a notification of launch.notify was not delivered: {why}"
        text = f"partool: warning: {warning}"
        with contextlib.suppress(OSError):  # the terminal may have been closed
            say(text, err=True)
        with contextlib.suppress(OSError):
            log = agent_log(self._run_dir, self._attempt)
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("a", encoding="utf-8") as file:
                file.write(text + "\n")


def last_loss(run_dir: Path) -> tuple[int | None, float | None]:
    """Return the last step of rank 0's event log and its loss; None where there is none."""
    steps = [event["data"] for event in last_events(event_log(run_dir, 0)) if event["kind"] == "step"]
    data = steps[-1] if steps else {}
    return data.get("step"), data.get("loss")
