"""``partool doctor``."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from partool.cli._fail import fail
from partool.cli._load import TargetChoice, TrustCode
from partool.diagnostics.secrets import masked
from partool.launch.target import DoctorFiles, LaunchError
from partool.launch.targets import doctor
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.strategies.targets import HERE, JOB_SCRIPTS

_ENVIRONMENT = 3
_MARKS = {"ok": "ok      ", "warning": "warning ", "failed": "FAILED  ", "skipped": "skipped "}


def command(
    file: Annotated[
        Path | None, typer.Argument(help="Spec or plan to check the place for; or an sbatch script of yours.")
    ] = None,
    target: Annotated[
        TargetChoice | None, typer.Option("--target", "-t", help="Which place; default: the spec's, else this machine.")
    ] = None,
    *,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="key=value, over the spec; repeatable.")] = None,
    crds: Annotated[Path | None, typer.Option("--crds", help="k8s: folder with CRD files.")] = None,
    output: Annotated[Literal["text", "json"], typer.Option("--output", help="Form of the answer.")] = "text",
    trust_code: TrustCode = False,
) -> None:
    """Check whether runs can be launched from here, and on this target."""
    plan, script = _read(file, overrides or [], target)
    name = target or (plan.launch.target if plan else JOB_SCRIPTS[0] if script is not None else HERE)
    try:
        checks = [
            replace(check, text=masked(check.text), help=masked(check.help))  # checks quote the user's scripts
            for check in doctor(name, plan, DoctorFiles(script, crds))
        ]
    except LaunchError as error:
        fail(error.code, error.message, error.help, error.exit_code)
    if output == "json":
        import json

        say(json.dumps([asdict(check) for check in checks], indent=2))
    else:
        for check in checks:
            say(f"{_MARKS[check.verdict]}{check.name}: {check.text}")
            if check.help and check.verdict in ("warning", "failed"):
                say(f"        help: {check.help}")
    if any(check.verdict == "failed" for check in checks):
        raise typer.Exit(_ENVIRONMENT)


def _read(file: Path | None, overrides: list[str], target: str | None) -> tuple[Plan | None, str | None]:
    """Return (plan, None) for a spec or a plan file, (None, text) for an sbatch script, (None, None) without a file."""
    if file is None:
        return None, None
    if file.suffix in (".json", ".yaml", ".yml"):
        from partool.cli._job import plan_for

        return plan_for(file, overrides, target, strict=False), None
    try:
        return None, file.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        fail("PT101", f"{file} cannot be read: {error.strerror}", "give a spec, a plan or an sbatch script", 1)
