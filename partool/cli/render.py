"""``partool render``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from partool.cli._fail import fail
from partool.cli._job import order, plan_for
from partool.cli._load import TargetChoice, TrustCode
from partool.plan.terminal import say
from partool.render.job import FOLDER
from partool.strategies.targets import ARRAYS, HERE


def command(
    spec: Annotated[Path, typer.Argument(help="Spec (YAML) or plan (JSON).")],
    target: Annotated[TargetChoice | None, typer.Option("--target", "-t", help="Default: the spec's.")] = None,
    *,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for all files; default: the main one on stdout.")
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
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    trust_code: TrustCode = False,
) -> None:
    """Print what launch would submit, byte for byte."""
    if base_image is not None and not dockerfile:
        raise typer.BadParameter("--base-image goes only together with --dockerfile")
    if dockerfile:
        _print_dockerfile(spec, overrides or [], base_image)
        return
    plan = plan_for(spec, overrides or [], target, strict=strict)
    if not plan.runnable:
        codes = " ".join(plan.not_runnable)
        fail("PT505", f"the runtime cannot run this plan yet ({codes})", f"partool explain {codes}", 1)
    if plan.launch.target == HERE and (array or at_once):
        raise typer.BadParameter(f"--array and --at-once are for clusters: give --target {' or '.join(ARRAYS)}")
    if plan.launch.target == HERE:
        from partool.launch.local.target import LocalTarget

        text = LocalTarget().describe(plan, None, resume=False)
        files = {"commands.txt": text + "\n", "plan.json": plan.to_json()}
        main, by_hand = "commands.txt", ""
    else:
        ordered = order(spec, plan, overrides or [], array or [], at_once=at_once)
        files, main, by_hand = ordered.rendered.files, ordered.rendered.main, ordered.rendered.by_hand
    if out is None:
        say(files[main], nl=False)
        return
    _write(out, files)
    say(f"partool: {len(files)} file(s) in {out}; partool launch submits {main}", err=True)
    if by_hand:
        say(f"partool: by hand: {by_hand.replace(FOLDER, shlex.quote(str(out)))}", err=True)


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        for name, text in files.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        fail("PT512", f"the files cannot be written: {error}", "give another folder to --out", 3)


def _print_dockerfile(path: Path, overrides: list[str], base_image: str | None) -> None:
    """Print a Dockerfile for the machines of a spec or plan; ``launch.image`` may still be missing there."""
    from partool.catalog.hardware import resolve_hardware
    from partool.cli._load import load_plan_or_exit, read_plan_or_exit
    from partool.planner.checks.hardware import is_superchip
    from partool.render.dockerfile import dockerfile
    from partool.spec import load

    if path.suffix == ".json":
        devices = read_plan_or_exit(path, overrides).devices
    else:
        spec = load(path, [*overrides, "launch.target=torchrun"]).spec  # the only target that needs no image
        found = resolve_hardware(spec.hardware, spec.training.precision).devices if spec else None
        devices = found or load_plan_or_exit(path, overrides).devices  # load_plan_or_exit shows the errors and ends
    if devices.backend == "cpu":
        fail("PT523", "there is no base image for ranks on a CPU", "pip install 'partool[train]' in any with Python", 1)
    try:
        text = dockerfile(devices.backend, "arm64" if is_superchip(devices.accelerator) else "amd64", base_image)
    except ValueError as error:
        fail("PT523", str(error), "--base-image REGISTRY/NAME:TAG", 1)
    say(text, nl=False)
