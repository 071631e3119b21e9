"""The begin of a run's report: what was trained, on what, for how long, and how it ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.layout.parameters import count, parameters
from partool.plan.run import RunStatus
from partool.plan.types import Plan
from partool.report.curves import PAIRS
from partool.report.history import VALIDATION, History, set_figure
from partool.report.plan_rows import Row, data_name, division, hours_text, job_rows, machines
from partool.report.units import amount, counted
from partool.spec.numbers import duration
from partool.strategies.jobs import JOBS

_LOSS = f"{VALIDATION}loss"
_DONE, _PREEMPTED = 0, 75
"""Exit codes in a run's log, as in docs/design/architecture.md."""
_EVENTS = 8
"""Most attempts, warnings and errors that are listed."""
_LONGEST = 240
"""Most characters of a warning or an error that are shown."""


@dataclass(frozen=True)
class Headline:
    """The begin of a report: (label, text) of its lines, and what the run's log tells."""

    rows: tuple[Row, ...]
    history: History


def headline(plan: Plan, history: History, status: RunStatus | None) -> Headline:
    """Return the begin of a run's report; ``status`` is None if this machine does not know it."""
    trained = [row for row in job_rows(plan) if row[0] in ("Model", "Adapter")]
    rows = (
        *trained,
        ("Data", data_name(plan)),
        ("Layout", "; ".join(division(plan))),
        ("Machines", machines(plan)),
        ("Steps", _steps(plan, history)),
        *_losses(history),
        ("State", state_text(history, status)),
    )
    return Headline(rows, history)


def _steps(plan: Plan, history: History) -> str:
    job = JOBS[plan.job]
    most = "" if job.backward else "at most "
    text = f"{history.step:,} of {most}{counted(plan.training.steps, 'step')}"
    if history.tokens:
        text += f", {amount(history.tokens)} tokens"
    if history.attempts:
        text += f", {duration(history.wall_s)} in {counted(len(history.attempts), 'attempt')}"
        text += f", {hours_text(history.device_hours)} device-hours"
    loss = history.curves.get("loss")
    if loss is not None and loss.steps[-1] > history.step:
        text += f"; an earlier attempt had reached step {int(loss.steps[-1]):,}"
    return text


def _losses(history: History) -> Iterator[Row]:
    if history.not_finite or history.last("loss"):
        last = history.last("loss")
        text = f"{last[1]:.4f} at step {last[0]:,}" if last else "never finite"
        lost = f"; not finite in {counted(history.not_finite, 'step')}" if history.not_finite else ""
        yield "Loss", text + lost
    if (last := history.last(_LOSS)) and (least := history.least(_LOSS)):
        best = "the best" if last == least else f"best {least[1]:.4f} at step {least[0]:,}"
        yield "Validation", f"{last[1]:.4f} at step {last[0]:,}, {best}"
    for name in history.sets:
        yield f"- {name}", _set_text(history, name)


def _set_text(history: History, name: str) -> str:
    """Return the latest figures of a named set, and where its loss was the best."""
    last, least, perplexity = (
        history.last(set_figure(name)),
        history.least(set_figure(name)),
        history.last(set_figure(name, "perplexity")),
    )
    if last is None or least is None:
        return "not yet"
    text = f"{last[1]:.4f} at step {last[0]:,}"
    if perplexity is not None and perplexity[0] == last[0]:
        text += f", perplexity {perplexity[1]:,.4g}"
    return text + (", the best" if last == least else f", best {least[1]:.4f} at step {least[0]:,}")


def state_text(history: History, status: RunStatus | None) -> str:
    """Return how a run ended, or what it does; without a status, as far as its log tells."""
    if status is None:
        if history.end is None:
            return "unknown here; the log has no end, so the run still runs, or was killed"
        code, reason = history.end
        state = "done" if code == _DONE else "preempted" if code == _PREEMPTED else "failed"
        return f"{state} ({reason})" if reason not in ("", state) else state
    reason = status.reason or (history.end[1] if history.end and not status.active else "")
    text = status.state + (f", attempt {status.attempt}" if status.active and status.attempt else "")
    text += f" ({reason})" if reason not in ("", status.state) else ""
    if status.ended is not None and not status.active:
        text += f", {time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(status.ended))}"
    return text


def event_texts(history: History) -> list[str]:
    """Return a line for each of the latest attempts, stops, warnings and errors; attempts from the second on."""
    marks = [mark for mark in history.marks if mark.kind in ("start", "warning", "error", "signal")]
    marks = marks[1:] if marks and marks[0].kind == "start" else marks
    earlier = len(marks) - _EVENTS
    texts = [f"{counted(earlier, 'earlier event')} in events/rank-0.jsonl"] if earlier > 0 else []
    for mark in marks[-_EVENTS:]:
        kind = "" if mark.kind in ("start", "signal") else f"{mark.kind}: "
        words = " ".join(mark.text.split())
        short = words if len(words) <= _LONGEST else f"{words[: _LONGEST - 1]}…"
        texts.append(f"step {mark.step:,}, after {duration(mark.time_s)}: {kind}{short}")
    return texts


def headline_data(plan: Plan, history: History) -> dict[str, object]:
    """Return the figures of the report's begin as data."""
    return {
        "job": plan.job,
        "model": plan.model_source,
        "parameters": count(parameters(plan.model)),
        "layout": list(division(plan)),
        "ranks": plan.layout.mesh.world_size,
        "steps": history.step,
        "planned_steps": plan.training.steps,
        "tokens": history.tokens,
        "wall_s": history.wall_s,
        "device_hours": history.device_hours,
        "attempts": [asdict(attempt) for attempt in history.attempts],
        "not_finite_steps": history.not_finite,
        "end": None if history.end is None else {"exit_code": history.end[0], "reason": history.end[1]},
        "events": [
            {"kind": mark.kind, "step": mark.step, "time_s": mark.time_s, "text": mark.text}
            for mark in history.marks
            if mark.kind in ("warning", "error", "signal")
        ][-_EVENTS:],
        "validation_sets": {name: _set_data(history, name) for name in history.sets},
        "curves": {name: curve.summary() for name, curve in history.curves.items()},
    }


def _set_data(history: History, name: str) -> dict[str, object]:
    """Return the latest figures of a named set as data, each with its step."""
    latest = {figure: history.last(set_figure(name, figure)) for figure in ("loss", "perplexity", *PAIRS)}
    return {figure: {"step": at[0], "value": at[1]} for figure, at in latest.items() if at is not None}


def render_headline(head: Headline, console: Console) -> None:
    """Print the begin of a report, and what happened during the run."""
    texts = event_texts(head.history)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in head.rows:
        table.add_row(f"  {label}", Text(text))
    for number, text in enumerate(texts):
        table.add_row("" if number else "  Events", Text(text))
    console.print(table)
