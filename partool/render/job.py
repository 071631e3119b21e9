"""Input and output of the renderers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

from partool.plan.types import Plan

LOG_FOLDER = "logs"
TASK_FOLDER = "task-{index}"
"""Name of the folder, within the job's folder, that holds the run of an array task."""
FOLDER = "\0folder"
"""Placeholder in ``Rendered.by_hand`` for the folder with the rendered files; no real path has a zero byte."""
SIZE_PLAN = "plan-{nodes}-nodes.json"
"""Name of the file, within the job's folder, that holds an elastic job's plan for fewer nodes."""


@dataclass(frozen=True, slots=True)
class EngineProgram:
    """Another training system's files, and the script among them that each node runs."""

    script: str
    """Name of a bash script; it reads NODE_RANK, MASTER_ADDR and MASTER_PORT, and starts the node's ranks."""
    files: dict[str, str]
    """Text of each file by name, the script included."""
    needs: tuple[str, ...] = ()
    """Variables without which the script needs arguments, which pods do not give it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A plan to run, with the run's name and folder; both appear in the rendered text."""

    plan: Plan
    run_id: str
    """Name of the Kubernetes object or the Slurm job: a DNS label of at most 44 characters."""
    run_dir: PurePosixPath
    """Absolute path of the run's folder, visible to all Slurm nodes. Kubernetes uses ``launch.k8s.storage`` instead."""
    tasks: tuple[Plan, ...] = ()
    """Plans of a Slurm array's tasks, one per task, all for the same machines; empty if the job is no array."""
    at_once: int | None = None
    """Maximum number of tasks that may run at the same time; None sets no limit."""
    sizes: dict[int, Plan] = field(default_factory=dict)
    """Number of nodes → plan of an elastic job; each number is smaller than the number of nodes of ``plan``."""
    program: EngineProgram | None = None
    """What the nodes run in place of partool's agent; None if partool trains the plan."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """Text files to write into the run's folder, by relative path."""

    main: str
    """Name of the file that is submitted and that ``partool render`` prints."""
    files: dict[str, str]
    by_hand: str = ""
    """Shell command that submits or starts the files from the folder :data:`FOLDER`; empty if there is no such
    command. A remark may follow it."""

    @property
    def text(self) -> str:
        """Text of the submitted file."""
        return self.files[self.main]
