"""A plan as text: by default one screen, with the verdict first; the reasons and the tables on demand."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from partool.plan.types import Plan
from partool.report.plan_rows import Row, job_rows, layout_rows, verdict
from partool.report.plan_tables import alternatives, render_terms
from partool.report.units import counted
from partool.report.verification import render_verification
from partool.strategies.targets import SCHEDULERS, TARGETS

SCREEN_LINES = 40
"""Most lines of a plan on a terminal of 80 columns, without ``--why``, ``--table`` and ``--all``."""
_WARNING_LINES = 6
"""Most lines of the default screen that warnings take."""
_FIGURE = re.compile(r"(?<=\d) (?=(?:us|ms|s|min|h|days?|KiB|MiB|GiB|TiB|[kMBT]|%|×)(?!\w))|(?<=[×±≥]) ")
"""Spaces within figures: before a unit or a sign, and after a sign."""
_LABEL = 10
_INDENT = 2


@dataclass(frozen=True)
class View:
    """What a plan's text contains."""

    why: bool = False
    """All reasons for the layout."""
    table: bool = False
    """Memory and time by term, and the layouts that were not chosen."""
    everything: bool = False
    """Everything: the screen, the tables, all reasons and all warnings."""


def render_plan(
    plan: Plan,
    console: Console,
    *,
    source: Sequence[str] | None = None,
    findings_shown: bool = False,
    view: View | None = None,
) -> None:
    """Print a plan; ``source`` are the words by which a command line names the plan: a file, and options.

    ``findings_shown`` means that the reader has just seen the plan's findings, so that they are left out.
    """
    view = view or View()
    warnings = [] if findings_shown else [f"{finding.code} {finding.message}" for finding in plan.findings]
    console.print(_head(plan, console.width))
    if view.everything or not (view.why or view.table):
        for rows in (job_rows(plan), layout_rows(plan)):
            console.print()
            console.print(_labelled(rows, console.width))
    if view.everything or view.table:
        console.print()
        render_terms(plan, console)
        if plan.alternatives:
            console.print()
            console.print(alternatives(plan))
    if plan.verification is not None and (view.everything or not (view.why or view.table)):
        render_verification(plan, console)
    if view.everything or view.why:
        _list(console, "Why", _reasons(plan))
    if view.everything:
        _list(console, "Warnings", warnings)
        _print_next(console, plan, source)
    elif not (view.why or view.table):
        _print_rest(console, plan, source, warnings)


def _print_rest(console: Console, plan: Plan, source: Sequence[str] | None, warnings: Sequence[str]) -> None:
    """Print the end of the default screen: what a reader asks first, warnings, and the next command."""
    listed, untold = _fitting(console, warnings, _WARNING_LINES)
    # Plans that were made before there were answers have their limit.
    rows = [(one.question, one.text) for one in plan.answers] or ([("Limit", plan.limit)] if plan.limit else [])
    if rows:
        console.print()
        console.print(_labelled(rows, console.width))
    _list(console, "Warnings", listed, f"{untold} more: --all" if untold else "")
    _print_next(console, plan, source)
    others = f", {counted(len(plan.alternatives), 'other layout')}" if plan.alternatives else ""
    more = f"--why ({len(_reasons(plan))} reasons), --table (terms{others}), --all"
    console.print(_labelled([("More", more)], console.width))


def _reasons(plan: Plan) -> list[str]:
    """Return the reasons for the layout; what limits it comes first, as it says what to change."""
    return [*([f"Limit: {plan.limit}"] if plan.limit else []), *plan.reasons]


def _head(plan: Plan, width: int) -> Text:
    head = _in_lines(f"{plan.name}: {verdict(plan)}", width)
    head.stylize("bold")
    return head


def _labelled(rows: Iterable[Row], width: int) -> Table:
    """Return a table of (bold label, text) rows; wrapped text stays to the right of the label."""
    grid = Table.grid(padding=(0, _INDENT, 0, 0))
    grid.add_column(style="bold", no_wrap=True, min_width=_LABEL)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(label, _in_lines(text, width - _LABEL - _INDENT))
    return grid


def _item(text: str, width: int) -> RenderableType:
    """Return an entry of a list, whose lines after the first are indented like the first."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("•", _in_lines(text, width - 3))
    return Padding(grid, (0, 0, 0, 1))


def _in_lines(text: str, width: int) -> Text:
    """Return a text in lines that end between words, never between a number and its unit."""
    kept = _FIGURE.sub("\N{NO-BREAK SPACE}", text)
    lines = textwrap.wrap(kept, max(width, 1), break_on_hyphens=False)
    return Text("\n".join(lines).replace("\N{NO-BREAK SPACE}", " "))


def _list(console: Console, title: str, items: Sequence[str], rest: str = "") -> None:
    """Print a titled list, and a last line on what is left out; nothing if there are no items."""
    if not items and not rest:
        return
    console.print()
    console.print(Text(title, "bold"))
    for item in items:
        console.print(_item(item, console.width))
    if rest:
        console.print(Padding(Text(rest, "dim"), (0, 0, 0, 3)))


def _lines(console: Console, *renderables: RenderableType) -> int:
    """Return the number of lines that renderables take."""
    return sum(len(console.render_lines(each, pad=False)) for each in renderables)


def _fitting(console: Console, items: Sequence[str], most: int) -> tuple[list[str], int]:
    """Return the first items that take at most ``most`` lines together, at least one, and the number of the others."""
    used, shown = 0, list[str]()
    for item in items:
        used += _lines(console, _item(item, console.width))
        if shown and used > most:
            break
        shown.append(item)
    return shown, len(items) - len(shown)


def next_commands(plan: Plan, source: Sequence[str] | None, width: int) -> list[str]:
    """Return the lines of the next command, which a shell reads as they stand: a long command goes on after ``\\``.

    ``source`` are the words by which a command line names the plan: the file, and options such as ``--set``.
    """
    words = list(source or ["SPEC"])
    starter = TARGETS[plan.launch.target].starter
    if not plan.runnable:
        return [f"partool explain {code}" for code in plan.not_runnable]
    if starter == "by hand":
        return _wrapped(["partool", "render", *words, "--target", plan.launch.target], width)
    elsewhere = ["--target", SCHEDULERS[0]] if plan.devices.nodes > 1 and starter == "here" else []
    return _wrapped(["partool", "launch", *words, *elsewhere], width)


def _wrapped(words: Sequence[str], width: int) -> list[str]:
    """Return a command in lines of at most ``width`` columns, where its words allow that; options keep their values."""
    parts: list[str] = []
    for index, word in enumerate(words):
        value = index > 0 and words[index - 1].startswith("--") and not word.startswith("--")
        quoted = shlex.quote(word)
        parts[-1:] = [f"{parts[-1]} {quoted}"] if value else [*parts[-1:], quoted]
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) + len(" \\") + _INDENT <= width:
            lines[-1] += f" {part}"
        else:
            lines[-1] += " \\"
            lines.append(f"  {part}")
    return lines


def _print_next(console: Console, plan: Plan, source: Sequence[str] | None) -> None:
    console.print()
    title = "Next" if plan.runnable else "Next: why it cannot be launched yet"
    console.print(Text(title, "bold"))
    for line in next_commands(plan, source, console.width):
        console.print(Text(" " * _INDENT + line), soft_wrap=True)
