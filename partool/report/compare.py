"""Several runs side by side: their curves, what differs in their specs, and their results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from partool.plan.diff import flat, shown
from partool.plan.event_log import event_log
from partool.plan.outline import Outline, outline
from partool.plan.record import DamagedRecordError, parse_json
from partool.plan.run import PLAN_FILE, RunStatus
from partool.report.charts import (
    TRAINING_LOSS,
    VALIDATION_LOSS,
    AxisUnit,
    Chart,
    DrawnLine,
    line_of,
    set_chart,
    unit_of,
)
from partool.report.curves import read_history
from partool.report.headline import state_text
from partool.report.history import VALIDATION, Axis, History, Series, set_figure
from partool.report.plan_rows import hours_text
from partool.report.units import amount, figure, seconds, size
from partool.spec.numbers import duration

LEAST, MOST = 2, 20
"""Number of runs in a comparison."""
SIGNS = "123456789abcdefghijk"
"""Character that stands for a run on the terminal, by its place."""
_LOSS = f"{VALIDATION}loss"


@dataclass(frozen=True)
class ComparedRun:
    """What is compared of a run."""

    id: str
    history: History
    state: str
    status: RunStatus | None
    outline: Outline | None
    """Facts that plans of every version have; None without a readable plan."""
    spec: Mapping[str, Any] | None
    """The spec as the plan keeps it; None without a readable plan."""
    notes: tuple[str, ...]
    """What is missing, and why."""


@dataclass(frozen=True)
class LeastLoss:
    """The least loss of a run's validations by one set, and the step that had it."""

    loss: float
    step: int


@dataclass(frozen=True)
class RunResult:
    """Figures of a run; None stands for what its log does not tell."""

    state: str
    steps: int
    planned_steps: int | None
    tokens: float
    loss: float | None
    validation_loss: float | None
    """The least of the run's validations."""
    validation_step: int | None
    validation_sets: dict[str, LeastLoss]
    """Set of data for validation → its least loss."""
    step_time_s: float | None
    """Median over steps, as ``tokens_per_s``."""
    tokens_per_s: float | None
    memory_bytes: float | None
    attempts: int
    wall_s: float
    ranks: int | None
    device_hours: float


@dataclass(frozen=True)
class Difference:
    """A key of specs that differ in it."""

    key: str
    values: tuple[Any, ...]
    """Each run's value; None where its spec does not have the key, or is not known."""
    texts: tuple[str | None, ...]
    """The values as text; None as in ``values``."""


def compared_run(run_dir: Path, run_id: str, status: RunStatus | None) -> ComparedRun:
    """Return what a run's folder tells; what cannot be read is left out, and a note says so."""
    notes = []
    try:
        history = read_history(run_dir)
    except DamagedRecordError as error:
        notes.append(f"some of its events are damaged and left out ({error})")
        history = read_history(run_dir, strict=False)
    facts, spec = _planned(run_dir, notes)
    if not event_log(run_dir, 0).is_file():
        notes.append("no event log here: it may be on another machine")
    elif not history.curves:
        notes.append("its log has no step yet")
    if history.not_finite:
        notes.append(f"its loss is not finite in {history.not_finite:,} of its steps")
    state = state_text(history, status)
    return ComparedRun(run_id, history, state, status, facts, spec, tuple(notes))


def _planned(run_dir: Path, notes: list[str]) -> tuple[Outline | None, Mapping[str, Any] | None]:
    """Return a plan's outline and its spec; adds a note on what cannot be read."""
    file = run_dir / PLAN_FILE
    try:
        facts = outline(file)
        spec = parse_json(file.read_bytes()).get("spec")
    except FileNotFoundError:
        notes.append("no plan.json, so its spec is not compared")
        return None, None
    except (OSError, ValueError, AttributeError):
        notes.append("its plan.json cannot be read, so its spec is not compared")
        return None, None
    if not isinstance(spec, dict) or not spec:
        notes.append("its plan keeps no spec")
        return facts, None
    return facts, spec


def result_of(run: ComparedRun) -> RunResult:
    """Return a run's figures."""
    history = run.history
    of_sets = {
        name: LeastLoss(least[1], least[0]) for name in history.sets if (least := history.least(set_figure(name)))
    }
    last, least, memory = history.last("loss"), history.least(_LOSS), history.curves.get("memory_bytes")
    ranks = history.attempts[-1].ranks if history.attempts else run.outline.ranks if run.outline else None
    return RunResult(
        state=run.status.state if run.status is not None else run.state.split(" ")[0].rstrip(";,"),
        steps=history.step,
        planned_steps=run.outline.training.steps if run.outline is not None else None,
        tokens=history.tokens,
        loss=last[1] if last else None,
        validation_loss=least[1] if least else None,
        validation_step=least[0] if least else None,
        validation_sets=of_sets,
        step_time_s=history.median("step_time_s"),
        tokens_per_s=history.median("tokens_per_s"),
        memory_bytes=float(memory.values.max()) if memory is not None else None,
        attempts=len(history.attempts),
        wall_s=history.wall_s,
        ranks=ranks,
        device_hours=history.device_hours,
    )


