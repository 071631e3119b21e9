"""Checks a plan against the limits of accounts and QOS, which let a job wait for ever instead of refusing it.

Which limit counts, and what each means, is described in https://slurm.schedmd.com/resource_limits.html.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from partool.launch.slurm.client import call
from partool.launch.slurm.text import parse_duration
from partool.launch.target import Check
from partool.plan.posix import user_name
from partool.plan.types import Plan
from partool.spec.targets.slurm.rules import memory_bytes, time_s

_OF_BOTH = ("GrpTRES", "GrpTRESMins", "GrpJobs", "GrpSubmit", "GrpWall", "MaxTRES", "MaxTRESPerNode", "MaxTRESMins",
            "MaxWall")  # fmt: skip
ASSOCIATION = ("Account", "User", "Partition", "ParentName", "DefaultQOS", "QOS", "MaxJobs", "MaxSubmit", *_OF_BOTH)
QOS = ("Name", "Flags", "MinTRES", "MaxTRESPerUser", "MaxTRESPerAccount", "MaxJobsPU", "MaxJobsPA", "MaxSubmitPU",
       *_OF_BOTH)  # fmt: skip
"""Columns of sacctmgr, by the names that it takes since 21.08."""
_SAME = {"MaxJobsPU": "MaxJobs", "MaxSubmitPU": "MaxSubmit"}
"""Limit of a QOS → the limit of associations that it replaces, where the names differ."""
_FIELDS = {
    "node": "hardware.nodes", "gres/gpu": "hardware.nodes or hardware.per_node", "cpu": "launch.slurm.cpus_per_task",
    "mem": "launch.slurm.memory", "wall": "launch.slurm.time",
}  # fmt: skip
"""Resource → field of the spec that says how much of it a job asks for."""


@dataclass(frozen=True)
class JobRequest:
    """What a job asks for."""

    nodes: int
    per_node: dict[str, float] = field(default_factory=dict)
    """Amounts by Slurm's names of trackable resources (TRES); ``mem`` in MiB; unknown amounts are missing."""
    wall_s: float | None = None
    """Time limit; None if the partition decides."""

    @property
    def total(self) -> dict[str, float]:
        """Amounts on all nodes."""
        return {"node": float(self.nodes)} | {name: self.nodes * amount for name, amount in self.per_node.items()}


class LimitOwner(NamedTuple):
    """An association or a QOS, with its limits as sacctmgr prints them; limits that are not set are empty."""

    title: str
    limits: dict[str, str]
    is_qos: bool = False


def request_of(plan: Plan, cores: int, memory_mib: int) -> JobRequest:
    """Return what the job of a plan asks for, on nodes with so many cores and so much memory."""
    slurm, devices = plan.launch.slurm, plan.devices
    amounts: dict[str, float] = {}
    if devices.backend != "cpu" and slurm.gpus != "none":
        amounts["gres/gpu"] = devices.per_node
        if slurm.gpu_type:
            amounts[f"gres/gpu:{slurm.gpu_type}"] = devices.per_node
    if slurm.exclusive:
        amounts["cpu"] = cores
    elif slurm.cpus_per_task:
        amounts["cpu"] = slurm.cpus_per_task
    asked_bytes = memory_bytes(slurm.memory) if slurm.memory else 0.0
    if asked_bytes or slurm.exclusive:
        amounts["mem"] = asked_bytes / 2**20 or memory_mib
    return JobRequest(devices.nodes, amounts, float(time_s(slurm.time)) if slurm.time else None)


def limit_checks(plan: Plan, config: dict[str, str], partition: dict[str, str], request: JobRequest) -> Iterator[Check]:
    """Yield a check of the limits on a plan's job; ``partition`` is the record of its partition."""
    enforced = set(config.get("AccountingStorageEnforce", "").lower().split(","))
    if not enforced & {"limits", "safe", "all"}:
        yield Check("account limits", "ok", "this cluster does not enforce limits of accounts and QOS")
        return
    owners = list(_owners(plan, config.get("ClusterName", ""), partition))
    if not owners:
        yield Check("account limits", "skipped", "sacctmgr shows no association and no QOS of this user's job")
        return
    yield limits_check(owners, request, safe=bool(enforced & {"safe", "all"}))


def limits_check(owners: list[LimitOwner], request: JobRequest, *, safe: bool) -> Check:
    """Compare limits with a job; ``owners`` come in the order in which Slurm looks at them.

    A limit of a QOS replaces the same limit of what comes later. Among associations each limit on a group counts.
    ``safe`` says that a job starts only if its whole run stays within budgets of time.
    """
    problems: list[str] = []
    fields: list[str] = []
    replaced: set[tuple[str, str]] = set()
    for owner in owners:
        set_by_qos: set[tuple[str, str]] = set()
        for limit, text in owner.limits.items():
            for resource, value in _values(limit, text).items():
                key = _SAME.get(limit, limit), resource
                if key in replaced:
                    continue
                set_by_qos |= {key} if owner.is_qos else set()
                if said := _against(limit, resource, value, request, safe=safe):
                    problems.append(f"{owner.title}: {said}")
                    fields.append(_FIELDS.get(resource.rpartition(":")[0] or resource, ""))
        replaced |= set_by_qos
    names = ", ".join(owner.title for owner in owners)
    if not problems:
        return Check("account limits", "ok", f"nothing is against the job in {names}")
    change = " and ".join(dict.fromkeys(filter(None, fields)))
    help = (f"lower {change}, or " if change else "") + (
        "use another launch.slurm.account or qos: sacctmgr show associations user=$USER, sacctmgr show qos"
    )
    return Check("account limits", "failed", f"the job can never start: {'; '.join(problems)}", help)


