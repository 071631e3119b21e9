"""``partool report --to``: sends a run's figures to a tracker afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from partool.cli._fail import fail
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.strategies.trackers import TRACKERS

_ENVIRONMENT = 3

if TYPE_CHECKING:
    TrackerChoice = str
else:
    TrackerChoice = Literal[tuple(TRACKERS)]
    """Choices for typer; type checkers reject a Literal of names defined elsewhere."""


def upload_or_exit(run_dir: Path, plan: Plan, name: str) -> None:
    """Send what a tracker has not got of a run, and say where it is; the command ends with 3 if that fails."""
    from partool.launch.upload import UploadError, upload

    try:
        url = upload(run_dir, plan, name)
    except UploadError as error:
        fail(error.code, str(error), error.help, _ENVIRONMENT)
    say(f"partool: {name} has the figures of {run_dir.name}" + (f": {url}" if url else ""), err=True)
