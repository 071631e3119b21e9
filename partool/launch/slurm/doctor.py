"""Checks whether this machine can submit to Slurm, and whether Slurm would accept a plan or a user's script."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from partool.launch.slurm.client import CommandAnswer, call
from partool.launch.slurm.doctor_plan import plan_checks
from partool.launch.slurm.refusal import estimate, refusal_of_script
from partool.launch.slurm.script import defaults_in_use, tried
from partool.launch.store import RunStore
from partool.launch.target import Check, DoctorFiles, LaunchError
from partool.plan.types import Plan

_COMMANDS = ("sbatch", "squeue", "scancel", "scontrol", "srun")
_LEAST_VERSION = (22, 5)
"""Oldest version that partool is tested with."""
_SHARED = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cvmfs",
    "afs",
    "panfs",
    "fhgfs",
    "wekafs",
    "daos",
    "orangefs",
    "9p",
)
"""Prefixes of the names of file systems that several machines share; ``fuse.`` may precede the prefix."""


def checks(plan: Plan | None, files: DoctorFiles) -> Iterator[Check]:
    """Yield all checks, the most basic checks first; without a controller, checks that need it are left out."""
    script = files.script
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        help = "run this on a login node of the cluster, or load its Slurm module"
        yield Check("commands", "failed", f"not in PATH: {', '.join(missing)}", help)
    else:
        yield Check("commands", "ok", ", ".join(_COMMANDS))
    if script is not None:
        yield from _own_rules(script)
    if missing:
        return
    try:
        config = configuration()
    except LaunchError as error:
        yield Check("controller", "failed", error.message, error.help)
        return
    yield Check("controller", "ok", f"{config.get('ClusterName', 'Slurm')} answers")
    yield from cluster_checks(config)
    yield from _environment(plan)
    if script is not None:
        yield _test_script(script)
    if plan is not None:
        yield folder_check(RunStore().root, Path("/proc/mounts"))
        yield from plan_checks(plan, config)
        yield job_check(plan)


def cluster_checks(config: dict[str, str]) -> Iterator[Check]:
    """Yield checks of those settings of the cluster that affect runs."""
    version = config.get("SLURM_VERSION", "")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers and numbers < _LEAST_VERSION:
        yield Check("version", "warning", f"{version} is older than what partool is tested with (22.05)")
    else:
        yield Check("version", "ok", version or "unknown")
    yield _accounting(config)
    yield _preemption(config, numbers)
    if config.get("EnforcePartLimits", "NO").upper() == "NO":
        text = "EnforcePartLimits is off: a job beyond its partition's limits is queued for ever, not refused"
        yield Check("limits", "warning", text, "compare launch.slurm.time with scontrol show partition")


def _accounting(config: dict[str, str]) -> Check:
    kind = config.get("AccountingStorageType", "")
    if kind and not kind.endswith("/none"):
        return Check("accounting", "ok", kind)
    age = config.get("MinJobAge", "300 sec")
    text = f"off: how a job ended is known for {age} only; partool status keeps it once it has seen it"
    return Check("accounting", "ok", text)


def _preemption(config: dict[str, str], version: tuple[int, ...]) -> Check:
    kind = config.get("PreemptType", "").rpartition("/")[2]
    if kind in ("", "none", "(null)"):
        return Check("preemption", "ok", "this cluster preempts no jobs")
    mode = config.get("PreemptMode", "")
    words = (config.get("SlurmctldParameters", "") + "," + config.get("PreemptParameters", "")).split(",")
    if "preempt_send_user_signal" in words or "send_user_signal" in words:
        return Check("preemption", "ok", f"{mode}, announced with the job's own signal")
    if version and version < (23, 11):
        setting = "SlurmctldParameters=preempt_send_user_signal"
    else:
        setting = "PreemptParameters=send_user_signal"
    wait = config.get("KillWait", "30 sec")
    text = f"{mode}, announced with SIGTERM, then there is the partition's GraceTime, or {wait}, for a checkpoint"
    return Check("preemption", "warning", text, f"ask for {setting}, and write checkpoints often (checkpoint.every)")


def _environment(plan: Plan | None) -> Iterator[Check]:
    given = {name for name in ("account", "partition", "qos") if plan and getattr(plan.launch.slurm, name)}
    used = defaults_in_use(given)
    ignored = sorted(name for name in os.environ if name.startswith("SBATCH_") and name not in used)
    if used:
        text = ", ".join(f"{name}={value}" for name, value in sorted(used.items()))
        yield Check("environment", "ok", f"used if the spec sets nothing: {text}")
    if ignored:
        text = f"partool does not let {', '.join(ignored)} change a job"
        yield Check("environment", "warning", text, "write what they should set into launch.slurm")


def folder_check(root: Path, mounts: Path) -> Check:
    """Check whether ``root``, the folder of all runs, seems shared by all nodes; ``mounts`` reads like /proc/mounts."""
    place = PurePosixPath(root)
    best: tuple[int, str, str] = (-1, "", "")
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines() if mounts.exists() else []:
        parts = line.split()
        point = PurePosixPath(parts[1].replace("\\040", " "))
        if place.is_relative_to(point) and len(point.parts) >= best[0]:
            best = (len(point.parts), str(point), parts[2])
    _, point_name, kind = best
    if kind.removeprefix("fuse.").startswith(_SHARED):
        return Check("runs", "ok", f"{root} is on {point_name} ({kind})")
    text = f"{root} is on {point_name or '?'} ({kind or 'unknown'}), which looks like a disk of this machine only"
    return Check("runs", "warning", text, "all nodes must see the runs: set PARTOOL_HOME to a shared folder")


def job_check(plan: Plan) -> Check:
    """Let sbatch check the plan's job; if the option that requests GPUs is refused, suggest an option that works."""
    level = tried(plan)
    if not level.ran:
        return Check("sbatch --test-only", "skipped", level.note)
    if not level.findings:
        return Check("sbatch --test-only", "ok", level.note or "accepted")
    finding = level.findings[0]
    help = finding.help
    if plan.devices.backend != "cpu":
        for style in ("gpus-per-node", "gres", "none"):
            slurm = plan.launch.slurm.model_copy(update={"gpus": style})
            other = plan.model_copy(update={"launch": plan.launch.model_copy(update={"slurm": slurm})})
            if style != plan.launch.slurm.gpus and not tried(other).findings:
                help = f"Slurm takes it with launch.slurm.gpus: {style}"
                break
    return Check("sbatch --test-only", "failed", finding.message, help)


