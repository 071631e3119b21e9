"""Turns messages of sbatch into findings that show the rejected limit or name, and the spec's field that sets it."""

from __future__ import annotations

import re
from typing import NamedTuple

from partool.diagnostics.record import Diagnostic
from partool.launch.slurm.text import last_words
from partool.plan.types import Plan


class _Known(NamedTuple):
    sign: str
    """Part of sbatch's message (src/common/slurm_errno.c) that identifies the refusal; case is ignored."""
    field: str
    """Name of the field of ``launch.slurm`` or of ``hardware`` that sets the refused value."""
    help: str


_KNOWN = (
    _Known("partition name", "partition", "sinfo -s lists the partitions"),
    _Known("invalid partition specified", "partition", "sinfo -s lists the partitions"),
    _Known("no partition specified or system default partition", "partition", "sinfo -s lists the partitions"),
    _Known("account or account/partition combination", "account", "sacctmgr show associations user=$USER lists yours"),
    _Known("invalid account", "account", "sacctmgr show associations user=$USER lists yours"),
    _Known("invalid qos", "qos", "sacctmgr show associations user=$USER format=account,qos lists yours"),
    _Known("job violates accounting/qos policy", "qos", "sacctmgr show qos shows the limits; ask for less"),
    _Known("time limit is invalid", "time", "scontrol show partition shows MaxTime; write a shorter launch.slurm.time"),
    _Known("invalid --time", "time", "write it as D-HH:MM:SS"),
    _Known("node count specification", "nodes", "the partition has fewer nodes, or allows fewer: sinfo -s"),
    _Known("more processors requested", "cpus_per_task", "sinfo -o '%n %c' shows the cores of each node"),
    _Known("reservation is invalid", "reservation", "scontrol show reservation lists those that there are"),
    _Known("access denied to requested reservation", "reservation", "scontrol show reservation says who may use it"),
    _Known("feature specification", "constraint", "sinfo -o '%N %f' shows the features of the nodes"),
    _Known("invalid node name", "nodelist", "sinfo -N lists the nodes"),
    _Known("license", "options", "scontrol show licenses lists them"),
    _Known(
        "generic resource", "gpus", "sinfo -o '%N %G' shows what the nodes have; see launch.slurm.gpus and gpu_type"
    ),
    _Known("unrecognized option", "options", "this Slurm, or its plug-ins, has no such option: sbatch --help"),
    _Known("invalid option", "options", "this Slurm, or its plug-ins, has no such option: sbatch --help"),
    _Known("memory specification", "memory", "sinfo -o '%n %m' shows the MiB of each node"),
    _Known("mutually exclusive", "options", "take one of them out of launch.slurm.options"),
    _Known("batch script contains dos line breaks", "options", "write the script with Unix line ends"),
    _Known("dependency", "options", "squeue shows the jobs that it may name"),
)


def refusal(text: str, plan: Plan) -> Diagnostic:
    """Return sbatch's complaint as a finding (PT551)."""
    said = _said(text)
    complaint = next((each for each in _KNOWN if each.sign in text.lower()), None)
    if "requested node configuration is not available" in text.lower():
        return Diagnostic("PT551", f"Slurm refuses the job: {said}", path=("hardware",), help=_machines(plan))
    if complaint is None:
        help = "the words are sbatch's own; partool doctor --target slurm tries the likely causes one by one"
        return Diagnostic("PT551", f"Slurm refuses the job: {said or 'it does not say why'}", help=help)
    section = ("hardware",) if complaint.field == "nodes" else ("launch", "slurm")
    value = plan.devices.nodes if complaint.field == "nodes" else getattr(plan.launch.slurm, complaint.field, None)
    shown = "" if value in (None, {}, "") else f" ({'.'.join((*section, complaint.field))} is {_short(value)})"
    return Diagnostic(
        "PT551", f"Slurm refuses the job: {said}{shown}", path=(*section, complaint.field), help=complaint.help
    )


def refusal_of_script(text: str) -> tuple[str, str]:
    """Return sbatch's complaint about a user's script, and a hint."""
    complaint = next((each for each in _KNOWN if each.sign in text.lower()), None)
    return f"Slurm refuses the script: {_said(text) or 'it does not say why'}", complaint.help if complaint else ""


def estimate(text: str) -> str:
    """Return a text on when and where ``sbatch --test-only`` expects the job to start; empty if unknown."""
    # 22.05 prints "Job 9 to start at T using ..."; from 23.02 on, an "a" follows the time.
    match = re.search(r"to start at (\S+)(?: a)? using (\d+) processors on nodes (\S+) in partition (\S+)", text)
    if match is None:
        return ""
    when, cores, nodes, partition = match.groups()
    return f"would start at {when.replace('T', ' ')} on {nodes} ({partition}, {cores} cores)"


def _said(text: str) -> str:
    reason = re.search(r"(?:allocation failure|Batch job submission failed): (.+)", text)
    if reason is None:
        return last_words(text)
    # an earlier error line may name the rejected value: "invalid partition specified: nope"
    named = re.search(r"error: (.*specified: \S+)", text)
    return f"{reason[1].strip()}: {named[1].rpartition(': ')[2]}" if named else reason[1].strip()


def _machines(plan: Plan) -> str:
    slurm, devices = plan.launch.slurm, plan.devices
    asks = [f"{devices.nodes} node(s)"]
    if devices.backend != "cpu" and slurm.gpus != "none":
        asks.append(f"{devices.per_node} GPU(s) {slurm.gpu_type or ''}".rstrip() + f" each ({slurm.gpus})")
    if slurm.cpus_per_task:
        asks.append(f"{slurm.cpus_per_task} cores each")
    if slurm.memory:
        asks.append(f"{slurm.memory} of memory each")
    return f"no nodes have {', '.join(asks)}; sinfo -o '%P %D %c %m %G' shows what there is"


def _short(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={text}" if text else str(name) for name, text in value.items())
    return str(value)
