"""Renders a plan as shell commands, one for each node, that users start by hand."""

from __future__ import annotations

from pathlib import Path

from partool.plan.run import PLAN_FILE, agent_command
from partool.render.job import FOLDER, Job, Rendered
from partool.render.shell import quote, template, variables

SCRIPT = "commands.sh"
PORT = 29500
"""Port on the first node to which the other nodes connect; the variable PARTOOL_PORT replaces it."""


def render(job: Job) -> Rendered:
    """Return a script with one command per node, and the file with the plan.

    Raises UnsafeValueError for a value that contains a NUL.
    """
    if job.program is not None:
        return Rendered(job.program.script, {**job.program.files, PLAN_FILE: job.plan.to_json()})
    devices = job.plan.devices
    text = template("torchrun.sh.jinja").render(
        job=job,
        launch=job.plan.launch,
        devices=devices,
        variables=variables(job.plan),
        commands=[_command(job, node) for node in range(devices.nodes)],
        port=PORT,
    )
    by_hand = f"bash {FOLDER}/{SCRIPT}"
    if devices.nodes > 1:
        by_hand += f" NODE HEAD, on each node with its number from 0 to {devices.nodes - 1} and the name of node 0"
    return Rendered(SCRIPT, {SCRIPT: text, PLAN_FILE: job.plan.to_json()}, by_hand)


def _command(job: Job, node: int) -> str:
    """Return the agent's command on a node as shell words.

    Values that are known only on the node appear as variables of the script.
    """
    several = job.plan.devices.nodes > 1
    agent = agent_command(
        job.plan.launch.python or "\0python",
        Path("\0folder/plan.json"),
        Path("\0run"),
        resume=True,
        plan_hash=job.plan.hash,
        nodes=job.plan.devices.nodes if several else None,
        node_rank=node if several else None,
        rendezvous="\0rendezvous" if several else None,
    )
    return " ".join(f'"${word[1:]}"' if word.startswith("\0") else quote(word) for word in agent)
