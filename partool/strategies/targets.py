"""Targets on which specs can launch runs, one record each; the records state how the targets differ.

The code for a target is in packages of its name in ``partool.spec.targets`` (its section and rules),
``partool.render`` (the text that is submitted) and ``partool.launch`` (submission, status, logs, doctor).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Starter = Literal["here", "by hand", "scheduler"]


@dataclass(frozen=True)
class TargetRecord:
    """Facts about a target, the place where a run starts."""

    words: str
    """One-line description."""
    starter: Starter
    """What starts the ranks. here: partool, on this machine; by hand: the user, with commands that partool renders."""
    test: str
    """Test that trains through the target, or runs the commands that the target renders."""
    section: bool = False
    """True: specs can have a section ``launch.<name>``, and rules check this section."""
    containers: bool = False
    """True: the target can start ``launch.image``."""
    sees_files: bool = True
    """True: ranks see the launcher's folders, so secrets come from files, and a run's folder has its checkpoints.
    False: secrets and storage are named objects of the cluster."""
    arrays: bool = False
    """True: one job can run several plans (``--array``)."""
    fixed_nodes: str = "its jobs have as many nodes as they ask for"
    """Text with the reason why ``launch.min_nodes`` is not possible; empty if the number of nodes can change."""
    comes_back: str = "when somebody starts it again"
    """Text that says how a preempted run is restarted; empty if ``launch.requeues`` limits the restarts."""
    restart_count: str = ""
    """Variable of a job's environment that counts how often the scheduler has started the job again; empty if the
    scheduler counts in none."""
    job_script: bool = False
    """True: jobs are scripts, so that ``partool doctor`` can check a user's own script."""
    definitions: bool = False
    """True: jobs are objects whose definitions can be read from a folder (``--crds``)."""


TARGETS: dict[str, TargetRecord] = {
    "local": TargetRecord(
        "the ranks of this machine, started by partool", "here",
        "tests/launch/test_agent_trainer.py::test_every_way_of_stopping_and_going_on",
        fixed_nodes="one machine has one node",
    ),
    "torchrun": TargetRecord(
        "one command per node, for people who start nodes by hand", "by hand",
        "tests/unit/render/test_render_hostile.py::test_harm_in_every_field",
        fixed_nodes="whoever starts the nodes decides how many there are",
    ),
    "slurm": TargetRecord(
        "a job of Slurm, submitted with sbatch", "scheduler", "tests/launch/test_slurm_cluster.py::test_to_the_end",
        section=True, containers=True, arrays=True, job_script=True, fixed_nodes="", comes_back="",
        restart_count="SLURM_RESTART_COUNT",
    ),
    "k8s": TargetRecord(
        "objects of Kubernetes: a JobSet or another kind, and a ConfigMap with the plan", "scheduler",
        "tests/launch/test_k8s_training.py::test_over_a_killed_rank_and_an_evicted_pod_to_the_end",
        section=True, containers=True, sees_files=False, definitions=True, comes_back="without a limit",
        fixed_nodes="a JobSet of changing size is behind an alpha gate that is off by default (JobSet 0.12)",
    ),
}  # fmt: skip
"""Name of a target in specs → facts about the target."""

HERE = next(name for name, record in TARGETS.items() if record.starter == "here")
SCHEDULERS = tuple(name for name, record in TARGETS.items() if record.starter == "scheduler")
SECTIONS = tuple(name for name, record in TARGETS.items() if record.section)
CONTAINERS = tuple(name for name, record in TARGETS.items() if record.containers)
RESIZABLE = tuple(name for name, record in TARGETS.items() if not record.fixed_nodes)
ARRAYS = tuple(name for name, record in TARGETS.items() if record.arrays)
JOB_SCRIPTS = tuple(name for name, record in TARGETS.items() if record.job_script)
DEFINITIONS = tuple(name for name, record in TARGETS.items() if record.definitions)
