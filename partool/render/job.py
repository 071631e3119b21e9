"""Input and output of the renderers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

from partool.plan.types import Plan

LOG_FOLDER = "logs"
TASK_FOLDER = "task-{index}"
"""Folder of an array task's run within the job's folder."""
FOLDER = "\0folder"
"""Placeholder in ``Rendered.by_hand`` for the folder with the written files; no real path has a zero byte."""
SIZE_PLAN = "plan-{nodes}-nodes.json"
"""Name of the plan for fewer nodes, within the job's folder."""


@dataclass(frozen=True, slots=True)
class Job:
    """A plan to run under a name and in a folder, both of which appear in the rendered text."""

    plan: Plan
    run_id: str
    """At most 44 characters of a DNS label: name of the Kubernetes object and of the Slurm job."""
    run_dir: PurePosixPath
    """Absolute path. Slurm: the run's folder, seen by all nodes. Kubernetes: unused, see ``launch.k8s.storage``."""
    tasks: tuple[Plan, ...] = ()
    """Slurm array: one plan per task; all request the same machines. Empty: no array."""
    at_once: int | None = None
    """Tasks that may run at the same time."""
    sizes: dict[int, Plan] = field(default_factory=dict)
    """Elastic: plans by number of nodes, all smaller than the plan's."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text files by name, relative to the run's folder."""

    main: str
    """Name of the file that is submitted, and printed by ``partool render``."""
    files: dict[str, str]
    by_hand: str = ""
    """Shell command that submits the files from the folder :data:`FOLDER` they were written to; empty: none."""

    @property
    def text(self) -> str:
        """Text of the submitted file."""
        return self.files[self.main]
