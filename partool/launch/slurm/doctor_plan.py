"""Checks of a plan against a Slurm cluster: partition, nodes, account, QOS, containers."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from partool.launch.slurm.client import call
from partool.launch.slurm.doctor_limits import limit_checks, request_of
from partool.launch.slurm.text import parse_duration, parse_record
from partool.launch.target import Check
from partool.plan.posix import user_name
from partool.plan.types import Plan
from partool.planner.stopping import forecast
from partool.process import interpreter

_KILL_WAIT_S = 30
"""Slurm's default of KillWait (slurm.conf(5))."""
_UNUSABLE = ("down", "drain", "fail", "maint", "unknown", "inval")


@dataclass(frozen=True, slots=True)
class Node:
    """A node as ``sinfo`` reports it."""

    name: str
    gres: str
    cores: int
    memory_mib: int
    state: str

    def gpus(self, kind: str | None) -> int:
        """Return the number of the node's GPUs of the type ``kind``; None counts all types."""
        entries = re.findall(r"gpu(?::([A-Za-z_][\w.-]*))?:(\d+)", self.gres)
        return sum(int(count) for name, count in entries if kind in (None, name))


def plan_checks(plan: Plan, config: dict[str, str]) -> Iterator[Check]:
    """Yield checks that compare the plan's requests with the cluster."""
    records = parse_record(call(["scontrol", "--all", "show", "partition", "--oneliner"]).out)
    yield from partition_checks(plan, records)
    name = _partition(plan, records)
    yield from grace_checks(plan, config, next((each for each in records if each.get("PartitionName") == name), {}))
    command = ["sinfo", "--noheader", "--Node", "--format=%N|%G|%c|%m|%T"]
    answer = call([*command, f"--partition={name}"] if name else command)
    nodes = parse_nodes(answer.out)
    yield nodes_check(plan, nodes)
    yield _rights(plan, config)
    if _accounting(config):
        record = next((record for record in records if record.get("PartitionName") == name), {})
        fitting = with_devices(plan, nodes)
        cores = min((node.cores for node in fitting), default=1)
        memory_mib = min((node.memory_mib for node in fitting), default=0)
        yield from limit_checks(plan, config, record, request_of(plan, cores, memory_mib))
    yield from _container(plan)
    yield from _on_the_nodes(plan)


def partition_checks(plan: Plan, records: list[dict[str, str]]) -> Iterator[Check]:
    """Compare the plan's nodes and time with a partition's limits; ``records`` are from ``scontrol show partition``."""
    wanted = _partition(plan, records)
    partition = next((record for record in records if record.get("PartitionName") == wanted), None)
    if partition is None:
        names = ", ".join(sorted(record.get("PartitionName", "") for record in records))
        text = f"there is no partition {wanted!r}" if wanted else "there is no default partition"
        yield Check("partition", "failed", text, f"launch.slurm.partition: one of {names}")
        return
    problems = [text for text in _over(plan, partition) if text]
    if problems:
        help = f"scontrol show partition {wanted} shows the limits; another partition may allow it"
        yield Check("partition", "failed", f"{wanted}: {'; '.join(problems)}", help)
    else:
        limits = f"at most {partition.get('MaxTime')}, {partition.get('TotalNodes')} nodes"
        yield Check("partition", "ok", f"{wanted}: {limits}")


def _over(plan: Plan, record: dict[str, str]) -> Iterator[str]:
    slurm, nodes = plan.launch.slurm, plan.devices.nodes
    if record.get("State", "UP") != "UP":
        yield f"it is {record['State']}"
    if nodes > (most := _limit(record, "MaxNodes")):
        yield f"hardware.nodes is {nodes}, the limit is {most:g}"
    if nodes > (total_nodes := _limit(record, "TotalNodes")):
        yield f"hardware.nodes is {nodes}, it has {total_nodes:g}"
    longest = parse_duration(record.get("MaxTime", ""))
    asked = parse_duration(slurm.time) if slurm.time else None
    if longest is not None and asked is not None and asked > longest:
        yield f"launch.slurm.time is {slurm.time}, the limit is {record['MaxTime']}"
    for field, name in (("AllowAccounts", "account"), ("AllowQos", "qos")):
        allowed, value = record.get(field, "ALL"), getattr(slurm, name)
        if value and allowed not in ("ALL", "N/A") and value not in allowed.split(","):
            yield f"launch.slurm.{name} is {value}; it takes {allowed}"


