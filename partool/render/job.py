"""What the renderers take and give."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

from partool.plan.types import Plan

LOG_FOLDER = "logs"
TASK_FOLDER = "task-{index}"
"""Folder of an array task's run within the job's folder."""
FOLDER = "\0folder"
"""Stands in ``Rendered.by_hand`` for the folder that the files were written to; no path has a zero byte."""
SIZE_PLAN = "plan-{nodes}-nodes.json"
"""Plan for fewer nodes within the job's folder."""


@dataclass(frozen=True, slots=True)
class Job:
    """A plan that is to run under a name in a folder; both are part of what is rendered."""

    plan: Plan
    run_id: str
    """At most 44 characters of a DNS label: name of the Kubernetes object and of the Slurm job."""
    run_dir: PurePosixPath
    """Absolute. Slurm: the run's folder, seen by all nodes. Kubernetes: unused, see ``launch.k8s.storage``."""
    tasks: tuple[Plan, ...] = ()
    """Slurm array: one plan per task, which all ask for the same machines; empty: no array."""
    at_once: int | None = None
    """Tasks that may run at the same time."""
    sizes: dict[int, Plan] = field(default_factory=dict)
    """Elastic: plans by number of nodes, all smaller than the plan's."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text files by name, relative to the run's folder."""

    main: str
    """The one that is submitted, and printed by ``partool render``."""
    files: dict[str, str]
    by_hand: str = ""
    """Shell command that submits the files from :data:`FOLDER`, where they were written to; empty: none."""

    @property
    def text(self) -> str:
        """The submitted file."""
        return self.files[self.main]
