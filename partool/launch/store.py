"""Stores the runs that this machine has launched, each in one folder under ``PARTOOL_HOME`` or ``./.partool``."""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from partool.plan.record import Record, UnixTime, damage
from partool.plan.run import (
    PLAN_FILE,
    SPEC_FILE,
    STATUS_FILE,
    RunStatus,
    process_start,
    read_status,
    this_process,
    write_status,
)
from partool.plan.types import Plan
from partool.spec._base import OneOf
from partool.spec.patterns import RunName, fits
from partool.strategies.targets import SCHEDULERS

SUBMISSION_FILE = "submission.json"
_LONGEST_NAME = 32
"""Maximum length of the name in a cluster's run id: names of objects add up to 31 characters, and 63 are allowed."""
_ID = re.compile(r"(?P<name>.+)-(\d{8}-\d{6}-[0-9a-f]{4}|[0-9a-f]{8}(-\d+)?)")


class RunNotFoundError(LookupError):
    """No run, or more than one, matches the user's query; the message lists the runs."""


class Submission(Record):
    """Contents of ``submission.json``: the data by which a run can be found at its scheduler."""

    target: Annotated[str, OneOf(SCHEDULERS)]
    submitted: UnixTime
    """Unix time of the submission."""
    main: str
    """Name of the submitted file, in the run's folder."""
    details: dict[str, str]
    """What the target's ``submit`` returned, such as the job id."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder."""

    path: Path

    @property
    def id(self) -> str:
        """``<name>-YYYYmmdd-HHMMSS-xxxx`` in UTC; for a run on a cluster ``<name>-<hash of its plan>[-number]``."""
        return self.path.name

    @property
    def name(self) -> str:
        """Name of the spec that the run was launched from."""
        match = _ID.fullmatch(self.id)
        return match["name"] if match else self.id

    def goes_by(self, name: str) -> bool:
        """Return True if the run was launched from a spec called ``name``, even if the run's id shortens the name."""
        return self.name in (name, _shortened(name))

    @property
    def plan_file(self) -> Path:
        """Path of the run's plan."""
        return self.path / PLAN_FILE

    def submission(self) -> Submission | None:
        """Return the record of the submission; None for a run on this machine. Raises ``pydantic.ValidationError``."""
        try:
            return Submission.model_validate_json((self.path / SUBMISSION_FILE).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None

    def status(self) -> RunStatus:
        """Return the status in the run's file; if an active run's agent no longer exists, the run counts as failed.

        For a run on another host, the file's status is returned. A run without a readable status counts as failed.
        """
        try:
            status = read_status(self.path)
        except OSError:
            return RunStatus(state="failed", created=0.0, reason="no readable status.json")
        except ValueError as error:  # errors of pydantic and of UTF-8 are ValueErrors
            return RunStatus(state="failed", created=0.0, reason=f"no readable status.json: {damage(error)}")
        if not status.active or status.pid is None or status.host != socket.gethostname():
            return status
        if process_start(status.pid) == status.process_start:
            return status
        try:
            status = read_status(self.path)  # the agent may have ended properly between the two checks
        except (OSError, ValueError):  # errors of pydantic and of UTF-8 are ValueErrors
            return status
        return status.model_copy(update={"state": "failed", "reason": "agent gone"}) if status.active else status

    def give_up(self, reason: str) -> None:
        """Record that the run could not be started."""
        ended = {"state": "failed", "ended": time.time(), "reason": reason}
        write_status(self.path, read_status(self.path).model_copy(update=ended))

    def write_plan(self, plan: Plan, spec_text: str | None) -> dict[Path, Path]:
        """Write the plan and spec of the next launch; earlier files are kept under names such as ``plan-1.json``.

        Returns a mapping from each replaced file to the file with its earlier content, for :meth:`take_back`.
        """
        texts = {self.path / PLAN_FILE: plan.to_json()}
        if spec_text is not None:
            texts[self.path / SPEC_FILE] = spec_text
        return {file: kept for file, text in texts.items() if (kept := _put(file, text)) is not None}

    def take_back(self, replaced: dict[Path, Path]) -> None:
        """Restore the earlier plan and spec, because the run cannot continue with the new plan."""
        for file, kept in replaced.items():
            kept.replace(file)


class RunStore:
    """All runs under a root folder."""

    def __init__(self, home: Path | None = None) -> None:
        self.root = (home or Path(os.environ.get("PARTOOL_HOME", ".partool"))).absolute() / "runs"

    def create(self, name: str) -> Run:
        """Make the folder of a new run; two simultaneous calls make two folders.

        Raises ValueError for an invalid name: ``..`` would lead out of the store.
        """
        _check(name)
        self.root.mkdir(parents=True, exist_ok=True)
        while True:
            created = time.time()
            stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(created))
            run = Run(self.root / f"{name}-{stamp}-{secrets.token_hex(2)}")
            try:
                run.path.mkdir()
            except FileExistsError:
                continue
            write_status(run.path, RunStatus.model_validate({"state": "starting", "created": created} | this_process()))
            return run

    def submitted(self, name: str, plan_hash: str) -> list[Run]:
        """Return the submitted runs of a plan, sorted by their numbers; raises ValueError."""
        _check(name)
        stem = f"{_shortened(name)}-{plan_hash[:8]}"
        submitted_runs: list[Run] = []
        while (self.root / (run_id := stem if not submitted_runs else f"{stem}-{len(submitted_runs) + 1}")).is_dir():
            submitted_runs.append(Run(self.root / run_id))
        return submitted_runs

    def next_submitted(self, name: str, plan_hash: str) -> Run:
        """Return the run that the next submission of a plan will get; does not make the run's folder.

        The id depends only on the plan and its earlier submissions, so that a repeated attempt gets the same id. The id
        has at most 44 characters and is a DNS label.
        """
        number = len(self.submitted(name, plan_hash)) + 1
        stem = f"{_shortened(name)}-{plan_hash[:8]}"
        return Run(self.root / (stem if number == 1 else f"{stem}-{number}"))

    def runs(self) -> list[Run]:
        """Return all runs, the newest first."""
        if not self.root.is_dir():
            return []
        all_runs = [Run(folder) for folder in self.root.iterdir() if folder.is_dir()]
        return sorted(all_runs, key=lambda run: (run.status().created, run.id), reverse=True)

    def find(self, query: str) -> Run:
        """Return the run that ``query`` selects; for a name, the newest run with this name.

        ``query`` is an id or the beginning of one id, ``last``, a name, or the path of a run's folder.

        Raises RunNotFoundError.
        """
        runs = self.runs()
        if query == "last" and runs:
            return runs[0]
        if named := [run for run in runs if run.id == query] or [run for run in runs if run.goes_by(query)]:
            return named[0]
        folder = Path(query)
        if (folder / STATUS_FILE).is_file():
            return Run(folder.absolute())
        matches = [run for run in runs if run.id.startswith(query)]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise RunNotFoundError(f"{query!r} is the beginning of {len(matches)} runs: {_ids(matches)}")
        if not runs:
            raise RunNotFoundError(
                f"no run {query!r}: there are no runs in {self.root}; they are kept where they were launched from, "
                "or where PARTOOL_HOME points"
            )
        raise RunNotFoundError(f"no run {query!r} in {self.root}; there are {_ids(runs)}")


def _check(name: str) -> None:
    if not fits(RunName, name):
        raise ValueError(f"{name!r} cannot be the name of a run")


def _shortened(name: str) -> str:
    """Return ``name`` shortened for a run id on a cluster; it begins with a letter, as names of Services must."""
    return (name if name[:1].isalpha() else f"run-{name}")[:_LONGEST_NAME].rstrip("-")


def _put(file: Path, text: str) -> Path | None:
    """Write a file and keep its old content under the next free number.

    Returns the path of the old content; None if there was no old content to keep.
    """
    kept: Path | None = None
    if file.exists():
        if file.read_text(encoding="utf-8") == text:
            return None
        kept = file.rename(_free_number(file))
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
    return kept


def _free_number(file: Path) -> Path:
    number = 1
    while (candidate := file.with_name(f"{file.stem}-{number}{file.suffix}")).exists():
        number += 1
    return candidate


def _ids(runs: list[Run]) -> str:
    shown = ", ".join(run.id for run in runs[:5])
    return shown + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")
