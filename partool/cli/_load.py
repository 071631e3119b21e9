"""Loads plans from specs or plan files and shows the findings, for several commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import ValidationError

from partool.catalog.transformers_process import allow_code
from partool.cli._fail import fail
from partool.cli._foreign import Known, is_plan, load_any
from partool.diagnostics.record import Diagnostic
from partool.diagnostics.text import columns_of, render_text, summary, wants_colour
from partool.plan.outline import other_version
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.spec.foreign import foreign_file
from partool.spec.patterns import PATTERNS
from partool.strategies.engines import ENGINES
from partool.strategies.targets import TARGETS

if TYPE_CHECKING:
    from partool.planner.longest import Longest
    from partool.spec import Loaded

    TargetChoice = str
    EngineChoice = str
else:
    TargetChoice = Literal[tuple(TARGETS)]
    EngineChoice = Literal[tuple(ENGINES)]
    """Choices for typer: names that have a record. Type checkers reject a Literal of names defined elsewhere."""

Output = Literal["text", "json", "github", "sarif"]
Lines = Mapping[str, list[str]]
TrustCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=lambda given: allow_code(bool(given)),
        help="Run the code of model.module, or that the folder of model.hf brings (auto_map).",
    ),
]
"""Type of the option ``--trust-remote-code``, for each command that may build a model.

:func:`code_allowed` returns the option's value."""
_ERRORS = 1


def load_plan_or_exit(
    path: Path,
    overrides: list[str],
    output: Output = "text",
    strict: bool = False,
    *,
    trace: bool = False,
    forgive: Collection[str] = (),
    also: Sequence[Path] = (),
) -> Plan:
    """Return the plan made from a spec or read from a plan file; shows all findings and ends the command on errors.

    ``also`` are further files of a run of another training system, whose first is ``path``.
    ``forgive`` holds the codes of rules about kernels whose errors are shown as warnings.
    """
    if is_plan(path):
        return read_plan_or_exit(path, overrides)
    plan, findings, lines = _planned(path, overrides, trace=trace, forgive=forgive, also=also)
    failed = plan is None or _fails(findings, strict=strict)
    show(findings, lines, output, failed=failed)
    if plan is None or failed:
        raise typer.Exit(_ERRORS)
    return plan


def loaded_or_exit(path: Path, overrides: list[str], output: Output, also: Sequence[Path] = ()) -> tuple[Loaded, Known]:
    """Return a spec that was read, or made from a file of another training system; ends the command on errors."""
    loaded, source_settings = load_any(path, overrides, also)
    lines = dict(loaded.source.texts)
    if loaded.spec is None:
        show(loaded.diagnostics, lines | _lines_elsewhere(loaded.diagnostics, lines), output, failed=True)
        raise typer.Exit(_ERRORS)
    show(loaded.diagnostics, lines | _lines_elsewhere(loaded.diagnostics, lines), output, failed=False)
    return loaded, source_settings


def check_specs(paths: list[Path], overrides: list[str], output: Output, strict: bool) -> int:
    """Show the findings of each spec and whether it can be planned; returns 0 if all of them can be planned, else 1."""
    from partool.diagnostics.machine import as_dict

    results, everything, code = [], [], 0
    texts: dict[str, list[str]] = {}
    for path in paths:
        if is_plan(path):
            plan: Plan | None = read_plan_or_exit(path, overrides)
            findings: list[Diagnostic] = []
            lines: Lines = {}
        else:
            plan, findings, lines = _planned(path, overrides)
        failed = plan is None or _fails(findings, strict=strict)
        code = max(code, _ERRORS * failed)
        everything += findings
        texts.update(lines)
        results.append({"spec": str(path), "ok": not failed, "diagnostics": [as_dict(finding) for finding in findings]})
        if output == "text":
            show(findings, lines, output, failed=failed)
            verdict = "not sound" if failed or plan is None else f"the plan is sound ({plan.hash[:12]})"
            say(f"{path}: {verdict}", err=True)
    if output == "json":
        say(json.dumps({"ok": code == 0, "specs": results}, indent=2))
    elif output != "text":
        show(everything, texts, output, failed=code != 0)
    return code


def varied(path: Path, overrides: list[str], keys: list[str]) -> list[tuple[list[str], Plan | None, str]]:
    """Return (overrides, best plan or None, error or empty text) for each combination of the values in ``keys``.

    The command ends if a key is unknown.
    """
    from partool.planner.queries import combinations
    from partool.spec import without_value

    try:
        rows = combinations(keys)
    except ValueError as error:
        raise typer.BadParameter(f"--vary: {error}") from error
    plans = []
    for row in rows:
        plan, findings, lines = _planned(path, [*overrides, *row])
        errors = [finding for finding in findings if finding.severity == "error"]
        if any(finding.code in ("PT101", "PT107") for finding in errors):
            show(errors, lines, "text", failed=True)
            raise typer.Exit(_ERRORS)
        shown = [without_value(one) for one in row]
        plans.append((shown, plan, f"{errors[0].code}: {errors[0].message}" if errors else ""))
    return plans


def longest_sequences(
    path: Path, overrides: list[str], keys: list[str]
) -> list[tuple[list[str], Longest, Plan | None]]:
    """Return the longest sequence that fits with each method of sequence parallelism, if ``keys`` vary the length.

    The result has (other overrides, longest sequence, plan) for each method and each combination of the other keys;
    it is empty if ``keys`` do not vary the sequence length.
    """
    from partool.planner.longest import longest
    from partool.planner.queries import LENGTH, combinations
    from partool.spec import load

    rows = combinations(keys)
    lengths = [int(value) for row in rows for key, _, value in (one.partition("=") for one in row) if key == LENGTH]
    others = dict.fromkeys(tuple(one for one in row if not one.startswith(f"{LENGTH}=")) for row in rows)
    sequences = []
    for beside in others if lengths else ():
        loaded = load(path, [*overrides, *beside])
        if loaded.spec is None:
            continue
        for one in longest(loaded.spec, path.absolute().parent, max(lengths)):
            plan = _planned(path, [*overrides, *beside, *one.overrides])[0] if one.tokens else None
            sequences.append((list(beside), one, plan))
    return sequences


