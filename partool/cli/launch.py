"""``partool launch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from partool.cli import _cluster, _local
from partool.cli._fail import fail
from partool.cli._job import plan_for, require_runnable
from partool.cli._load import TargetChoice, TrustCode
from partool.cli._local import best_step_or_exit
from partool.cli._runs import find_run_or_exit, is_run
from partool.cli._verify import RANK_LIMIT_S, RankLimit, exit_on_error, exit_on_faults, say_verified, verified_plan
from partool.launch.store import Run, RunStore
from partool.plan.outline import outline
from partool.plan.types import Plan
from partool.strategies.targets import DEFINITIONS, HERE, SCHEDULERS, TARGETS

BEST: Literal["best"] = "best"
"""Word for the checkpoint of the best validation."""


def command(
    spec: Annotated[Path, typer.Argument(help="Spec (YAML), plan (JSON); with --resume also just a run.")],
    run: Annotated[
        str | None, typer.Argument(help="With --resume: which run. Default: the newest of that name.")
    ] = None,
    *,
    target: Annotated[
        TargetChoice | None,
        typer.Option("--target", "-t", help="Where to (torchrun: see render); default: the spec's."),
    ] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from a run's last checkpoint, in its folder.")
    ] = False,
    step: Annotated[
        str | None,
        typer.Option(
            "--step",
            help="With --resume: from the checkpoint of this step, or of the best validation (best); later ones are "
            "kept aside.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would run, let the scheduler check it, and run nothing.")
    ] = False,
    deep: Annotated[
        bool, typer.Option("--deep", help="With --dry-run: first dry-run the code of all ranks that differ.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show how it differs from what was submitted last (exit code 10).")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="On this machine: return once it runs; see status, logs and cancel.")
    ] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="On a cluster: show the logs until the run ends.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="On a cluster: submit a plan that is under way a second time.")
    ] = False,
    array: Annotated[
        list[str] | None, typer.Option("--array", help="Slurm: FIELD=V1,V2,... gives one task per value; repeatable.")
    ] = None,
    at_once: Annotated[int | None, typer.Option("--at-once", min=1, help="Slurm: tasks that run together.")] = None,
    crds: Annotated[
        Path | None, typer.Option("--crds", help="k8s: folder with CRD files to check the manifest against.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    rank_limit: RankLimit = RANK_LIMIT_S,
    trust_code: TrustCode = False,
) -> None:
    """Plan a spec and train it: on this machine, under Slurm or on Kubernetes."""
    if run is not None and not resume:
        raise typer.BadParameter("a run is named only together with --resume")
    if deep and not dry_run:
        raise typer.BadParameter("--deep goes only together with --dry-run")
    if step is not None and not resume:
        raise typer.BadParameter("--step goes only together with --resume")
    if run == BEST and step is None and not is_run(BEST):  # launch SPEC --resume best
        run, step = None, BEST
    wanted = _step_of(step)
    previous = _previous_run(spec, run) if resume else None
    path = spec if spec.is_file() or previous is None else previous.plan_file
    plan = plan_for(path, overrides or [], target or _target_of(previous), strict=strict)
    _refuse(plan)
    if resume and previous is None:
        previous = _newest(plan.name)
    if previous is not None:
        _refuse_other_job(previous, plan)
    chosen = wanted if wanted != BEST else None if previous is None else best_step_or_exit(previous, plan)
    if deep:
        checked, failed = verified_plan(plan, rank_limit)
        exit_on_error(failed)
        say_verified(checked)
        exit_on_faults(checked, strict=strict)
    options = _cluster.ClusterOptions(
        dry_run=dry_run,
        diff=diff,
        follow=follow,
        again=again,
        array=tuple(array or ()),
        at_once=at_once,
        step=chosen,
        crds=crds,
    )
    if crds is not None and plan.launch.target not in DEFINITIONS:
        raise typer.BadParameter(f"--crds goes only with the target {' or '.join(DEFINITIONS)}")
    if plan.launch.target != HERE:
        if detach:
            raise typer.BadParameter("--detach is for this machine; a scheduler's jobs go on by themselves")
        _cluster.launch(path, plan, overrides or [], previous, options)
        return
    given = {"--diff": diff, "--follow": follow, "--again": again, "--array": array, "--at-once": at_once}
    if names := [name for name, value in given.items() if value]:
        raise typer.BadParameter(f"{' and '.join(names)} is for clusters: give --target {' or '.join(SCHEDULERS)}")
    spec_text = None if path.suffix == ".json" else path.read_text(encoding="utf-8")
    _local.launch(
        plan, spec_text, previous, _local.LocalOptions(resume=resume, step=chosen, dry_run=dry_run, detach=detach)
    )


def _step_of(text: str | None) -> int | Literal["best"] | None:
    """Return the step that the option ``--step`` names: a number, or the word best."""
    if text is None or text == BEST:
        return None if text is None else "best"
    if not text.isdecimal():
        raise typer.BadParameter(f"--step is a number of steps or {BEST}, not {text!r}")
    return int(text)


def _refuse(plan: Plan) -> None:
    require_runnable(plan)
    if TARGETS[plan.launch.target].starter == "by hand":
        message = f"for the target {plan.launch.target}, somebody starts the nodes by hand"
        help = f"partool render --target {plan.launch.target} prints the command of each node"
        fail("PT588", message, help, 1)


def _previous_run(spec: Path, query: str | None) -> Run | None:
    """Return the run to resume, named by the second argument or by the only one; None if no argument names a run."""
    if query is not None:
        return find_run_or_exit(query)
    return None if spec.is_file() else find_run_or_exit(str(spec))


def _refuse_other_job(previous: Run, plan: Plan) -> None:
    """End the command if the run to resume has another kind of job: its checkpoints are of no use to the plan."""
    try:
        job = outline(previous.plan_file).job
    except (OSError, ValueError):  # said where the run's files are read
        return
    if job != plan.job:
        message = f"{previous.id} is a run of job: {job}, and the plan has job: {plan.job}"
        fail("PT517", message, "launch the plan without --resume", 1)


def _target_of(previous: Run | None) -> str | None:
    """Return the target of the run to resume, used if the user gives no other target; None without such a run."""
    submission = previous.submission() if previous else None
    return submission.target if submission else None


def _newest(name: str) -> Run:
    runs = [run for run in RunStore().runs() if run.goes_by(name)]
    if not runs:
        fail("PT502", f"there is no run of {name!r} to resume", "launch it without --resume", 1)
    return runs[0]
