"""``partool plan``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from partool.cli._load import Output, load_plan_or_exit, read_plan_or_exit
from partool.cli._runs import fail
from partool.plan.types import Plan

_DIFFERENT = 10


def command(
    spec: Annotated[Path, typer.Argument(help="The spec (YAML), or a plan (JSON) to show.")],
    *,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    output: Annotated[Output, typer.Option("--output", help="text, json, or findings as github or sarif.")] = "text",
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Also write the plan to this file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only findings and the exit code.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Treat warnings as errors.")] = False,
    against: Annotated[
        Path | None, typer.Option("--against", help="Compare with this plan; exit 10 if it differs.")
    ] = None,
) -> None:
    """Check a spec, find the layout, predict memory and time, and say why."""
    previous = read_plan_or_exit(against) if against else None
    plan = load_plan_or_exit(spec, overrides or [], output, strict)
    if out is not None:
        _write(plan, out)
    if previous is not None:
        _compare(previous, plan)
    elif check:
        typer.echo(f"{spec}: the plan is sound ({plan.hash[:12]})", err=True)
    elif output == "json":
        typer.echo(plan.to_json(), nl=False)
    elif output == "text":
        from rich.console import Console

        from partool.report import render_plan

        render_plan(plan, Console(), source=str(out or spec))


def _compare(old: Plan, new: Plan) -> None:
    from partool.plan.diff import differences

    if lines := differences(old, new):
        typer.echo("\n".join(lines))
        raise typer.Exit(_DIFFERENT)
    typer.echo("the plans are the same", err=True)


def _write(plan: Plan, path: Path) -> None:
    """Write the plan in one step: a reader sees the old file or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(plan.to_json())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except OSError as error:
        fail("PT002", f"{path} cannot be written: {error.strerror}", "choose another --out", 3)
