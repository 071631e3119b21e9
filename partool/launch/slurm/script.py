"""Prepares a script for sbatch: chooses the environment of sbatch, and tests whether sbatch would accept the script."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import PurePosixPath

from partool.launch.slurm.client import call
from partool.launch.slurm.refusal import estimate, refusal
from partool.launch.store import RunStore
from partool.launch.target import LaunchError, Level
from partool.plan.types import Plan
from partool.render.job import Job, Rendered
from partool.render.render import render

# Site-wide defaults, used for options that the script does not set. All other SBATCH_ variables would silently
# override the script (sbatch(1), input environment variables), and SLURM_ variables belong to another job.
_DEFAULTS = {
    "SBATCH_ACCOUNT": "account", "SBATCH_PARTITION": "partition", "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation", "SBATCH_CONSTRAINT": "constraint", "SBATCH_CLUSTERS": "clusters",
}  # fmt: skip
_KEPT = ("SLURM_CONF", "SLURM_ROOT", "SLURM_JWT")


def tried(plan: Plan) -> Level:
    """Render a plan as a Slurm job and let sbatch check the job without submitting it."""
    run = RunStore().next_submitted(plan.name, plan.hash)
    job = Job(plan, run.id, PurePosixPath(run.path))
    return test_only(job, render("slurm", job))


def test_only(job: Job, rendered: Rendered) -> Level:
    """Check a rendered job with ``sbatch --test-only``; it queues nothing."""
    name = "sbatch --test-only"
    try:
        answer = call(["sbatch", "--test-only"], text=rendered.text, environment=environment_of(rendered.text))
    except LaunchError as error:
        return Level(name, False, error.message)
    if answer.code:
        return Level(name, True, findings=(refusal(answer.err, job.plan),))
    return Level(name, True, estimate(answer.err))


def environment_of(script: str) -> dict[str, str]:
    """Return this process' environment without variables that would silently change the job."""
    given = {line.removeprefix("#SBATCH --").partition("=")[0] for line in script.splitlines() if "#SBATCH --" in line}
    others = ("SBATCH_", "SLURM_", "SLURMD_", "SRUN_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others) or name in _KEPT}
    return kept | defaults_in_use(given)


def defaults_in_use(given: Set[str]) -> dict[str, str]:
    """Return this process's variables that set sbatch options, except the options ``given``, which the script sets."""
    return {name: os.environ[name] for name, option in _DEFAULTS.items() if name in os.environ and option not in given}
