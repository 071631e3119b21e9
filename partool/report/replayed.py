"""A table of runs compared with predictions, as text and as data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from partool.catalog.profile_file import Profile, Scalar
from partool.cost.evidence import WORDS
from partool.replay.audit import Audit, Group, GroupErrors, Metric, PricedRow, summaries, summary
from partool.replay.blame import LEAST_ROWS, Off
from partool.replay.fit import LEAST_ROWS as LEAST_FITTED
from partool.replay.fit import Fitted
from partool.report.calibration import scalar_text

_METRICS: dict[Metric, str] = {"time": "Step time", "memory": "Peak of memory"}
_GROUPS: tuple[Group, ...] = ("source", "stack", "mechanism")
_WIDEST, _MOST_LINES = 48, 20


def audit_data(audit: Audit, off: list[Off], fits: list[Fitted], written: Mapping[Path, Profile]) -> dict[str, object]:
    """Return everything as data: tables, what is off, scalars, and every row with its prediction or its reason."""
    tables: dict[str, object] = {
        metric: {group: [asdict(one) for one in summaries(audit.of(metric), group)] for group in _GROUPS}
        for metric in _METRICS
    }
    return {
        "file": audit.file,
        "rows": audit.rows,
        "priced": len({row.line for row in audit.priced}),
        "unread": [asdict(row) for row in audit.unread],
        "ignored_columns": list(audit.ignored),
        **tables,
        "out_of_memory": [asdict(row) for row in audit.out_of_memory],
        "off": [{**asdict(one), "text": one.words} for one in off],
        "scalars": [_fit_data(one) for one in fits],
        "calibrations": {str(path): profile.model_dump(mode="json") for path, profile in written.items()},
        "results": [_row_data(row) for row in audit.priced],
    }


def _fit_data(one: Fitted) -> dict[str, object]:
    scalars: dict[str, object] = {name: None if each is None else each.model_dump() for name, each in _scalars(one)}
    keys = {"accelerator": one.accelerator, "stack": one.stack, "engines": list(one.engines)}
    return {**keys, **scalars, "rows": one.rows, "open_rows": one.open_rows}


def _scalars(one: Fitted) -> tuple[tuple[Metric, Scalar | None], ...]:
    return ("time", one.time), ("memory", one.memory)


def _row_data(row: PricedRow) -> dict[str, object]:
    unit = "s" if row.metric == "time" else "bytes"
    return {
        "line": row.line, "metric": row.metric, "source": row.source, "stack": row.stack,
        "accelerator": row.accelerator, f"predicted_{unit}": row.result.predicted, f"measured_{unit}": row.measured,
        "error": row.error, "stated_error": row.stated_error, "mechanisms": list(row.mechanisms),
        "open": list(row.open),
    }  # fmt: skip


def audit_lines(audit: Audit, off: list[Off], fits: list[Fitted], *, every: bool) -> Iterator[str]:
    """Yield everything as text; ``every`` lists all rows, predicted or not."""
    priced = len({row.line for row in audit.priced})
    yield f"{audit.file}: {_rows(audit.rows)}, {priced} compared with predictions, {len(audit.unread)} left out"
    for name in audit.ignored:
        yield f"  a column that nothing reads: {_short(name)}"
    for metric, title in _METRICS.items():
        if rows := audit.of(metric):
            yield ""
            yield from _tables(title, rows)
            if every:
                yield from _listed(metric, rows)
    yield from _left_out(audit, every=every)
    yield ""
    yield from _off(off, audit)
    yield ""
    yield from _fits(fits)


def _tables(title: str, rows: list[PricedRow]) -> Iterator[str]:
    heads = ("rows", "all stated", "bias", "median", "worst", "in line")
    yield f"{title:{_WIDEST}}" + "".join(f"{head:>12}" for head in heads)
    yield _summary_line(summary("all", rows))
    for group in _GROUPS:
        yield f"  by {group}"
        for one in summaries(rows, group):
            yield _summary_line(one, WORDS.get(one.name, one.name) if group == "mechanism" else one.name)
    left = Counter(name for row in rows for name in row.open)
    if left:
        yield "  left open by rows: " + ", ".join(f"{name} {count}" for name, count in left.most_common())


def _summary_line(one: GroupErrors, name: str = "all") -> str:
    figures = (str(one.rows), str(one.stated), f"{one.bias:+.1%}", f"{one.median:.1%}", f"{one.worst:+.1%}")
    return f"    {_short(name):{_WIDEST - 4}}" + "".join(f"{text:>12}" for text in (*figures, str(one.worst_line)))


def _listed(metric: Metric, rows: list[PricedRow]) -> Iterator[str]:
    scale, unit = (1.0, "s") if metric == "time" else (2.0**30, "GiB")
    yield f"  every row: predicted, measured ({unit})"
    for row in rows:
        left = f"; open: {', '.join(row.open)}" if row.open else ""
        figures = f"{row.result.predicted / scale:10.4g} {row.measured / scale:10.4g} {row.error:+8.1%}"
        yield f"    line {row.line:<6} {figures}  {row.stack} on {row.accelerator}: {', '.join(row.mechanisms)}{left}"


def _left_out(audit: Audit, *, every: bool) -> Iterator[str]:
    if audit.out_of_memory:
        verdicts = Counter(row.verdict for row in audit.out_of_memory)
        yield ""
        yield f"Ran out of memory: {_rows(len(audit.out_of_memory))}, predicted " + ", ".join(
            f"{name} {count}" for name, count in verdicts.most_common()
        )
    if not audit.unread:
        return
    yield ""
    yield f"Left out: {_rows(len(audit.unread))}"
    lines: dict[str, list[int]] = {}
    for row in audit.unread:
        lines.setdefault(row.reason, []).append(row.line)
    for reason, numbers in sorted(lines.items(), key=lambda each: (-len(each[1]), each[1])):
        shown = numbers if every else numbers[:_MOST_LINES]
        more = f" and {len(numbers) - len(shown)} more (--breakdown lists all)" if len(shown) < len(numbers) else ""
        yield f"  line{'s' * (len(numbers) > 1)} {', '.join(map(str, shown))}{more}: {' '.join(reason.split())}"


def _off(off: list[Off], audit: Audit) -> Iterator[str]:
    yield "Off beyond the stated error"
    if not audit.priced:
        yield "  nothing can be said: no row was compared"
    elif not off:
        yield f"  nothing: no mechanism with {LEAST_ROWS} rows or more errs beyond its stated error"
    for one in off:
        yield f"  {one.words}"


def _fits(fits: list[Fitted]) -> Iterator[str]:
    yield f"Scalars (from {LEAST_FITTED} rows that leave nothing open)"
    for one in fits:
        name = f"{one.accelerator}, {one.stack}"
        for metric, each in _scalars(one):
            if each is not None:
                yield f"  {name}: {scalar_text('step time' if metric == 'time' else 'memory', each)}"
        left = f", {one.open_rows} more leave settings open" if one.open_rows else ""
        if one.time is None and one.memory is None:
            yield f"  {name}: none, {_rows(one.rows)} to fit{left}"
        elif not one.engines:
            yield f"  {name}: no plan has the constants of this code base, so the scalars are not written"
        elif left:
            yield f"  {name}: fitted to {_rows(one.rows)}{left}"


def written_lines(profiles: Mapping[Path, Profile], *, written: bool) -> Iterator[str]:
    """Yield what was written, or what would be."""
    for path, profile in profiles.items():
        stacks = ", ".join(scalars.stack for scalars in profile.scalars)
        verb = "wrote" if written else "--calibrate would write"
        use = "" if path.name == "calibration.json" else f"; hardware: {{profile: {path}}} in a spec uses it"
        yield f"partool: {verb} {path}: scalars of {stacks} on {profile.machine.accelerator}{use}"


def _rows(count: int) -> str:
    return f"{count:,} row{'s' * (count != 1)}"


def _short(name: str) -> str:
    text = " ".join(name.split())
    return text if len(text) <= _WIDEST - 4 else f"{text[: _WIDEST - 7]}..."


def joined(lines: Iterable[str]) -> str:
    """Return lines as one text without blanks at their ends."""
    return "\n".join(line.rstrip() for line in lines)