def _own_rules(script: str) -> Iterator[Check]:
    from partool.render.slurm.lint import lint

    findings = lint(script)
    for finding in findings:
        verdict = "failed" if finding.severity == "error" else "warning"
        line = f"line {finding.span.line}: " if finding.span else ""
        yield Check(f"script {finding.code}", verdict, line + finding.message, finding.help)  # type: ignore[arg-type]
    if not findings:
        yield Check("script", "ok", "no mistakes that Slurm would accept")


def _test_script(script: str) -> Check:
    try:
        answer = call(["sbatch", "--test-only"], text=script)
    except LaunchError as error:
        return Check("sbatch --test-only", "skipped", error.message)
    if answer.code:
        message, help = refusal_of_script(answer.err)
        return Check("sbatch --test-only", "failed", message, help)
    return Check("sbatch --test-only", "ok", estimate(answer.err) or "accepted")


def configuration() -> dict[str, str]:
    """Return the cluster's settings; raises LaunchError PT550 if Slurm cannot be asked."""
    return parse_config(_asked(["scontrol", "show", "config"]).out)


def parse_config(text: str) -> dict[str, str]:
    """Return the settings in the output of ``scontrol show config``."""
    pairs = (line.partition("=") for line in text.splitlines() if re.match(r"\w[\w/\[\]]*\s*=", line))
    return {name.strip(): value.strip() for name, _, value in pairs}


def _asked(command: list[str]) -> CommandAnswer:
    answer = call(command)
    if answer.code:
        said = answer.err.strip().splitlines()
        raise LaunchError(
            "PT550", f"{command[0]}: {said[-1] if said else answer.code}", "ask scontrol ping", exit_code=3
        )
    return answer
