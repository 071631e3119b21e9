"""Compare a run with its plan: every term, and the timeline of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.evaluation_result import EvaluationResult
from partool.plan.record import Count, DamagedRecordError, Noted, Number, damage, parse_json
from partool.plan.run import RunStatus
from partool.plan.types import Plan
from partool.report.drawing import Drawing
from partool.report.executed import Comparison
from partool.report.experts import ExpertLoad, render_expert_loads
from partool.report.headline import Headline, render_headline
from partool.report.pairs import PairReport, render_pairs
from partool.report.samples import render_samples
from partool.report.terminal_curves import render_history
from partool.report.terminal_timeline import console_windows, render_timeline
from partool.report.trace import Trace, process, trace
from partool.report.units import counted, seconds, size
from partool.schedule import Action

SUMMARY_FILE = "summary.json"
_SECTIONS = {
    "memory": "memory per rank", "host": "host memory per rank", "time": "time per step", "traffic": "sent per step",
}  # fmt: skip
_STAGES = 16
"""Maximum number of stages with a line; if there are more, those whose times differ most from the plan's are shown."""


@dataclass(frozen=True)
class Term:
    """Predicted and measured values of one term, formatted as a line of a table."""

    section: str
    name: str
    predicted: str
    measured: str
    ratio: str
    measure: str


class SummaryTerm(Noted):
    """Predicted and measured values of one term, in its unit."""

    section: str
    term: str
    predicted: Number | None
    measured: Number | None
    measure: str
    unit: str
    ratio: Number | None


class RunSummary(Noted):
    """Contents of ``summary.json``, which the runtime writes at the end of an attempt."""

    world_size: Count | None = None
    ranks: Count | None = None
    terms: list[SummaryTerm]
    mfu: Number | None = None
    predicted_mfu: Number | None = None
    slow: str | None = None


