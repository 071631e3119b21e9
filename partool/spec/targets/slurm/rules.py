"""Rules about ``launch.slurm``: sbatch options that partool writes itself, containers, machines and time limits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.hardware import Devices
from partool.spec.launch import SHORTEST_WINDOW_S, LaunchSpec
from partool.spec.numbers import duration
from partool.spec.targets.rules import Forecast, TargetRules

LEAD_BEYOND_SHUTDOWN_S = 90
"""Seconds that ``signal_lead_s`` by default adds to the shutdown timeout; Slurm may signal 60 s early (sbatch(1))."""
MOST_LEAD_S = 65535
"""Longest time before its limit at which Slurm can signal a job (sbatch(1), --signal)."""
_SUMMARY_S = 30
"""Seconds that remain of a written ``signal_lead_s`` after the ranks' end, in which agents say what was lost."""
_LONGEST_HOURS = 48
"""Longest time limit, in hours, that help texts suggest; many sites allow it."""
_PATH = ("launch", "slurm")
_UNITS = {"K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}

_FIELDS = {
    "partition": "partition", "account": "account", "qos": "qos", "reservation": "reservation",
    "constraint": "constraint", "nodelist": "nodelist", "nodefile": "nodelist", "exclude": "exclude", "time": "time",
    "mem": "memory", "mem-per-cpu": "memory", "mem-per-gpu": "memory", "exclusive": "exclusive",
    "oversubscribe": "exclusive", "cpus-per-task": "cpus_per_task", "cpus-per-gpu": "cpus_per_task",
    "signal": "signal_lead_s", "gres": "gpus", "gpus": "gpus", "gpus-per-node": "gpus",
    "tres-per-task": "gpus", "container": "container",
}  # fmt: skip
"""Option of sbatch → the field of the spec that sets this option."""
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
"""Prefixes of refused options of pyxis. As ``#SBATCH`` lines, they run the batch script itself in the container
(pyxis #107)."""


def time_s(text: str) -> int:
    """Return the seconds of a time limit that is written in a form of sbatch(1): M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def memory_bytes(text: str) -> float:
    """Return the bytes of a size that is written as for sbatch's ``--mem``: without a suffix, in MiB."""
    number, unit = (text[:-1], text[-1]) if text[-1] in _UNITS else (text, "M")
    return float(number) * _UNITS[unit]


def lead_s(launch: LaunchSpec) -> int:
    """Return the seconds between the signal to a Slurm job and the job's time limit."""
    lead = launch.slurm.signal_lead_s
    return launch.window_s + LEAD_BEYOND_SHUTDOWN_S if lead is None else lead


class SlurmRules(TargetRules):
    """Rules about settings that sbatch would refuse, ignore or misinterpret."""

    def section(self, launch: LaunchSpec) -> Iterator[Diagnostic]:
        """Yield an error for each entry of ``options`` that partool writes itself, from another field of the spec."""
        for name in launch.slurm.options:
            # getopt_long takes any unique prefix of a name: --nod=7 is --nodes=7
            meant = next((option for option in (*_FIELDS, *_OTHERS) if option == name), None) or next(
                (option for option in (*_FIELDS, *_OTHERS) if option.startswith(name)), ""
            )
            if meant in _FIELDS:
                help = f"write launch.slurm.{_FIELDS[meant]}"
            elif meant in _OTHERS:
                help = _OTHERS[meant]
            elif name.startswith(_NEVER):
                help = "write launch.slurm.container: pyxis, launch.image and launch.mounts"
            else:
                continue
            message = f"--{name} is written by partool; given twice, Slurm silently takes one of the two"
            yield Diagnostic("PT525", message, path=(*_PATH, "options", name), help=help)

    def files(self, launch: LaunchSpec) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (keys of the field, path) for the set-up script and the site profile that the section names."""
        for field, file in (("setup", launch.slurm.setup), ("profile", launch.slurm.profile)):
            if file is not None:
                yield ("slurm", field), file

    def errors(self, launch: LaunchSpec) -> Iterator[Diagnostic]:
        """Yield errors: a container without image or the reverse, and times that leave no room for a checkpoint."""
        yield from _image(launch)
        yield from _times(launch)

    def on_machines(self, launch: LaunchSpec, devices: Devices) -> Iterator[Diagnostic]:
        """Warn of a device type that has no effect, and of a job that would take whole nodes for slices of devices."""
        slurm = launch.slurm
        if devices.slice and slurm.exclusive:
            message = f"exclusive: true takes whole nodes, and the ranks use one slice {devices.slice} of each"
            path, help = (*_PATH, "exclusive"), "add launch: {slurm: {exclusive: false}}"
            yield Diagnostic("PT279", message, severity="warning", path=path, help=help)
        if slurm.gpu_type is not None and (slurm.gpus == "none" or devices.backend == "cpu"):
            why = "gpus: none asks for no devices" if slurm.gpus == "none" else "ranks on a CPU ask for no devices"
            message = f"gpu_type: {slurm.gpu_type} has no effect: {why}"
            path, help = (*_PATH, "gpu_type"), "drop it, or set gpus: gres"
            yield Diagnostic("PT524", message, severity="warning", path=path, help=help)

    def about_duration(self, launch: LaunchSpec, expected: Forecast) -> Iterator[Diagnostic]:
        """Yield findings about the job's time limit, the signal before it, and how often the job is requeued."""
        yield from _late_signal(launch, expected)
        if launch.slurm.time is None:
            yield _no_limit(launch, expected.total_s)
        yield from _no_partition(launch)
        if launch.slurm.time is not None:
            yield from _requeues(launch, time_s(launch.slurm.time) - lead_s(launch), expected)

    def longest_window_s(self, launch: LaunchSpec) -> int | None:
        """Return what ``signal_lead_s``, or the longest lead that is sensible, leaves for a checkpoint.

        That is the longest that Slurm allows, or half of the job's time limit, so that most of a job is training.
        """
        lead = launch.slurm.signal_lead_s
        return _longest_window_s(launch.slurm.time) if lead is None else max(lead - _SUMMARY_S, 1)

    def memory_limit(self, launch: LaunchSpec) -> tuple[tuple[str, ...], str, float] | None:
        """Return (keys of the field, value, bytes) of ``launch.slurm.memory``; None if a job gets all of its nodes."""
        memory = launch.slurm.memory or "0"
        limit_bytes = memory_bytes(memory)
        return ((*_PATH, "memory"), memory, limit_bytes) if limit_bytes else None

    def cores(self, launch: LaunchSpec, devices: Devices) -> float | None:
        """Return ``launch.slurm.cpus_per_task``, the cores of a node's one task; None if it is not set."""
        return launch.slurm.cpus_per_task

    def contained(self, launch: LaunchSpec) -> bool:
        """Return True if the site's container runtime starts the ranks."""
        return launch.slurm.container != "none"


def _image(launch: LaunchSpec) -> Iterator[Diagnostic]:
    container = launch.slurm.container
    if container != "none" and launch.image is None:
        message = f"container: {container} has no image to start"
        help = "add launch: {image: REGISTRY/NAME:TAG}, or an absolute path of an image file"
        yield Diagnostic("PT523", message, path=(*_PATH, "container"), help=help)
    elif container == "none" and launch.image is not None:
        message = "an image is named, but nothing starts it: container is none"
        help = "set launch.slurm.container to pyxis or apptainer, or drop the image"
        yield Diagnostic("PT523", message, path=("launch", "image"), help=help)


def _times(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield errors for times that leave no room for a checkpoint before the job's time limit."""
    slurm, lead, window = launch.slurm, lead_s(launch), launch.window_s
    if slurm.signal_lead_s is not None and lead <= window:
        given = f"shutdown_timeout_s: {window}, which checkpoints need"
        if launch.shutdown_timeout_s == "auto":
            given = f"the {window} s that a run gets at least to write a checkpoint"
        message = f"signal_lead_s: {lead} is no longer than {given}"
        help = f"use {window + LEAD_BEYOND_SHUTDOWN_S} or more, or drop it"
        yield Diagnostic("PT527", message, path=(*_PATH, "signal_lead_s"), help=help)
    if lead > MOST_LEAD_S:
        message = f"shutdown_timeout_s: {window} is longer before the limit than Slurm can signal ({MOST_LEAD_S} s)"
        help = f"use at most {MOST_LEAD_S - LEAD_BEYOND_SHUTDOWN_S}"
        yield Diagnostic("PT527", message, path=("launch", "shutdown_timeout_s"), help=help)
    limit = time_s(slurm.time) if slurm.time is not None else None
    if limit is not None and limit <= lead:
        message = f"time: {slurm.time} is {limit} s, and the run is signalled to stop {lead} s before it ends"
        help = f"use a limit of more than {lead} s, or a shorter shutdown_timeout_s"
        yield Diagnostic("PT527", message, path=(*_PATH, "time"), help=help)


def _longest_window_s(limit: str | None) -> int:
    half_s = MOST_LEAD_S if limit is None else time_s(limit) // 2
    return max(min(MOST_LEAD_S, half_s) - LEAD_BEYOND_SHUTDOWN_S, SHORTEST_WINDOW_S)


def _late_signal(launch: LaunchSpec, expected: Forecast) -> Iterator[Diagnostic]:
    """Warn if Slurm signals the job later than a step and a checkpoint need."""
    lead, usual = lead_s(launch), expected.window_s + LEAD_BEYOND_SHUTDOWN_S
    if launch.slurm.signal_lead_s is not None and lead < expected.stop_s + _SUMMARY_S:
        message = f"signal_lead_s: {lead} is shorter than a stop may take: {expected.stop_words}"
        help = f"drop it, or use {min(usual, MOST_LEAD_S)}; as it is, a time limit can lose {expected.loss}"
        yield Diagnostic("PT340", message, severity="warning", path=(*_PATH, "signal_lead_s"), help=help)
    elif usual > MOST_LEAD_S and launch.window_s + LEAD_BEYOND_SHUTDOWN_S >= MOST_LEAD_S:
        message = (
            f"Slurm signals a job at most {MOST_LEAD_S:,} s before its limit; a stop may take {expected.stop_s:,} s"
        )
        help = f"{expected.stop_words}: a smaller global_batch has shorter steps; a limit can lose {expected.loss}"
        yield Diagnostic("PT340", message, severity="warning", path=_PATH, help=help)
    elif launch.slurm.time is not None and launch.window_s == _longest_window_s(launch.slurm.time) < expected.stop_s:
        if expected.total_s <= time_s(launch.slurm.time) - lead:  # the job ends before its limit
            return
        message = f"time: {launch.slurm.time} is short: of each job, a stop may take {expected.stop_s:,} s"
        help = f"use a longer time: {expected.stop_words}; as it is, a time limit can lose {expected.loss}"
        yield Diagnostic("PT340", message, severity="warning", path=(*_PATH, "time"), help=help)


def _requeues(launch: LaunchSpec, usable_s: int, expected: Forecast) -> Iterator[Diagnostic]:
    needed = math.ceil(expected.total_s / usable_s) - 1 if usable_s > 0 else 0
    if needed < 1:
        return
    times = "once" if needed == 1 else f"{needed:,} times"
    job, training = duration(usable_s), duration(expected.total_s)
    message = f"training takes {training} as predicted, a job has {job}: it is requeued {times}"
    path = (*_PATH, "time")
    saved = launch.window_s >= expected.stop_s and lead_s(launch) > launch.window_s
    if needed > launch.requeues:
        message += f", and requeues: {launch.requeues} allows fewer"
        help = f"set requeues: {needed + 2}, or a longer time"
        yield Diagnostic("PT527", message, severity="warning", path=path, help=help)
    elif saved:
        help = f"each job saves its state before its limit, and the next goes on from there: {expected.stop_words}"
        yield Diagnostic("PT527", message, severity="note", path=path, help=help)
    elif expected.saves:
        help = f"each job goes on from its last checkpoint: a limit that comes within a step loses {expected.loss}"
        yield Diagnostic("PT527", message, severity="note", path=path, help=help)
    else:
        help = "no job may save its state before its limit: add checkpoint: {every: 30min}, or give a stop more time"
        yield Diagnostic("PT527", message, severity="warning", path=path, help=help)


def _no_limit(launch: LaunchSpec, total_s: float) -> Diagnostic:
    """Return a warning about a job without a time limit: it may be cut off, and it is not backfilled."""
    message = "the job has no time limit: it gets the partition's, which may be minutes, and starts later than others"
    needed = math.ceil((1.2 * total_s + lead_s(launch)) / 3600)  # whole hours
    help = f"add {_limit(needed)}, for {duration(total_s)} of training as predicted"
    if needed > _LONGEST_HOURS:
        help = f"add {_limit(_LONGEST_HOURS)}, say, or what sinfo shows; it is requeued for {needed:,} h in all"
    return Diagnostic("PT527", message, severity="warning", path=_PATH, help=help)


def _no_partition(launch: LaunchSpec) -> Iterator[Diagnostic]:
    slurm = launch.slurm
    if slurm.partition is None and slurm.reservation is None and slurm.qos is None:
        message = "no partition is named: the cluster's default one decides on machines and limits"
        help = "add launch: {slurm: {partition: NAME}}; sinfo lists them, and partool doctor --target slurm checks it"
        yield Diagnostic("PT527", message, severity="warning", path=_PATH, help=help)


def _limit(hours: int) -> str:
    """Return spec text that sets a time limit of ``hours`` hours, for help texts."""
    time = f"{hours // 24}-{hours % 24:02}:00:00" if hours >= 24 else f"{hours:02}:00:00"
    return f"launch: {{slurm: {{time: '{time}'}}}}"


RULES = SlurmRules()
