"""Renders a plan as a Slurm job: ``job.sbatch``, the script that each node runs, and the plan files.

Written for Slurm 22.05 to 25.x with the options of sbatch(1) and srun(1), https://slurm.schedmd.com/sbatch.html.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.plan.run import PLAN_FILE, agent_command
from partool.plan.types import Plan
from partool.render import containers
from partool.render.job import FOLDER, LOG_FOLDER, SIZE_PLAN, TASK_FOLDER, Job, Rendered
from partool.render.shell import asset, header_value, quote, template, variables
from partool.spec.targets.slurm.rules import MOST_LEAD_S, lead_s

SCRIPT = "job.sbatch"
NODE_SCRIPT = "node.sh"
_LINGER_S = 120
"""Seconds that other nodes' agents may run after the first agent has ended, in addition to the shutdown timeout."""
_NO_ELASTIC_ARRAY = "all tasks of an array have one size, but launch.min_nodes lets sizes differ"
_OPTIONS = ("partition", "account", "qos", "reservation", "constraint", "nodelist", "exclude", "time")


@dataclass(frozen=True, slots=True)
class _Choice:
    """One of the plans among which the script chooses, by the array task's number or by the number of nodes."""

    key: int
    file: str
    """Path within the folder of the run."""
    hash: str


def render(job: Job) -> Rendered:
    """Return the files of the job's folder; ``job.sbatch`` is submitted.

    Raises UnsafeValueError if Slurm cannot take the name of the run's folder or of a path to be mounted, and ValueError
    for an array whose jobs are elastic.
    """
    if job.tasks and job.sizes:
        raise ValueError(_NO_ELASTIC_ARRAY)
    files = {SCRIPT: _script(job), PLAN_FILE: job.plan.to_json()}
    files |= {NODE_SCRIPT: asset("slurm_node.sh")} if job.program is None else job.program.files
    for index, task in enumerate(job.tasks):
        files[f"{TASK_FOLDER.format(index=index)}/{PLAN_FILE}"] = task.to_json()
    for nodes, plan in sorted(job.sizes.items()):
        files[SIZE_PLAN.format(nodes=nodes)] = plan.to_json()
    run_dir = quote(str(job.run_dir))
    by_hand = f"mkdir -p {run_dir}/logs && cp -r {FOLDER}/. {run_dir} && sbatch {run_dir}/{SCRIPT}"
    return Rendered(SCRIPT, files, by_hand)


def findings(job: Job) -> list[Diagnostic]:
    """Return the reasons why a job cannot be rendered; empty if it can. Raises UnsafeValueError as :func:`render`."""
    if job.tasks and job.sizes:
        return [Diagnostic("PT587", _NO_ELASTIC_ARRAY, help="drop launch.min_nodes, or --array")]
    _script(job)
    return []


def _script(job: Job) -> str:
    launch, devices = job.plan.launch, job.plan.devices
    if job.program is not None:
        outer = containers.apptainer(job) if launch.slurm.container == "apptainer" else []
        return template("program.sbatch.jinja").render(
            job=job, launch=launch, devices=devices, header=_header(job), step=_step(job),
            command=" ".join(map(quote, outer)), script=job.program.script,
        )  # fmt: skip
    contained = launch.slurm.container != "none"
    sizes = [_Choice(nodes, SIZE_PLAN.format(nodes=nodes), plan.hash) for nodes, plan in job.sizes.items()]
    sizes.append(_Choice(devices.nodes, PLAN_FILE, job.plan.hash))
    return template("slurm.sbatch.jinja").render(
        job=job,
        launch=launch,
        devices=devices,
        header=_header(job),
        tasks=[_Choice(index, PLAN_FILE, task.hash) for index, task in enumerate(job.tasks)],
        sizes=sorted(sizes, key=lambda size: -size.key) if job.sizes else [],
        several=devices.nodes > 1,
        variables=variables(job.plan),
        writable=sorted({path for plan in (job.plan, *job.tasks) for path in containers.writable_folders(plan)})
        if contained
        else [],
        step=_step(job),
        command=_command(job),
    )


