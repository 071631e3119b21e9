"""``partool plan --improve``: the best plan that the same training system can do, as changes of the present one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from partool.cli._files import write_or_exit
from partool.cli._foreign import Known
from partool.cli._load import Output, show
from partool.cli._watch import watched
from partool.engines.improve import LEAST_GAIN, Advice, advice, freed, theirs
from partool.engines.settings import Setting
from partool.engines.write import WRITABLE, terms_of
from partool.engines.written import EngineChange
from partool.plan.terminal import say
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.planner.loaded import name_of
from partool.planner.problem import SearchBudget
from partool.report.units import bars
from partool.spec import Loaded
from partool.spec._overrides import SHORTHAND
from partool.spec.numbers import GIB
from partool.strategies.engines import ENGINES

_FLAGS = ("megatron",)
"""Engines whose arguments are flags where they are on."""
_NOT_FITTING = ("PT301", "PT302", "PT828")
"""Codes of findings that say that a pinned layout does not fit, or that its training system cannot do it."""


def improve(
    path: Path,
    loaded: Loaded,
    source: Known,
    overrides: Sequence[str],
    *,
    output: Output,
    out: Path | None,
) -> None:
    """Plan a spec as it is and with its layout open, and print what to change; ``out`` gets the better plan.

    ``source`` has the settings of a file of another training system, whose lines are named.
    """
    assert loaded.spec is not None
    before = _plan(path, loaded, output, may_fail=True)
    loaded.spec = freed(loaded.spec, dict.fromkeys(_pinned(overrides)))
    after = _plan(path, loaded, output, may_fail=False)
    assert after is not None
    result = advice(before, after, source.settings, source.carried)
    if out is not None:
        write_or_exit(after.to_json(), out)
    if output == "json":
        say(json.dumps(_as_data(result), indent=2))
    else:
        say("\n".join(_as_text(result, source.settings, source.carried)))


def _pinned(overrides: Sequence[str]) -> list[str]:
    """Return the fields of ``parallel`` that the command line sets: they stay as they are."""
    paths = [tuple(text.partition("=")[0].strip().split(".")) for text in overrides]
    paths = [(*path, SHORTHAND[path][0]) if path in SHORTHAND else path for path in paths]
    return [".".join(path[1:]) for path in paths if path[0] == "parallel" and len(path) > 1]


def _plan(path: Path, loaded: Loaded, output: Output, *, may_fail: bool) -> Plan | None:
    """Return the plan of a spec; ends the command on errors, but for layouts that do not fit if these ``may_fail``."""
    assert loaded.spec is not None
    budget = SearchBudget()
    with watched(budget):
        result = make_plan(loaded.spec, base_dir=path.absolute().parent, default_name=name_of(path), budget=budget)
    errors = [finding for finding in result.diagnostics if finding.severity == "error"]
    if result.plan is None and not (may_fail and {finding.code for finding in errors} <= set(_NOT_FITTING)):
        show(loaded.source.attach(errors), dict(loaded.source.texts), output, failed=True)
        raise typer.Exit(1)
    if result.plan is None:
        say(f"as it is: {'; '.join(error.message for error in errors)}", err=output == "json")
    return result.plan


def _as_text(result: Advice, settings: Mapping[str, Setting], carried: Mapping[str, str]) -> list[str]:
    title, after = ENGINES[result.after.engine].title, result.after
    lines = [f"as it is: {_figures(result.before)}"] if result.before is not None else []
    if not result.changes:
        return [*lines, f"{title} can do no better layout than this, by these predictions"]
    if not result.worth_it:
        was_s, now_s = result.scores_s
        lines.append(
            f"best for {title}: {_figures(after)}: {_times(result.faster)} on paper. With its risks it counts as "
            f"{now_s:.3g} s against {was_s:.3g} s, and a change is worth it from {LEAST_GAIN:.0%} on. Keep the layout "
            "as it is."
        )
    else:
        lines.append(f"better, and {title} can do it: {_figures(after)}{_gain(result)}")
    named = {change.name for change in result.changes}
    several = len({setting.file for setting in settings.values()}) > 1
    for change in result.changes:
        mine = theirs(change, settings, carried)
        # What the user never wrote is not to be removed; their own words for it are.
        if change.after is None and settings and change.name not in settings and all(one.name in named for one in mine):
            continue
        lines.append(f"  {_in_words(change, mine, flags=after.engine in _FLAGS, several=several)}")
    if after.engine in WRITABLE:
        lines += [f"{title} cannot train it as it is: {finding.message}" for finding in terms_of(after).findings]
    return [*lines, f"Evidence: {bars(after.prediction)}; {after.prediction.evidence}."]


def _figures(plan: Plan) -> str:
    memory, time = plan.prediction.memory, plan.prediction.time
    return (
        f"{time.step_time_s:.3g} s per step, {memory.total_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.1f} GiB "
        f"({memory.verdict})"
    )


def _gain(result: Advice) -> str:
    if result.before is None:
        return ""
    less = (result.before.prediction.memory.total_bytes - result.after.prediction.memory.total_bytes) / GIB
    return f": {_times(result.faster)}, {abs(less):.1f} GiB {'less' if less >= 0 else 'more'}"


def _times(faster: float) -> str:
    """Return a gain as a percentage, or as a factor where it is large."""
    if faster > 0.5:
        return f"{1.0 + faster:.1f} times as fast"
    return f"{faster:.1%} faster" if faster >= 0 else f"{-faster / (1.0 + faster):.1%} slower"


def _in_words(change: EngineChange, mine: list[Setting], *, flags: bool, several: bool) -> str:
    """Return a change as ``name before → after``, ``add name value`` or ``remove name``, with lines of the user's.

    With ``flags``, settings that are on have no value; of ``several`` files, each line says which it is of.
    """
    places = [
        f"{setting.name}, " * (setting.name != change.name)
        + f"{Path(setting.file).name}, " * several
        + f"line {setting.line}"
        for setting in mine
    ]
    where = f"   ({'; '.join(places)})" if places else ""
    name = change.name or f"{change.path}, which your script decides:"
    if change.before is None:
        return f"add {name}{_value(change.after, flags=flags)}"
    if change.after is None:
        return f"remove {name}{where}"
    return f"{name}{_value(change.before, flags=flags)} →{_value(change.after, flags=flags)}{where}"


def _value(value: Any, *, flags: bool) -> str:
    if value is True and flags:
        return ""
    return f" {json.dumps(value) if isinstance(value, (dict, list, bool)) else value}"


def _as_data(result: Advice) -> dict[str, object]:
    def figures(plan: Plan | None) -> dict[str, object] | None:
        if plan is None:
            return None
        memory = plan.prediction.memory
        figure = {"step_time_s": plan.prediction.time.step_time_s, "memory_bytes": memory.total_bytes}
        return {**figure, "verdict": memory.verdict, "fit_probability": memory.fit_probability}

    return {
        "engine": result.after.engine,
        "before": figures(result.before),
        "after": figures(result.after),
        "faster": round(result.faster, 6),
        "scores_s": [round(score_s, 6) for score_s in result.scores_s],
        "worth_it": result.worth_it,
        "changes": [
            {"name": change.name, "field": change.path, "before": change.before, "after": change.after}
            for change in result.changes
        ],
    }
