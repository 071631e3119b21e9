"""Rules of ``launch.slurm``: options that are fields already, and times."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.launch import LaunchSpec
from partool.spec.launch_units import LEAD_BEYOND_SHUTDOWN_S, lead_s, time_s

_MOST_LEAD_S = 65535
_PATH = ("launch", "slurm")

_FIELDS = {
    "partition": "partition", "account": "account", "qos": "qos", "reservation": "reservation",
    "constraint": "constraint", "nodelist": "nodelist", "nodefile": "nodelist", "exclude": "exclude", "time": "time",
    "mem": "memory", "mem-per-cpu": "memory", "mem-per-gpu": "memory", "exclusive": "exclusive",
    "oversubscribe": "exclusive", "cpus-per-task": "cpus_per_task", "cpus-per-gpu": "cpus_per_task",
    "signal": "signal_lead_s", "gres": "gpus", "gpus": "gpus", "gpus-per-node": "gpus",
    "tres-per-task": "gpus", "container": "container",
}  # fmt: skip
"""Options of sbatch → the field of ``launch.slurm`` that writes them."""
_OTHERS = {
    "nodes": "hardware.nodes says how many",
    "ntasks": "there is one task per node, which starts the ranks",
    "ntasks-per-node": "there is one task per node, which starts the ranks",
    "ntasks-per-core": "there is one task per node, which starts the ranks",
    "ntasks-per-gpu": "there is one task per node, which starts the ranks",
    "ntasks-per-socket": "there is one task per node, which starts the ranks",
    "overcommit": "there is one task per node, which starts the ranks",
    "gpus-per-task": "write launch.slurm.gpus; on a task that starts several ranks it hides devices from them",
    "gpus-per-socket": "write launch.slurm.gpus",
    "gpu-bind": "the ranks of a node bind themselves to devices (launch.numa); a binding of the task hides devices",
    "job-name": "the run's id is the job's name; write name: at the top of the spec",
    "output": "logs go to the run's folder; partool logs shows them",
    "error": "logs go to the run's folder; partool logs shows them",
    "open-mode": "a requeued job appends to its log",
    "chdir": "the job runs in the run's folder",
    "comment": "partool writes it, to find its jobs again",
    "requeue": "write launch.requeues and launch.restarts",
    "no-requeue": "write launch.requeues: 0 and launch.restarts: 0",
    "array": "partool launch --array KEY=A,B,C makes one",
    "export": "write launch.env",
    "export-file": "write launch.env",
    "get-user-env": "write launch.slurm.setup",
    "wrap": "partool writes the script",
    "wait": "use partool launch --follow",
    "test-only": "use partool launch --dry-run",
    "parsable": "partool reads sbatch's answer itself",
    "quiet": "partool reads sbatch's answer itself",
    "clusters": "set SBATCH_CLUSTERS for partool launch; status, logs and cancel remember it",
}
_NEVER = ("container-", "no-container-")
"""Options of the plug-in pyxis: in the header they move the batch script itself into the container (pyxis #107)."""


def options(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Refuse options that partool writes itself, from fields of the spec."""
    for name in launch.slurm.options:
        # getopt_long takes any beginning of a name that is the only one: --nod=7 is --nodes=7
        meant = next((known for known in (*_FIELDS, *_OTHERS) if known == name), None) or next(
            (known for known in (*_FIELDS, *_OTHERS) if known.startswith(name)), ""
        )
        if meant in _FIELDS:
            help = f"write launch.slurm.{_FIELDS[meant]}"
        elif meant in _OTHERS:
            help = _OTHERS[meant]
        elif name.startswith(_NEVER):
            help = "write launch.slurm.container: pyxis, launch.image and launch.mounts"
        else:
            continue
        message = f"--{name} is written by partool; given twice, Slurm takes one of the two without a word"
        yield Diagnostic("PT525", message, path=(*_PATH, "options", name), help=help)


def times(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Refuse times that leave no room for a checkpoint before the limit."""
    if launch.target != "slurm":
        return
    slurm, lead, shutdown = launch.slurm, lead_s(launch), launch.shutdown_timeout_s
    if slurm.signal_lead_s is not None and lead <= shutdown:
        message = f"signal_lead_s: {lead} is no longer than shutdown_timeout_s: {shutdown}, which checkpoints need"
        help = f"use {shutdown + LEAD_BEYOND_SHUTDOWN_S} or more, or drop it"
        yield Diagnostic("PT527", message, path=(*_PATH, "signal_lead_s"), help=help)
    if lead > _MOST_LEAD_S:
        message = f"shutdown_timeout_s: {shutdown} is longer before the limit than Slurm can signal ({_MOST_LEAD_S} s)"
        help = f"use at most {_MOST_LEAD_S - LEAD_BEYOND_SHUTDOWN_S}"
        yield Diagnostic("PT527", message, path=("launch", "shutdown_timeout_s"), help=help)
    limit = time_s(slurm.time) if slurm.time is not None else None
    if limit is not None and limit <= lead:
        message = f"time: {slurm.time} is {limit} s, and the run is told to stop {lead} s before it ends"
        help = f"use a limit of more than {lead} s, or a shorter shutdown_timeout_s"
        yield Diagnostic("PT527", message, path=(*_PATH, "time"), help=help)