def _limit(record: dict[str, str], name: str) -> float:
    text = record.get(name, "")
    return float(text) if text.isdigit() else float("inf")


def _partition(plan: Plan, records: list[dict[str, str]]) -> str:
    chosen = plan.launch.slurm.partition or os.environ.get("SBATCH_PARTITION")
    default = next((record["PartitionName"] for record in records if record.get("Default") == "YES"), "")
    return chosen or default


def parse_nodes(text: str) -> list[Node]:
    """Return the nodes in the output of ``sinfo --Node --format='%N|%G|%c|%m|%T'``, each node once."""
    nodes = {}
    for line in text.splitlines():
        name, gres, cores, memory, state = [*line.split("|"), "", "", "", ""][:5]
        if cores.rstrip("+").isdigit() and memory.rstrip("+").isdigit():
            nodes[name] = Node(name, gres, int(cores.rstrip("+")), int(memory.rstrip("+")), state)
    return list(nodes.values())


def with_devices(plan: Plan, nodes: list[Node]) -> list[Node]:
    """Return the nodes that have the devices that the plan requests per node."""
    return [node for node in nodes if node.gpus(plan.launch.slurm.gpu_type) >= _devices_per_node(plan)]


def _devices_per_node(plan: Plan) -> int:
    asks = plan.devices.backend != "cpu" and plan.launch.slurm.gpus != "none"
    return plan.devices.per_node if asks else 0


def nodes_check(plan: Plan, nodes: list[Node]) -> Check:
    """Check whether enough nodes have the resources that the plan requests per node."""
    slurm, devices = plan.launch.slurm, plan.devices
    wanted, with_gpus = _devices_per_node(plan), with_devices(plan, nodes)
    kind = f" of type {slurm.gpu_type}" if slurm.gpu_type else ""
    if wanted and len(with_gpus) < devices.nodes:
        have = ", ".join(sorted({node.gres for node in nodes})) or "no nodes"
        text = f"{len(with_gpus)} node(s) have {wanted} GPUs{kind}; the plan wants {devices.nodes} (there is: {have})"
        return Check("nodes", "failed", text, "write hardware.per_node and launch.slurm.gpu_type as the nodes are")
    fitting = [node for node in with_gpus if node.cores >= (slurm.cpus_per_task or 1)]
    if len(fitting) < devices.nodes:
        text = f"{len(fitting)} node(s) would do; the plan wants {devices.nodes}"
        return Check("nodes", "failed", text, "sinfo -N -l shows the nodes; write a smaller hardware.nodes")
    up = [node for node in fitting if not any(word in node.state for word in _UNUSABLE)]
    what = f"{wanted} GPUs{kind}" if wanted else f"{min(node.cores for node in fitting)} cores or more"
    if len(up) < devices.nodes:
        text = f"{len(fitting)} node(s) with {what}, of which only {len(up)} are up now"
        return Check("nodes", "warning", text, "the job would wait; sinfo -R says why nodes are down")
    return Check("nodes", "ok", f"{len(up)} node(s) with {what} are up; the plan takes {devices.nodes}")


def _rights(plan: Plan, config: dict[str, str]) -> Check:
    slurm = plan.launch.slurm
    if not _accounting(config):
        named = [f"{name} {value}" for name in ("account", "qos") if (value := getattr(slurm, name))]
        what = " and ".join(named) or "account and QOS"
        return Check("rights", "skipped", f"{what} cannot be looked up: there is no accounting here")
    options = [
        "--noheader",
        "--parsable2",
        "show",
        "associations",
        f"user={user_name()}",
        "format=account,partition,qos",
    ]
    rows = [line.split("|") for line in call(["sacctmgr", *options]).out.splitlines() if line.count("|") == 2]
    return rights_check(slurm.account, slurm.qos, rows)


