"""What ``plan`` and ``launch`` share: from a file to a plan, with the findings shown."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import typer
from pydantic import ValidationError

from partool.cli._runs import fail
from partool.diagnostics.record import Diagnostic
from partool.diagnostics.text import render_text, summary, wants_colour
from partool.plan.types import Plan

Output = Literal["text", "json", "github", "sarif"]
Lines = Mapping[str, list[str]]
_ERRORS = 1


def load_plan_or_exit(path: Path, overrides: list[str], output: Output = "text", strict: bool = False) -> Plan:
    """Return the plan of a spec, or of a plan file; shows all findings, and ends the command if there are errors."""
    if path.suffix == ".json":
        return read_plan_or_exit(path, overrides)
    from partool.spec import load

    loaded = load(path, overrides)
    findings, plan = list(loaded.diagnostics), None
    if loaded.spec is not None and not any(finding.severity == "error" for finding in findings):
        from partool.planner import make_plan

        result = make_plan(loaded.spec, base_dir=path.absolute().parent, default_name=name_of(path))
        findings += loaded.source.attach(result.diagnostics)
        plan = result.plan
    failed = plan is None or any(f.severity == "error" or strict for f in findings if f.severity != "note")
    show(findings, loaded.source.texts, output, failed=failed)
    if plan is None or failed:
        raise typer.Exit(_ERRORS)
    return plan


def read_plan_or_exit(path: Path, overrides: list[str] | None = None) -> Plan:
    """Return the plan that a file holds; ends the command with PT503 where it is none."""
    if overrides:
        raise typer.BadParameter("--set changes a spec; a plan is run as it is")
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        fail("PT503", f"{path} is no plan of this version: {reason}", "make it again: partool plan SPEC --out FILE", 1)


def show(findings: list[Diagnostic], lines: Lines, output: Output, *, failed: bool) -> None:
    """Show findings: as text on stderr, or on stdout in the form that was asked for.

    With ``json`` they go to stdout only when there is no plan to print there.
    """
    if output in ("github", "sarif"):
        from partool.diagnostics.machine import render_github, render_sarif

        typer.echo(
            render_github(findings) if output == "github" else render_sarif(findings, lines, _version()), nl=False
        )
    elif output == "json" and failed:
        from partool.diagnostics.machine import as_dict

        typer.echo(json.dumps({"diagnostics": [as_dict(finding) for finding in findings]}, indent=2))
    elif findings:
        text = render_text(findings, lines, colour=wants_colour(sys.stderr))
        typer.echo(text + summary(findings), err=True)


def name_of(path: Path) -> str:
    """Return the default name of a run: the file's, in the characters that names may have."""
    slug = re.sub(r"[^a-z0-9]+", "-", path.name.split(".")[0].lower()).strip("-")[:53].rstrip("-")
    return slug or "run"


def _version() -> str:
    from partool import __version__

    return __version__