def result_cells(results: Sequence[RunResult]) -> list[dict[str, tuple[str, float | None]]]:
    """Return heading → (text, number to sort by) of each run's figures; all runs have the same headings."""
    sets = sorted({name for result in results for name in result.validation_sets})
    return [_cells(result, sets) for result in results]


def _cells(result: RunResult, sets: Sequence[str]) -> dict[str, tuple[str, float | None]]:
    def cell(value: float | None, text: str) -> tuple[str, float | None]:
        return ("–" if value is None else text, value)

    validation, step_s, speed = result.validation_loss, result.step_time_s, result.tokens_per_s
    memory, planned = result.memory_bytes, result.planned_steps
    of_sets = {name: least.loss for name, least in result.validation_sets.items()}
    return {
        "state": (result.state, None),
        "steps": cell(result.steps, f"{result.steps:,}"),
        "planned steps": cell(planned, f"{planned or 0:,}"),
        "tokens": cell(result.tokens, amount(result.tokens)),
        "final loss": cell(result.loss, figure(result.loss, ".4f")),
        "best validation": cell(validation, figure(validation, ".4f")),
        "at step": cell(result.validation_step, f"{result.validation_step or 0:,}"),
        **{f"best {name}": cell(of_sets.get(name), figure(of_sets.get(name), ".4f")) for name in sets},
        "device-hours": cell(result.device_hours, hours_text(result.device_hours)),
        "time": cell(result.wall_s, duration(result.wall_s)),
        "step time": cell(step_s, seconds(step_s or 0.0)),
        "tokens/s": cell(speed, f"{speed or 0:,.0f}"),
        "peak memory": cell(memory, size(memory or 0.0)),
        "attempts": cell(result.attempts, str(result.attempts)),
        "devices": cell(result.ranks, f"{result.ranks or 0:,}"),
    }


def spec_differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the keys in which the specs differ, with every run's value; runs without a spec have none."""
    specs = [flat(dict(run.spec)) if run.spec is not None else None for run in runs]
    keys = dict.fromkeys(key for spec in specs if spec is not None for key in spec)
    differences = []
    for key in sorted(keys):
        texts = [shown(spec[key]) if spec is not None and key in spec else None for spec in specs]
        if len({text for text, spec in zip(texts, specs, strict=True) if spec is not None}) > 1:
            values = tuple(spec.get(key) if spec is not None else None for spec in specs)
            differences.append(Difference(key, values, tuple(texts)))
    return differences


def compared_charts(runs: Iterable[ComparedRun]) -> list[Chart]:
    """Return the charts of a comparison, which have one curve of each run: losses, those of named sets last."""
    sets = sorted({name for run in runs for name in run.history.sets})
    return [TRAINING_LOSS, VALIDATION_LOSS, *map(set_chart, sets)]


def compared_lines(
    runs: Sequence[ComparedRun], chart: Chart, axis: Axis, most: int
) -> tuple[list[tuple[int, DrawnLine]], AxisUnit]:
    """Return (place of the run, line with at most ``most`` points) of each run that has the chart's curve.

    All lines are in the unit of the axis that is returned.
    """
    name = chart.curves[0][0]
    curves = [(place, run.history.curves[name]) for place, run in enumerate(runs) if name in run.history.curves]
    unit = unit_of(axis, _all_curves(runs))
    lines = []
    for place, curve in curves:
        line = line_of(curve, f"{SIGNS[place]} {runs[place].id}", chart, unit, most)
        lines.append((place, DrawnLine(line.words, line.x, line.y, line.dotted, SIGNS[place])))
    return lines, unit


def _all_curves(runs: Iterable[ComparedRun]) -> list[Series]:
    return [curve for run in runs for name in ("loss", _LOSS) if (curve := run.history.curves.get(name)) is not None]


def comparison_data(runs: Sequence[ComparedRun]) -> dict[str, object]:
    """Return a comparison as data; curves are summed up."""
    return {
        "runs": [
            {
                "run": run.id,
                "state": run.state,
                "notes": list(run.notes),
                "result": asdict(result_of(run)),
                "curves": {name: curve.summary() for name, curve in run.history.curves.items()},
            }
            for run in runs
        ],
        "spec_differences": [{"key": each.key, "values": list(each.values)} for each in spec_differences(runs)],
    }