def _accounting(config: dict[str, str]) -> bool:
    """Return whether accounts and QOS can be looked up here."""
    kind = config.get("AccountingStorageType", "")
    return bool(kind) and not kind.endswith("/none") and shutil.which("sacctmgr") is not None


def rights_check(account: str | None, qos: str | None, rows: list[list[str]]) -> Check:
    """Check whether a user's associations allow an account and a QOS; each row names an account, partition and QOS."""
    accounts = sorted({row[0] for row in rows})
    if account and account not in accounts:
        have = f"yours: {', '.join(accounts)}" if accounts else "you have none"
        return Check("rights", "failed", f"no account {account}; {have}", "launch.slurm.account")
    allowed = sorted({name for row in rows if account in (None, row[0]) for name in row[2].split(",") if name})
    if qos and qos not in allowed:
        text = f"no QOS {qos}" + (f" with account {account}" if account else "") + f"; yours: {', '.join(allowed)}"
        return Check("rights", "failed", text, "launch.slurm.qos")
    return Check("rights", "ok", f"accounts {', '.join(accounts) or 'none'}; QOS {', '.join(allowed) or 'none'}")


def _container(plan: Plan) -> Iterator[Check]:
    kind = plan.launch.slurm.container
    if kind == "pyxis":
        if "--container-image" in call(["srun", "--help"]).out:
            yield Check("pyxis", "ok", "srun knows --container-image")
        else:
            help = "ask the site for pyxis, or use launch.slurm.container: apptainer"
            yield Check("pyxis", "failed", "srun does not know --container-image: the plug-in is not installed", help)
    elif kind == "apptainer":
        path = shutil.which("apptainer") or shutil.which("singularity")
        help = "it may still be there on the nodes, where a module in launch.slurm.setup can load it"
        yield Check("apptainer", "ok" if path else "warning", path or "not in PATH here", help)


def _on_the_nodes(plan: Plan) -> Iterator[Check]:
    slurm = plan.launch.slurm
    python = plan.launch.python or ("python in the image" if slurm.container != "none" else interpreter())
    text = f"{python}: whether the nodes have it, with partool, cannot be seen from here"
    yield Check("python", "skipped", text, "srun -n1 " + python + " -P -c 'import partool_runtime'")
    if slurm.setup and not Path(slurm.setup).exists():
        text = f"{slurm.setup} is not here; the nodes must have it"
        yield Check("setup", "warning", text, "put it on a file system that all nodes share")


def grace_checks(plan: Plan, config: dict[str, str], partition: dict[str, str]) -> Iterator[Check]:
    """Check whether a preempted job of ``partition`` has time for a step and a checkpoint; nothing without preemption.

    ``config`` is from ``scontrol show config``, ``partition`` a record of ``scontrol show partition``. A preempted job
    has the partition's GraceTime; where that is 0, it has KillWait between SIGTERM and SIGKILL (slurm.conf(5)).
    """
    kind = config.get("PreemptType", "").rpartition("/")[2]
    modes = config.get("PreemptMode", ""), partition.get("PreemptMode", "")
    if kind in ("", "none", "(null)") or "OFF" in modes:
        return
    grace_s = _seconds(partition.get("GraceTime", ""))
    field, given_s = ("GraceTime", grace_s) if grace_s else ("KillWait", _seconds(config.get("KillWait", "")))
    expected = forecast(plan)
    text = f"a preempted job has {given_s or _KILL_WAIT_S} s ({field})"
    if (given_s or _KILL_WAIT_S) >= expected.stop_s:
        yield Check("grace", "ok", f"{text}, a step and its checkpoint may take {expected.stop_s} s")
        return
    text += f", and a stop may take {expected.stop_s} s: {expected.stop_words}"
    help = (
        f"each preemption can lose {expected.loss}: a shorter checkpoint.every loses less, or ask for a GraceTime of "
        f"{expected.window_s}"
    )
    yield Check("grace", "warning", text, help)


def _seconds(text: str) -> int:
    """Return the number at the beginning of a setting such as ``30 sec``; 0 if there is none."""
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0
