"""A plan as commands that people start by hand, one on each node."""

from __future__ import annotations

import sys
from pathlib import Path

from partool.plan.run import PLAN_FILE, agent_command
from partool.render.job import Job, Rendered
from partool.render.shell import quote, template, variables

SCRIPT = "commands.sh"
PORT = 29500
"""Of the first node, where the others meet it; the variable PARTOOL_PORT replaces it."""


def render(job: Job) -> Rendered:
    """Return a script with one command per node, and the plan that lies beside it.

    Raises UnsafeValueError for a value with a NUL in it.
    """
    launch = job.plan.launch
    own = {"PLAN": '"$folder/plan.json"'}
    agent = agent_command(launch.python or sys.executable, Path("PLAN"), Path(job.run_dir), resume=True)
    words = [own.get(word) or quote(word) for word in agent]
    text = template("torchrun.sh.jinja").render(
        job=job,
        launch=launch,
        devices=job.plan.devices,
        variables=variables(job.plan),
        command=" ".join([*words, "--plan-hash", job.plan.hash]),
        port=PORT,
    )
    return Rendered(SCRIPT, {SCRIPT: text, PLAN_FILE: job.plan.to_json()})
