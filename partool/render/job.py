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
    """Name of the Kubernetes object or the Slurm job: a DNS label of at most 44 characters."""
    run_dir: PurePosixPath
    """Absolute path of the run's folder, seen by all nodes of Slurm. Kubernetes uses ``launch.k8s.storage`` instead."""
    tasks: tuple[Plan, ...] = ()
    """For a Slurm array one plan per task, all of which request the same machines; empty if the job is no array."""
    at_once: int | None = None
    """Maximum number of tasks that may run at the same time; None sets no limit."""
    sizes: dict[int, Plan] = field(default_factory=dict)
    """Plans of an elastic job by their number of nodes; each of them has fewer nodes than ``plan``."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text files by name, relative to the run's folder."""

    main: str
    """Name of the file that is submitted and that ``partool render`` prints."""
    files: dict[str, str]
    by_hand: str = ""
    """Shell command that submits the files from the folder :data:`FOLDER`; empty if there is no such command."""

    @property
    def text(self) -> str:
        """Text of the submitted file."""
        return self.files[self.main]
