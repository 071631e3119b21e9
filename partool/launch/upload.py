"""Sends the figures of a run's event log to a tracker, in the process that follows runs for that tracker."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

from partool.plan.run import LOGS
from partool.plan.tracking import tracked_run
from partool.plan.types import Plan
from partool.process import python_command
from partool.spec.telemetry import TrackerSpec
from partool.strategies.trackers import TRACKERS


class UploadError(Exception):
    """The figures were not sent."""

    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code = code
        self.help = help


def upload(run_dir: Path, plan: Plan, name: str) -> str:
    """Send what the tracker has not got, and return where people see the run; empty if the tracker does not say.

    The spec's ``telemetry`` section names the run there. Raises UploadError.
    """
    if importlib.util.find_spec(TRACKERS[name].package) is None:
        raise UploadError("PT540", f"{name} is not installed here", f"pip install 'partool[{name}]'")
    named = [tracker for tracker in plan.telemetry.trackers if tracker.name == name]
    run = tracked_run(plan, run_dir, named[0] if named else TrackerSpec(name=name))
    log = run_dir / LOGS / f"tracker-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        process = subprocess.run(
            python_command("partool_runtime.trackers"),
            input=f"{run}\nend\n".encode(),
            stdout=subprocess.PIPE,
            stderr=stream,
            check=False,
        )
    answers: dict[str, str] = {}
    for line in process.stdout.splitlines():
        answers |= json.loads(line)
    if process.returncode:
        why = answers.get("problem", f"its process ended with exit code {process.returncode}")
        raise UploadError("PT557", f"{name}: {why}", f"{log} has what it said")
    return answers.get("url", "")
