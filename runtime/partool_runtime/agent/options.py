"""The agent's command line, parsed strictly because schedulers often pass a variable that was never expanded."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn, cast

from partool.plan.types import Plan
from partool_runtime.errors import ConfigurationError

Echo = Literal["rank0", "all", "none"]


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Position of this agent among the agents of a run."""

    nodes: int = 1
    node_rank: int = 0
    host: str = ""
    """Address of node 0, as the other nodes see it; empty for one node."""
    port: int = 0

    @property
    def several(self) -> bool:
        """True if there are other nodes."""
        return self.nodes > 1


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """The command line of an agent."""

    plan: Path
    run_dir: Path
    resume: bool = False
    plan_hash: str | None = None
    place: AgentPlace = AgentPlace()
    echo: Echo = "rank0"
    termination_log: Path | None = None


class _Parser(argparse.ArgumentParser):
    """Parser that raises an error instead of exiting: schedulers would restart the job after argparse's exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError("PT581", message, self.format_usage().strip())


def parse(argv: Sequence[str] | None) -> AgentOptions:
    """Parse the command line; raises ConfigurationError PT581 for invalid options."""
    parser = _Parser(prog="python -m partool_runtime.agent", description="Starts the ranks of a plan on this node.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    parser.add_argument("--plan-hash", metavar="HASH", help="refuse a plan that is not this one")
    parser.add_argument("--nodes", metavar="N", help="number of nodes, one agent on each (default: 1)")
    parser.add_argument("--node-rank", metavar="K", help="number of this node, from 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="where node 0 is, and the port it listens on")
    parser.add_argument("--echo", choices=("rank0", "all", "none"), default="rank0", help="ranks' output to show")
    parser.add_argument("--termination-log", type=Path, metavar="FILE", help="where a failure is summed up")
    read = parser.parse_args(argv)
    return AgentOptions(
        plan=read.plan,
        run_dir=read.run_dir,
        resume=read.resume,
        plan_hash=read.plan_hash,
        place=place(read.nodes, read.node_rank, read.rendezvous),
        echo=cast(Echo, read.echo),
        termination_log=read.termination_log,
    )


def place(nodes: str | None, node_rank: str | None, rendezvous: str | None) -> AgentPlace:
    """Return the place that the options describe; raises ConfigurationError PT581 if they are not valid."""
    if nodes is None and node_rank is None and rendezvous is None:
        return AgentPlace()
    if nodes is None:
        raise ConfigurationError("PT581", "--node-rank and --rendezvous need --nodes", "--nodes N of the plan")
    count = _number("--nodes", nodes)
    if count < 1:
        raise ConfigurationError("PT581", f"--nodes is {count}, a run has at least one node", "--nodes N of the plan")
    if count == 1 and node_rank is None and rendezvous is None:
        return AgentPlace()
    if node_rank is None:
        raise ConfigurationError("PT581", f"--nodes {count} needs --node-rank", f"--node-rank 0 to {count - 1}")
    rank = _number("--node-rank", node_rank)
    if rank >= count:
        message = f"--node-rank is {rank}, with --nodes {count} it goes from 0 to {count - 1}"
        raise ConfigurationError("PT581", message, "one agent per node, numbered from 0")
    if rendezvous is None:
        if count == 1:
            return AgentPlace()
        message, fix = f"--nodes {count} needs --rendezvous", "--rendezvous HOST:PORT, with the host of node 0"
        raise ConfigurationError("PT581", message, fix)
    host, port = _endpoint(rendezvous)
    return AgentPlace(count, rank, host, port)


def check_plan(plan: Plan, place: AgentPlace, plan_hash: str | None) -> None:
    """Raise ConfigurationError PT580, PT582 or PT506 if ``plan`` is not the intended plan or is for other nodes."""
    if plan_hash is not None and plan.hash != plan_hash:
        message = f"the plan is {plan.hash[:12]}, the one meant is {plan_hash[:12] or '(empty)'}"
        raise ConfigurationError("PT580", message, "give every node the plan.json that was rendered with this command")
    devices, world_size = plan.devices, plan.layout.mesh.world_size
    if devices.nodes != place.nodes and not place.several:
        message = f"the plan is for {devices.nodes} nodes, this agent was started for one"
        each = f"python -P -m partool_runtime.agent PLAN --run-dir DIR --nodes {devices.nodes}"
        fix = f"on each node: {each} --node-rank K --rendezvous HOST:PORT   (HOST: node 0); or set hardware.nodes to 1"
        raise ConfigurationError("PT582", message, fix)
    if devices.nodes != place.nodes:
        planned = f"{devices.nodes} nodes" if devices.nodes > 1 else "one node"
        message = f"the plan is for {planned}, --nodes is {place.nodes}"
        raise ConfigurationError("PT582", message, "make the plan for the nodes that there are: hardware.nodes")
    if devices.nodes * devices.per_node != world_size:
        of_hardware = f"{devices.nodes} x {devices.per_node}" if place.several else f"{devices.per_node}"
        message = f"the plan's mesh has {world_size} ranks, its hardware {of_hardware}"
        raise ConfigurationError("PT506", message, "make the plan again: partool plan --out")


def _number(option: str, text: str) -> int:
    """Return the whole number (0 or more) that ``text`` holds; raises ConfigurationError for any other text."""
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    if not text.strip():
        raise ConfigurationError("PT581", f"{option} is empty", "the variable it comes from is not set on this node")
    if "$" in text:
        message = f"{option} is {text!r}: a variable that was not expanded"
        raise ConfigurationError("PT581", message, _unexpanded(text))
    raise ConfigurationError("PT581", f"{option} is {text!r}, no number", f"{option} takes a whole number from 0")


def _unexpanded(text: str) -> str:
    if text.startswith("$("):
        return "Kubernetes expands $(NAME) where the container has the variable; JOB_COMPLETION_INDEX: Indexed Jobs"
    return "let a shell expand it on the node itself: srun bash -c '... --node-rank \"$SLURM_NODEID\"'"


def _endpoint(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT`` or ``[IPV6]:PORT``."""
    fix = "--rendezvous HOST:PORT, such as node-0:29500 or [fd00::1]:29500"
    if "$" in text:
        raise ConfigurationError("PT581", f"--rendezvous is {text!r}: a variable that was not expanded", fix)
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):([0-9]{1,5})", text)
    if match is None:
        raise ConfigurationError("PT581", f"--rendezvous is {text!r}, not HOST:PORT", fix)
    port = int(match[3])
    if not 1 <= port <= 65535:
        raise ConfigurationError("PT581", f"--rendezvous is {text!r}: there is no port {port}", fix)
    return match[1] or match[2], port
