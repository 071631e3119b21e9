"""The Python face of partool, for notebooks and CI: ``from partool import load, plan, render`` (docs/guide/python.md).

Importing this module is cheap: the planner is imported by the first call, torch never.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partool.diagnostics.record import Diagnostic
    from partool.plan.types import Plan
    from partool.render.job import Rendered
    from partool.spec.loader import Loaded

    SpecSource = str | os.PathLike[str] | Mapping[str, Any]
    """The path of a spec, or its sections."""
    Overrides = Mapping[str, Any] | Iterable[str] | str
    """Values by field, such as ``{"training.steps": 100}``, or one text or several as for ``--set``."""

_UNNAMED = "spec.yaml"
"""Stands for the file of a spec that is given by its sections; relative paths begin at the current folder."""


class SpecError(ValueError):
    """Raised for a spec with errors, or a plan that a target cannot run; the message is what the commands print.

    ``findings`` has all findings, warnings and notes included.
    """

    def __init__(self, findings: Sequence[Diagnostic], lines: Mapping[str, list[str]] | None = None) -> None:
        from partool.diagnostics.text import render_text, summary

        self.findings = tuple(findings)
        super().__init__((render_text(list(findings), lines or {}) + summary(list(findings))).rstrip())


def load(source: SpecSource, overrides: Overrides = ()) -> Loaded:
    """Read a spec from a file or from its sections.

    The result's ``spec`` holds the values and ``diagnostics`` the warnings and notes. Raises :class:`SpecError` if
    there are errors; a file that cannot be read is one of them.
    """
    loaded = _read(source, overrides)
    if loaded.has_errors:
        from partool.planner.loaded import plan_loaded

        _, findings = plan_loaded(loaded, Path(loaded.source.file))
        raise SpecError(findings, loaded.source.texts)
    return loaded


def plan(spec: Loaded | SpecSource, overrides: Overrides = ()) -> Plan:
    """Return the plan of a spec: the layout, predictions of memory and time, and reasons.

    Takes what :func:`load` returns, or what it takes. ``findings`` of the result has warnings and notes. Raises
    :class:`SpecError` if the spec has errors or nothing fits.
    """
    from partool.planner.loaded import plan_loaded
    from partool.spec.loader import Loaded

    if isinstance(spec, Loaded) and overrides:
        raise ValueError("overrides change a spec as it is read: give them to load")
    loaded = spec if isinstance(spec, Loaded) else load(spec, overrides)
    result, findings = plan_loaded(loaded, Path(loaded.source.file))
    if result is None or _failed(findings):
        raise SpecError(findings, loaded.source.texts)
    return result


def check(source: SpecSource, overrides: Overrides = ()) -> tuple[Diagnostic, ...]:
    """Return all findings of reading and planning a spec, as ``partool plan --check`` shows them; raises nothing."""
    from partool.planner.loaded import plan_loaded

    loaded = _read(source, overrides)
    return tuple(plan_loaded(loaded, Path(loaded.source.file))[1])


def render(plan: Plan, target: str | None = None) -> Rendered:
    """Return the files that a launch of the plan would submit, byte for byte those of ``partool render``.

    ``target`` is ``local``, ``torchrun``, ``slurm`` or ``k8s``; by default the plan's. ``files`` of the result has the
    texts by name, ``text`` is the one to submit. Raises :class:`SpecError` if the plan cannot run there.
    """
    from partool.launch.prepare import about_launch, aimed_at
    from partool.plan.types import Plan
    from partool.strategies.targets import TARGETS

    if not isinstance(plan, Plan):
        raise TypeError(f"render takes what plan returns, not {type(plan).__name__}")
    if target is not None and target not in TARGETS:
        raise ValueError(f"there is no target {target!r}: {', '.join(TARGETS)}")
    aimed = aimed_at(plan, target)
    planned = {(finding.code, finding.message) for finding in plan.findings}
    _raise_on([*_refused(aimed), *(one for one in about_launch(aimed) if (one.code, one.message) not in planned)])
    return _rendered(aimed)


def _read(source: SpecSource, overrides: Overrides) -> Loaded:
    import json

    from partool.spec.loader import load as load_file
    from partool.spec.loader import load_text

    if isinstance(overrides, Mapping):
        texts = [f"{key}={json.dumps(_plain(value, key))}" for key, value in overrides.items()]
    else:
        texts = [overrides] if isinstance(overrides, str) else [*overrides]
    if isinstance(source, Mapping):
        import yaml

        return load_text(yaml.safe_dump(_plain(source, ""), sort_keys=False, allow_unicode=True), _UNNAMED, texts)
    if not isinstance(source, str | os.PathLike):
        raise TypeError(f"a spec is a path or a mapping of its sections, not {type(source).__name__}")
    return load_file(Path(source), texts)


def _plain(value: Any, field: str) -> Any:
    """Return a value of a spec as YAML and JSON can hold it: paths become texts.

    Raises TypeError, which names the field, for a value that no spec can hold.
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, f"{field}.{key}".lstrip(".")) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, field) for inner in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TypeError(
        f"{field} is a {type(value).__name__}: a spec holds numbers, texts, true and false, lists, sections"
    )


def _failed(findings: Iterable[Diagnostic]) -> bool:
    return any(finding.severity == "error" for finding in findings)


def _raise_on(findings: Sequence[Diagnostic]) -> None:
    if _failed(findings):
        raise SpecError(findings)


def _refused(plan: Plan) -> Iterable[Diagnostic]:
    """Yield why a plan cannot be rendered for any target."""
    from partool.catalog.transformers_process import code_allowed
    from partool.diagnostics.record import Diagnostic

    if plan.code and not code_allowed():
        message = f"the plan builds its model with code from {plan.code}, which runs only if you allow it"
        yield Diagnostic("PT590", message, help="partool render --trust-remote-code renders it")
    if plan.engine == "partool" and not plan.runnable:
        codes = " ".join(plan.not_runnable)
        message = f"the runtime cannot run this plan yet ({codes})"
        yield Diagnostic("PT505", message, help=f"partool explain {codes}")


def _rendered(plan: Plan) -> Rendered:
    from dataclasses import replace

    from partool.launch.prepare import commands_here, sizes_of
    from partool.launch.store import RunStore
    from partool.launch.submit import hash_of, job_of
    from partool.plan.run import PLAN_FILE
    from partool.render.job import Rendered
    from partool.render.render import findings
    from partool.render.render import render as render_job
    from partool.strategies.targets import HERE

    here, program = plan.launch.target == HERE, None
    if plan.engine != "partool":
        from partool.engines.write import terms_of
        from partool.render.program import program as program_of

        _raise_on(terms_of(plan).findings)
        program = program_of(plan)
    if here:
        return (
            commands_here(plan)
            if program is None
            else Rendered(program.script, {**program.files, PLAN_FILE: plan.to_json()})
        )
    sizes = sizes_of(plan)
    run = RunStore().next_submitted(plan.name, hash_of(plan, (), sizes))
    job = replace(job_of(plan, run, (), sizes, None), program=program)
    _raise_on(findings(plan.launch.target, job))
    return render_job(plan.launch.target, job)
