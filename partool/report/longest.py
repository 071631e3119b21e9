"""The longest sequences that fit, by method of sequence parallelism, as a table and as data."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.types import Plan
from partool.planner.longest import GRAIN, NONE, Longest
from partool.report.tables import WhatIf, plan_summary, varied_rows
from partool.report.units import amount, gib, seconds

Rows = list[tuple[list[str], Longest, Plan | None]]
"""Rows of (overrides except the sequence length, longest length found, its plan or None if no length fits)."""


def render_longest(rows: Rows, console: Console) -> None:
    """Print, below the table of what-ifs, a table of the longest sequence that fits with each method."""
    table = Table(box=None, pad_edge=False)
    keys = [override.partition("=")[0].rpartition(".")[2] for override in rows[0][0]]
    for at, name in enumerate((*keys, "shared by", "tokens", "layout", "step", "tokens/s/device", "GiB")):
        left = at <= len(keys) or name == "layout"
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "layout", overflow="fold")
    for beside, one, plan in rows:
        cells = [*(override.partition("=")[2] for override in beside), "nothing" if one.method == NONE else one.method]
        if plan is None:
            table.add_row(*cells, _tokens(one), _why_none(one), *("-",) * 3)
            continue
        time = plan.prediction.time
        each = amount(time.tokens_per_s / plan.layout.mesh.world_size)
        fits = gib(plan.prediction.memory.total_bytes)
        able = "" if plan.runnable else f" (cannot run yet: {' '.join(plan.not_runnable)})"
        table.add_row(*cells, _tokens(one), plan_summary(plan) + able, seconds(time.step_time_s), each, fits)
    console.print()
    console.print(Text("Longest sequence that fits", "bold"))
    console.print(table)


class LongestWhatIf(WhatIf):
    """A what-if of the longest sequence with one method."""

    method: str
    longest_tokens: int
    """0 if no sequence fits."""


def longest_rows(rows: Rows) -> list[LongestWhatIf]:
    """Return per row the what-if, its method and the tokens of the longest sequence that fits (0 if none fits)."""
    what_ifs = varied_rows(
        [([*beside, *one.overrides], plan, "" if plan else _why_none(one)) for beside, one, plan in rows]
    )
    return [
        {**row, "method": one.method, "longest_tokens": one.tokens}
        for row, (_, one, _) in zip(what_ifs, rows, strict=True)
    ]


def _tokens(one: Longest) -> str:
    return f"{one.tokens:,}" if one.tokens else f"under {GRAIN}"


def _why_none(one: Longest) -> str:
    return "no plan" if one.tokens else f"no {GRAIN} tokens are sure to fit; fewer are not tried"