def _values(limit: str, text: str) -> dict[str, float]:
    """Return a limit's values by resource: TRES of a list, ``wall`` in seconds, or ``jobs``."""
    if not text:
        return {}
    if "TRES" in limit:
        pairs = (part.partition("=") for part in text.split(","))
        return {name: number for name, _, value in pairs if (number := _number(value)) is not None}
    if "Wall" in limit:
        seconds = parse_duration(text)
        return {} if seconds is None else {"wall": seconds}
    return {"jobs": float(text)} if text.isdigit() and ("Jobs" in limit or "Submit" in limit) else {}


def _number(text: str) -> float | None:
    """Return a number of a TRES list; memory is in MiB, with or without a suffix."""
    if text[-1:] in "KMGT" and text[:-1].isdigit():
        return memory_bytes(text) / 2**20
    return float(text) if text.isdigit() else None


def _against(limit: str, resource: str, value: float, request: JobRequest, *, safe: bool) -> str:
    """Return why a job can never start under a limit; empty if it can."""
    if resource == "jobs":
        return f"{limit} is 0, which allows no job" if value == 0 else ""
    minutes = None if request.wall_s is None else request.wall_s / 60
    if resource == "wall":
        too_long = request.wall_s is not None and request.wall_s > value and (limit != "GrpWall" or safe)
        return f"{limit} is {_minutes(value)} min, launch.slurm.time is {_minutes(request.wall_s or 0)} min" * too_long
    asked = (request.per_node if limit == "MaxTRESPerNode" else request.total).get(resource)
    if asked is None:
        return ""
    unit = " MiB" if resource == "mem" else ""
    if limit.endswith("Mins"):
        if minutes is None or (limit.startswith("Grp") and not safe) or asked * minutes <= value:
            return ""
        return f"{limit} of {resource} is {value:,.0f}, the job asks for {asked:g} x {minutes:g} min"
    if limit == "MinTRES":
        return f"{limit} of {resource} is {value:g}{unit}, the job asks for {asked:g}{unit}" if asked < value else ""
    if asked <= value:
        return ""
    where = " on each node" if limit == "MaxTRESPerNode" else ""
    return f"{limit} of {resource} is {value:g}{unit}, the job asks for {asked:g}{unit}{where}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g}"


def _owners(plan: Plan, cluster: str, partition: dict[str, str]) -> Iterator[LimitOwner]:
    """Yield the partition's QOS, the job's QOS, the user's association, and the accounts above it."""
    slurm = plan.launch.slurm
    account = slurm.account or os.environ.get("SBATCH_ACCOUNT") or _default_account()
    row = next(iter(_associations(cluster, account, user_name(), partition.get("PartitionName", ""))), None)
    listed = [] if row is None else row["QOS"].split(",")
    name = slurm.qos or os.environ.get("SBATCH_QOS") or (row["DefaultQOS"] if row else "")
    name = name or ("normal" if "normal" in listed else listed[0] if len(listed) == 1 else "")
    of_partition = partition.get("QoS", "N/A")
    wanted = [each for each in (of_partition, name) if each not in ("", "N/A", "(null)")]
    qos_rows = {each["Name"]: each for each in _table("qos", QOS, ",".join(wanted))} if wanted else {}
    if "OverPartQOS" in qos_rows.get(name, {}).get("Flags", ""):
        wanted.reverse()
    for each in dict.fromkeys(wanted):
        if each in qos_rows:
            yield LimitOwner(f"QOS {each}", _limits(qos_rows[each]), is_qos=True)
    if row is not None:
        yield LimitOwner(f"{row['User']} in account {account}", _limits(row))
    seen: set[str] = set()
    while account and account not in seen:
        seen.add(account)
        row = next(iter(_associations(cluster, account, "", "")), None)
        if row is None:
            return
        yield LimitOwner(f"account {account}", {k: v for k, v in _limits(row).items() if k.startswith("Grp")})
        account = row["ParentName"]


def _limits(row: dict[str, str]) -> dict[str, str]:
    """Return the limits of a row, without names and lists; a user's row already has what accounts pass on to it."""
    others = ("Name", "Flags", "Account", "User", "Partition", "ParentName", "DefaultQOS", "QOS")
    return {name: text for name, text in row.items() if name not in others}


def _associations(cluster: str, account: str, user: str, partition: str) -> list[dict[str, str]]:
    """Return a user's associations with an account, or the account's own; those with the partition come first."""
    where = [f"cluster={cluster}"] * bool(cluster) + [f"account={account}", f"user={user}"]
    rows = [row for row in _table("associations", ASSOCIATION, *where) if row["Partition"] in ("", partition)]
    return sorted(rows, key=lambda row: not row["Partition"])


def _default_account() -> str:
    rows = _table("user", ("DefaultAccount",), user_name())
    return rows[0]["DefaultAccount"] if rows else ""


def _table(what: str, columns: tuple[str, ...], *where: str) -> list[dict[str, str]]:
    """Return sacctmgr's rows; none if the user may not see them."""
    command = ["sacctmgr", "--noheader", "--parsable2", "show", what, *where, f"format={','.join(columns)}"]
    answer = call(command)
    if answer.code:
        return []
    rows = (line.split("|") for line in answer.out.splitlines())
    return [dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns)]