def answer_or_exit(path: Path, overrides: list[str], question: str) -> list[str]:
    """Return the overrides that set the smallest cluster, or the largest value that fits, as ``question`` asks.

    ``question`` is ``smallest`` or a member of ``LARGEST``. The command ends if nothing fits.
    """
    from partool.planner.queries import LARGEST, largest, smallest_cluster
    from partool.spec import load

    loaded = load(path, overrides)
    if loaded.spec is None or path.suffix == ".json":
        load_plan_or_exit(path, overrides)  # shows the errors
        raise typer.BadParameter("a plan is already decided; this question is about a spec")
    folder = path.absolute().parent
    what = next((name for name in LARGEST if name == question), None)
    answer = smallest_cluster(loaded.spec, folder) if what is None else largest(loaded.spec, folder, what)
    if answer is None:
        load_plan_or_exit(path, overrides)
        wanted = "no number of these devices is enough" if what is None else f"no {what} fits"
        fail("PT301", f"{wanted} for a layout that is sure to fit", "partool explain PT301", 1)
    say(f"partool: {question}: {', '.join(answer)}", err=True)
    return answer


def _planned(
    path: Path,
    overrides: list[str],
    *,
    trace: bool = False,
    forgive: Collection[str] = (),
    also: Sequence[Path] = (),
) -> tuple[Plan | None, list[Diagnostic], Lines]:
    """Return a spec's plan (None after errors), all findings, and the lines by file that findings point to."""
    loaded, _ = load_any(path, overrides, also)
    findings, plan = list(loaded.diagnostics), None
    if loaded.spec is not None or loaded.rest is not None:
        from partool.cli._watch import watched
        from partool.planner.loaded import plan_loaded
        from partool.planner.problem import SearchBudget

        with watched(budget := SearchBudget()):
            plan, findings = plan_loaded(loaded, path, trace=trace, forgive=forgive, budget=budget)
    lines = dict(loaded.source.texts)
    return plan, findings, lines | _lines_elsewhere(findings, lines)


def _lines_elsewhere(findings: list[Diagnostic], texts: Lines) -> dict[str, list[str]]:
    """Return, by file name, the lines of files not in ``texts`` that findings point to, such as a site profile."""
    lines = {}
    for name in {finding.span.file for finding in findings if finding.span} - set(texts):
        with suppress(OSError, ValueError):  # a finding may name an override instead of a file
            lines[name] = Path(name).read_text(encoding="utf-8").split("\n")
    return lines


def _fails(findings: list[Diagnostic], *, strict: bool) -> bool:
    return any(f.severity == "error" or strict for f in findings if f.severity != "note")


def read_plan_or_exit(path: Path, overrides: list[str] | None = None) -> Plan:
    """Return the plan in a file; ends the command with PT503 if the file is no plan, PT012 if it is another tool's."""
    refuse_foreign(path)
    if overrides:
        raise typer.BadParameter("--set changes a spec, not a plan: partool launch SPEC --resume RUN --set ...")
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_other_json(path, text)
        plan = Plan.from_json(text)
        reason = plan.contradiction
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        if refusal := other_version(path):
            fail("PT503", *refusal, 1)
        reason = _first(error) if isinstance(error, ValidationError) else str(error)
    if reason:
        fail("PT503", f"{path} is no plan of this version: {reason}", "make it again: partool plan SPEC --out FILE", 1)
    return plan


def _refuse_other_json(path: Path, text: str) -> None:
    """End the command if the text is an object of JSON without anything of a plan."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return
    if isinstance(document, dict) and not document.keys() & {"partool_version", "layout", "prediction"}:
        from partool.engines.kinds import LOOKED_FOR

        fail("PT503", f"{path} is neither a plan nor a configuration of DeepSpeed or accelerate", LOOKED_FOR, 1)


def refuse_foreign(path: Path) -> None:
    """End the command with PT012 if the file is a configuration of another tool, such as DeepSpeed."""
    if refusal := foreign_file(path):
        fail("PT012", f"{path}: {refusal[0].replace('spec', 'spec or a plan')}", refusal[1], 1)


def _first(error: ValidationError) -> str:
    """Return text with the first error of a malformed plan and the field that has the error."""
    item = error.errors(include_url=False)[0]
    place = ".".join(map(str, item["loc"]))
    words = PATTERNS.get(item.get("ctx", {}).get("pattern", ""))
    message = f"must be {words}" if words else item["msg"]
    return f"`{place}`: {message}" if place else message


def show(findings: list[Diagnostic], lines: Lines, output: Output, *, failed: bool) -> None:
    """Print findings as text on stderr, or in another form of ``output`` on stdout.

    With ``json``, findings go to stdout only if the command failed, so that no plan is printed there.
    """
    if output in ("github", "sarif"):
        from partool.diagnostics.machine import render_github, render_sarif

        say(render_github(findings) if output == "github" else render_sarif(findings, lines, _version()), nl=False)
    elif output == "json" and failed:
        from partool.diagnostics.machine import as_dict

        say(json.dumps({"diagnostics": [as_dict(finding) for finding in findings]}, indent=2))
    elif findings:
        text = render_text(findings, lines, colour=wants_colour(sys.stderr), columns=columns_of(sys.stderr))
        say(text + summary(findings), err=True, painted=True)


def _version() -> str:
    from partool.version import __version__

    return __version__