def _header(job: Job) -> list[str]:
    """Return the sbatch options as ``--name=value``; every value has passed :func:`header_value`."""
    slurm = job.plan.launch.slurm
    array = bool(job.tasks)
    header_value(job.run_dir, "the run's folder")  # checked here for a clear message: later messages name options
    logs = str(job.run_dir / LOG_FOLDER / ("slurm-%A_%a.out" if array else "slurm-%j.out"))
    # Only partool's agent turns a signal into a checkpoint, and knows what can be tried again.
    lead = min(max(lead_s(plan.launch) for plan in _plans(job)), MOST_LEAD_S) if job.program is None else 0
    options: list[tuple[str, object]] = [("job-name", job.run_id), ("comment", "partool")]
    options += [(name, value) for name in _OPTIONS if (value := getattr(slurm, name)) is not None]
    options += _machines(job)
    if array:
        options.append(("array", f"0-{len(job.tasks) - 1}" + (f"%{job.at_once}" if job.at_once else "")))
    options += [("chdir", job.run_dir), ("output", _literal(logs)), ("open-mode", "append")]
    if lead:
        options.append(("signal", f"B:USR2@{lead}"))
    may_requeue = job.program is None and (job.plan.launch.requeues or job.plan.launch.restarts)
    options.append(("requeue" if may_requeue else "no-requeue", ""))
    options += slurm.options.items()
    return [f"--{header_value(name, 'option')}" + _equals(name, value) for name, value in options]


def _plans(job: Job) -> tuple[Plan, ...]:
    """Return all plans that the script may start; each may need another time to stop, and the job gives the longest."""
    return (job.plan, *job.tasks, *job.sizes.values())


def _literal(path: str) -> str:
    """Return a log file's path with each % in its folders escaped; only the file's name may have Slurm's patterns."""
    folder, _, name = path.rpartition("/")
    return f"{folder.replace('%', '%%')}/{name}"


def _equals(name: str, value: object) -> str:
    return f"={header_value(value, f'--{name}')}" if value != "" else ""


def _machines(job: Job) -> list[tuple[str, object]]:
    """Return the options that request nodes and their resources; GPUs are requested by one kind of option only."""
    slurm, devices = job.plan.launch.slurm, job.plan.devices
    if job.sizes:
        # With --ntasks-per-node, Slurm would always give the minimum number of nodes, even if more are free.
        options: list[tuple[str, object]] = [("nodes", f"{min(job.sizes)}-{devices.nodes}")]
    else:
        options = [("nodes", devices.nodes), ("ntasks-per-node", 1)]
    if devices.backend != "cpu" and slurm.gpus != "none":
        kind = slurm.gpu_type or devices.slice  # slurm.conf names MIG instances by their profile
        count = f"{kind}:{devices.per_node}" if kind else str(devices.per_node)
        style = "gres" if devices.slice else slurm.gpus
        options.append(("gpus-per-node", count) if style == "gpus-per-node" else ("gres", f"gpu:{count}"))
    if slurm.cpus_per_task is not None:
        options.append(("cpus-per-task", slurm.cpus_per_task))
    memory = slurm.memory or ("0" if slurm.exclusive else None)
    if memory is not None:
        options.append(("mem", memory))
    return options + ([("exclusive", "")] if slurm.exclusive else [])


def _step(job: Job) -> list[str]:
    """Return the options of srun as shell words; they start one task per node with all its cores and devices."""
    launch, window_s = job.plan.launch, max(plan.launch.window_s for plan in _plans(job))
    words = [
        '--nodes="$nodes"', '--ntasks="$nodes"', "--ntasks-per-node=1", '--cpus-per-task="$cpus"',
        "--export=ALL", "--mpi=none", "--kill-on-bad-exit=0", f"--wait={window_s + _LINGER_S}",
    ]  # fmt: skip
    if job.sizes:
        words.append("--relative=0")
    if launch.slurm.container == "pyxis":
        words += [quote(word) for word in containers.pyxis(job)]
    return words


def _command(job: Job) -> str:
    """Return the shell words that start the agent on a node, inside apptainer if the plan selects apptainer."""
    launch = job.plan.launch
    python = launch.python or ("python" if launch.slurm.container != "none" else None)
    agent = agent_command(python, Path("\0plan"), Path("\0run"), resume=True, plan_hash="\0hash")
    words = [f'"${word[1:]}"' if word.startswith("\0") else quote(word) for word in agent]
    outer = containers.apptainer(job) if launch.slurm.container == "apptainer" else []
    return " ".join([*map(quote, outer), *words])
