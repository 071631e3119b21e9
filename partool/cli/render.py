"""``partool render``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from partool.cli._fail import fail
from partool.cli._foreign import is_plan, load_any
from partool.cli._job import order, plan_for, require_runnable, stop_on
from partool.cli._load import EngineChoice, TargetChoice, TrustCode
from partool.launch.prepare import commands_here
from partool.plan.run import PLAN_FILE
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.render.job import FOLDER, Rendered
from partool.strategies.targets import ARRAYS, HERE, SCHEDULERS


def command(
    spec: Annotated[Path, typer.Argument(help="Spec (YAML) or plan (JSON).")],
    target: Annotated[TargetChoice | None, typer.Option("--target", "-t", help="Default: the spec's.")] = None,
    *,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for all files; default: the main one on stdout.")
    ] = None,
    engine: Annotated[
        EngineChoice | None, typer.Option("--engine", help="Write it for this training system, as engine: in the spec.")
    ] = None,
    array: Annotated[
        list[str] | None, typer.Option("--array", help="Slurm: FIELD=V1,V2,... gives one task per value; repeatable.")
    ] = None,
    at_once: Annotated[int | None, typer.Option("--at-once", min=1, help="Slurm: tasks that run together.")] = None,
    dockerfile: Annotated[
        bool, typer.Option("--dockerfile", help="Print a Dockerfile for the spec's machines instead.")
    ] = False,
    base_image: Annotated[
        str | None, typer.Option("--base-image", help="With --dockerfile: the image with torch in it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace other files of these names in the folder.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Print what launch would submit, byte for byte; with --engine, a plan as another training system's files."""
    if base_image is not None and not dockerfile:
        raise typer.BadParameter("--base-image goes only together with --dockerfile")
    if dockerfile:
        _print_dockerfile(spec, overrides or [], base_image)
        return
    changes = [*(overrides or []), *([f"engine={engine}"] if engine else [])]
    plan = plan_for(spec, changes, target or _by_hand(spec, changes), strict=strict)
    if plan.engine != "partool":
        if array or at_once:
            raise typer.BadParameter("--array and --at-once go with plans that partool trains")
        _deliver(_written(spec, plan, changes), out, "", force=force)
        return
    require_runnable(plan)
    if plan.launch.target == HERE and (array or at_once):
        raise typer.BadParameter(f"--array and --at-once are for clusters: give --target {' or '.join(ARRAYS)}")
    if plan.launch.target == HERE:
        rendered = commands_here(plan)
    else:
        rendered = order(spec, plan, overrides or [], array or [], at_once=at_once).rendered
    _deliver(rendered, out, _next(plan, rendered.main), force=force)


def _next(plan: Plan, main: str) -> str:
    """Return what ``partool launch`` does with a plan whose files were rendered; empty where it refuses the target."""
    if plan.launch.target == HERE:
        return "; partool launch runs these commands"
    return f"; partool launch submits {main}" if plan.launch.target in SCHEDULERS else ""


def _by_hand(path: Path, changes: list[str]) -> TargetChoice | None:
    """Return the target of another training system's plan that a spec would have partool's launcher start here."""
    spec = None if is_plan(path) else load_any(path, changes)[0].spec
    ours = spec is None or spec.engine == "partool" or spec.launch.target != HERE
    return None if ours else "torchrun"


def _written(spec: Path, plan: Plan, changes: list[str]) -> Rendered:
    """Return the files with which a plan's engine trains it; ends the command if the engine cannot."""
    from partool.engines.write import terms_of
    from partool.render.program import program

    terms = terms_of(plan)
    stop_on(terms.findings, strict=False)
    files = program(plan)
    if defaults := ", ".join(f"{term.name} {term.value}" for term in terms.terms if _by_default(term.path, plan)):
        say(f"partool: as partool has them by default, for the spec says nothing else: {defaults}", err=True)
    say("partool: data, tokenizer, checkpoints and logging are yours to add", err=True)
    if plan.launch.target == HERE:
        return Rendered(files.script, {**files.files, PLAN_FILE: plan.to_json()})
    return order(spec, plan, changes, [], at_once=None, program=files).rendered


def _by_default(path: str, plan: Plan) -> bool:
    """Return True for a field of ``optimizer`` that the spec leaves at its default."""
    section: Any = plan.spec
    for name in path.split("."):
        section = section.get(name) if isinstance(section, dict) else None
    return path.startswith("optimizer.") and section is None


def _deliver(rendered: Rendered, out: Path | None, note: str, *, force: bool) -> None:
    """Print the main file, or write all files into a folder; other files of their names are replaced by ``force``."""
    files, by_hand = rendered.files, rendered.by_hand
    if out is None:
        say(rendered.text, nl=False)
        return
    if not force:
        _refuse_others(out, files)
    _write(out, files)
    say(f"partool: {len(files)} file(s) in {out}{note}", err=True)
    if by_hand:
        say(f"partool: by hand: {by_hand.replace(FOLDER, shlex.quote(str(out)))}", err=True)


def _refuse_others(folder: Path, files: dict[str, str]) -> None:
    """End the command if a file that would be written is there already with another content."""
    others = [name for name, text in files.items() if _differs(folder / name, text)]
    if others:
        names = ", ".join(others)
        what = (
            f"{folder} has another {names} already" if len(others) == 1 else f"{folder} has others of {names} already"
        )
        fail("PT002", what, "give another folder to --out, or replace what is there with --force", 2)


def _differs(file: Path, text: str) -> bool:
    """Return True for a file with another content; what cannot be read may not be replaced either."""
    try:
        return file.read_bytes() != text.encode()
    except FileNotFoundError:
        return False
    except OSError:
        return file.is_file()


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        fail("PT512", f"the files cannot be written: {error}", "give another folder to --out", 3)


def _print_dockerfile(path: Path, overrides: list[str], base_image: str | None) -> None:
    """Print a Dockerfile for the machines of a spec or plan; ``launch.image`` may still be missing there."""
    from partool.catalog.hardware import resolve_hardware
    from partool.cli._load import load_plan_or_exit, read_plan_or_exit
    from partool.planner.rules.hardware import is_superchip
    from partool.render.dockerfile import dockerfile
    from partool.spec import load

    if path.suffix == ".json":
        devices = read_plan_or_exit(path, overrides).devices
    else:
        spec = load(path, [*overrides, "launch.target=torchrun"]).spec  # the only target that needs no image
        resolved = resolve_hardware(spec.hardware, spec.training.precision).devices if spec else None
        devices = resolved or load_plan_or_exit(path, overrides).devices  # load_plan_or_exit shows the errors and ends
    if devices.backend == "cpu":
        fail("PT523", "there is no base image for ranks on a CPU", "pip install 'partool[train]' in any with Python", 1)
    try:
        text = dockerfile(devices.backend, "arm64" if is_superchip(devices.accelerator) else "amd64", base_image)
    except ValueError as error:
        fail("PT523", str(error), "--base-image REGISTRY/NAME:TAG", 1)
    say(text, nl=False)