def read_summary(run_dir: Path) -> RunSummary | None:
    """Return the summary that the run's last attempt wrote at its end; None if it is missing.

    Raises :class:`DamagedRecordError` if it holds something else.
    """
    file = run_dir / SUMMARY_FILE
    try:
        return RunSummary.model_validate(parse_json(file.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedRecordError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise DamagedRecordError(f"{file}: {damage(error)}") from None


def term_rows(summary: RunSummary) -> list[Term]:
    """Return a row for each term of a summary whose predicted or measured value is not zero."""
    rows = []
    for term in summary.terms:
        if not term.predicted and not term.measured:
            continue
        show = seconds if term.unit == "s" else size
        values = ["–" if value is None else show(value) for value in (term.predicted, term.measured)]
        ratio = "" if term.ratio is None else f"{term.ratio:.2f}"
        section = _SECTIONS.get(term.section, term.section)
        rows.append(Term(section, term.term, values[0], values[1], ratio, term.measure))
    return rows


def no_terms(status: RunStatus | None) -> str:
    """Return why a run has no terms yet."""
    if status is None:
        return "the run has not ended yet, or was killed"
    return "the run is still running" if status.active else "the run ended before it could write them"


def stale_terms(status: RunStatus | None) -> str:
    """Return a note that the terms come from an earlier attempt; empty if the run is not active."""
    return "Terms are those of an earlier attempt: the run is still running." if status and status.active else ""


def slow_words(summary: RunSummary | None) -> str:
    """Return a note with the reason why the run was slower than its plan; empty if it was not slower."""
    return f"Slower than planned: {summary.slow}." if summary is not None and summary.slow else ""


def render_run(
    title: str,
    summary: RunSummary | None,
    comparison: Comparison | None,
    note: str,
    console: Console,
    *,
    head: Headline,
    status: RunStatus | None = None,
    loads: Sequence[ExpertLoad] = (),
    pairs: Sequence[PairReport] = (),
    result: EvaluationResult | None = None,
) -> None:
    """Print a run's ``head`` and curves, its terms, the ``loads`` of its experts, and its pipeline's timeline.

    Of an evaluation its ``result`` is printed, too. ``pairs`` are figures of pairs of answers. ``note`` says why there
    is no timeline; ``status`` is None if this machine does not know it.
    """
    console.print(Text(title, "bold"))
    render_headline(head, console)
    if result is not None:
        console.print(Text("\n".join(result.lines())))
    console.print()
    render_history(head.history, console)
    render_samples(head.history, console)
    if summary is None:
        console.print(Text(f"No terms: {no_terms(status)}."))
    else:
        if words := stale_terms(status):
            console.print(Text(words))
        if words := slow_words(summary):
            console.print(Text(words))
        console.print(_terms(summary))
    console.print()
    render_expert_loads(loads, console)
    render_pairs(pairs, console)
    if comparison is None:
        console.print(Text(f"No timeline: {note}."))
        return
    render_comparison(comparison, console)


def render_comparison(comparison: Comparison, console: Console) -> None:
    """Print an executed step next to its simulations."""
    console.print(Text(headline(comparison), "bold"))
    if words := not_simulated(comparison):
        console.print(Text(words))
    console.print(_spans(comparison))
    parts = console_windows(comparison.executed, console, comparison.simulated.span_s if comparison.simulated else 0.0)
    for title, drawing in (("executed", comparison.executed), ("simulated from measured times", comparison.simulated)):
        if drawing is not None:
            console.print()
            console.print(Text(title, "bold"))
            render_timeline(drawing, console, parts=parts)
    console.print()
    console.print(_ranks(comparison))
    console.print()
    console.print(_stages(comparison))


def headline(comparison: Comparison) -> str:
    """Return a title that names the compared step."""
    schedule = comparison.schedule
    logged = counted(len(comparison.steps), "logged step")
    of = f"step {comparison.step}" if comparison.picked else f"step {comparison.step}, of usual length among {logged}"
    if comparison.earlier:
        of += f", done in attempt {comparison.attempt} under an earlier plan"
    sizes = f"{counted(schedule.ranks, 'rank')}, {counted(schedule.micro_batches, 'micro-batch')}"
    return f"{schedule.name}, {sizes}: {of}"


def not_simulated(comparison: Comparison) -> str:
    """Return the reason why a step is not compared with simulations; empty if the step is compared."""
    if comparison.plan is not None:
        return ""
    return (
        f"The plan of attempt {comparison.attempt} is not kept any more, so nothing is simulated: "
        "only what was executed."
    )


def span_rows(comparison: Comparison) -> list[tuple[str, Drawing, float]]:
    """Return (name, timeline, executed span divided by the timeline's span) for each known timeline."""
    executed_s = comparison.executed.span_s
    rows = (
        ("predicted", comparison.predicted),
        ("simulated from measured times", comparison.simulated),
        ("executed", comparison.executed),
    )
    return [
        (name, drawing, executed_s / drawing.span_s if drawing.span_s else 0.0) for name, drawing in rows if drawing
    ]


def comparison_data(comparison: Comparison) -> dict[str, object]:
    """Return a comparison as data; times are in seconds, and None stands for values that could not be simulated."""
    return {
        "schedule": comparison.schedule.name,
        "step": comparison.step,
        "steps": list(comparison.steps),
        "attempt": comparison.attempt,
        "earlier_plan": comparison.earlier,
        "plan_hash": comparison.plan.hash if comparison.plan is not None else None,
        "micro_batches": comparison.schedule.micro_batches,
        **{
            name: {"span_s": drawing.span_s, "bubble": drawing.bubble} if drawing is not None else None
            for name, drawing in (
                ("predicted", comparison.predicted),
                ("simulated", comparison.simulated),
                ("executed", comparison.executed),
            )
        },
        "ranks": [asdict(rank) for rank in comparison.ranks],
        "stages": [
            {"stage": stage, "rank": comparison.schedule.placement[stage], **times}
            for stage, times in stage_rows(comparison)
        ],
    }


def passes(comparison: Comparison) -> tuple[tuple[str, str], ...]:
    """Return (key, name) of each kind of pass that ran; a split backward pass counts as two kinds."""
    kinds = {box.action.kind for box in comparison.executed.boxes}
    names = (("F", "forward"), ("B", "backward"), ("I", "input gradients"), ("W", "weight gradients"))
    return tuple((kind, name) for kind, name in names if kind in kinds)


def stage_rows(comparison: Comparison) -> list[tuple[int, dict[str, float | None]]]:
    """Return (stage, times) per stage; ``times`` has measured and predicted seconds per micro-batch by kind of pass.

    Predicted values are None if the plan of the step is not kept.
    """
    rows = []
    for stage in range(comparison.schedule.stages):
        times: dict[str, float | None] = {}
        for kind, name in passes(comparison):
            key, action = name.replace(" ", "_"), Action(kind, stage, 0)  # type: ignore[arg-type]
            times[f"{key}_s"] = comparison.measured.of(action)
            times[f"{key}_predicted_s"] = comparison.planned.of(action) if comparison.planned is not None else None
        rows.append((stage, times))
    return rows


def comparison_trace(plan: Plan, comparison: Comparison) -> Trace:
    """Return the executed and simulated timelines of a step as a Chrome trace; ``plan`` is the run's current plan."""
    its = comparison.plan or plan
    events: list[Trace] = []
    for number, (name, drawing, _) in enumerate(reversed(span_rows(comparison))):
        events += process(drawing, f"{its.name}: {name} ({drawing.name}, step {comparison.step})", number)
    plan_hash = comparison.plan.hash if comparison.plan is not None else None
    return trace(
        events, {"plan": its.name, "plan_hash": plan_hash, "attempt": comparison.attempt, "step": comparison.step}
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True, header_style="dim")
    return table


def _terms(summary: RunSummary) -> Table:
    table = _table("term", "predicted", "measured", "ratio")
    table.add_column("measure", header_style="dim")
    section = ""
    for term in term_rows(summary):
        if term.section != section:
            section = term.section
            table.add_row(Text(section, "bold"))
        table.add_row(f"  {term.name}", term.predicted, term.measured, term.ratio, term.measure)
    return table


def _spans(comparison: Comparison) -> Table:
    table = _table("", "first to last action", "ranks idle", "executed / this")
    for name, drawing, ratio in span_rows(comparison):
        table.add_row(name, seconds(drawing.span_s), f"{drawing.bubble:.1%}", f"{ratio:.2f}")
    return table


def idle_columns(comparison: Comparison) -> list[tuple[str, Drawing]]:
    """Return (name, timeline) of each timeline whose idle shares are printed in a column."""
    drawings = (
        ("executed", comparison.executed),
        ("simulated", comparison.simulated),
        ("predicted", comparison.predicted),
    )
    return [(name, drawing) for name, drawing in drawings if drawing is not None]


def _ranks(comparison: Comparison) -> Table:
    stages = "owns" if comparison.schedule.moves == "weights" else "stages"
    columns = idle_columns(comparison)
    names = ["idle: executed", *(name for name, _ in columns[1:])]
    table = _table("rank", stages, "compute", "waiting", "between", *names)
    for rank, times in enumerate(comparison.ranks):
        idle = [idle_share(drawing, rank) for _, drawing in columns]
        mine = ", ".join(map(str, comparison.schedule.on_rank(rank)))
        table.add_row(
            str(rank), mine, seconds(times.compute_s), seconds(times.waiting_s), seconds(times.other_s), *idle
        )
    return table


def idle_share(drawing: Drawing, rank: int) -> str:
    """Return the share of a timeline's span in which a rank does not compute, as text."""
    return f"{max(0.0, 1.0 - drawing.busy_s[rank] / drawing.span_s):.1%}" if drawing.span_s else "–"


def stage_cells(times: Mapping[str, float | None]) -> list[tuple[str, float]]:
    """Return (text, number) of a stage's measured seconds and, with a plan, predicted seconds and ratio, by pass."""
    cells = []
    for key in [key for key in times if not key.endswith("_predicted_s")]:
        measured, planned = times[key] or 0.0, times[f"{key.removesuffix('_s')}_predicted_s"]
        cells.append((seconds(measured) if measured else "–", measured))
        if planned is not None:
            ratio = measured / planned if planned else 0.0
            cells += [(seconds(planned), planned), (f"{ratio:.2f}" if ratio else "–", ratio)]
    return cells


def _stages(comparison: Comparison) -> Table:
    beside = ("predicted", "ratio") if comparison.planned is not None else ()
    table = _table("stage", "rank", *(title for _, name in passes(comparison) for title in (name, *beside)))
    for stage, times in _shown(stage_rows(comparison)):
        table.add_row(
            str(stage), str(comparison.schedule.placement[stage]), *(words for words, _ in stage_cells(times))
        )
    return table


def _shown(rows: Sequence[tuple[int, dict[str, float | None]]]) -> list[tuple[int, dict[str, float | None]]]:
    def off(row: tuple[int, dict[str, float | None]]) -> float:
        predicted = sum(value or 0.0 for key, value in row[1].items() if key.endswith("_predicted_s"))
        took = sum(value or 0.0 for key, value in row[1].items() if not key.endswith("_predicted_s"))
        return -abs(took / predicted - 1.0) if predicted else 0.0

    return sorted(sorted(rows, key=off)[:_STAGES], key=lambda row: row[0])
