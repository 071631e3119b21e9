"""Tables on plans, as text and as data: parts of the step time, layouts, comparison of plans, what-ifs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.as_spec import own_yaml
from partool.plan.diff import differences, moved_inputs, predictions, verified_change
from partool.plan.schedule import placement_of
from partool.plan.terms import MEMORY_TERMS, TIME_PARTS
from partool.plan.types import Plan, RankMemory
from partool.planner.explain.scored import rescored
from partool.report.gemms import price_lines
from partool.report.units import amount, gib, probability, seconds
from partool.spec.runs import in_runs

_TINY = 1e-6
"""Parts of the step time below this share of the step time get no line."""
_RANKS = 6
"""Maximum number of pipeline ranks with a column; if there are more, only the first, fullest and last have one."""


class PredictedPair(TypedDict):
    """One predicted figure of two plans."""

    name: str
    old: float
    new: float


class PlanComparison(TypedDict):
    """How two plans differ, as ``partool plan --against`` and ``--diff`` print it as JSON."""

    same: bool
    moved: list[str]
    """Inputs that changed."""
    differences: list[str]
    """What would run differently, a line each."""
    verified: str
    predictions: list[PredictedPair]
    score: list[PredictedPair]
    """The score in seconds, and the shares of the step time that it adds; empty if the old plan's spec is refused."""


class PlanSummary(TypedDict):
    """The figures of a plan that a what-if reports."""

    summary: str
    devices: int
    step_time_s: float
    tokens_per_s: float
    mfu: float | None
    device_hours: float
    memory_bytes: int
    fit_probability: float
    verdict: str
    runnable: bool
    hash: str


WhatIf = TypedDict("WhatIf", {"with": list[str], "plan": PlanSummary | None, "problem": str | None})
"""One what-if of ``partool plan --vary``: the overrides, and the plan or why there is none."""


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=index >= left, overflow="fold")
    return table


def _show(console: Console, title: str, table: Table) -> None:
    console.print(Text(title, "bold"))
    console.print(table)


def render_breakdown(plan: Plan, console: Console) -> None:
    """Print every part of the step time, and the memory of each pipeline rank by term."""
    time = plan.prediction.time
    parts = _table("part", "time", "share")
    for name in TIME_PARTS:
        value = time.breakdown_s.get(name, 0.0)
        if value > _TINY * time.step_time_s:
            parts.add_row(name, seconds(value), f"{value / time.step_time_s:.1%}")
    _show(console, "Parts of a step, on the slowest rank; those that overlap do not sum up", parts)
    console.print(Text("Whose measurements the prices are (--show gemms has each product)", "bold"))
    for line in price_lines(plan):
        console.print(line, markup=False, highlight=False)
    console.print()
    memory = plan.prediction.memory
    shown = _shown_ranks(plan)
    table = _table("term", *(str(rank.pipeline_rank) for rank in shown))
    for name in MEMORY_TERMS:
        if any(rank.terms_bytes.get(name) for rank in memory.ranks):
            table.add_row(name, *(gib(rank.terms_bytes.get(name, 0)) for rank in shown))
    table.add_row(Text("total", "bold"), *(Text(gib(rank.total_bytes), "bold") for rank in shown))
    _show(console, "Memory by pipeline rank, GiB", table)
    if memory.host_terms_bytes:
        console.print()
        host = _table("term", "GiB")
        for name, size in (*memory.host_terms_bytes.items(), ("total", sum(memory.host_terms_bytes.values()))):
            host.add_row(name, gib(size))
        _show(console, "Host memory of the rank that takes most of it", host)


def _shown_ranks(plan: Plan) -> list[RankMemory]:
    ranks = plan.prediction.memory.ranks
    if len(ranks) <= _RANKS:
        return list(ranks)
    fullest = max(ranks, key=lambda rank: rank.total_bytes)
    chosen = {0: ranks[0], 1: ranks[1], fullest.pipeline_rank: fullest, len(ranks) - 1: ranks[-1]}
    return [chosen[index] for index in sorted(chosen)]


def render_layout(plan: Plan, console: Console) -> None:
    """Print each stage with its layers and recomputation policies, and the axes of the mesh."""
    mesh, layout = plan.layout.mesh, plan.layout
    console.print(f"Mesh, outermost first: {', '.join(f'{name} {size}' for name, size in mesh._asdict().items())}")
    table = _table("stage", "pipeline rank", "layers", "count", "recompute", left=0)
    for index, (start, stop) in enumerate(layout.pipeline.bounds):
        policies = ", ".join(in_runs(layout.recompute[start:stop]))
        rank = placement_of(layout)[index]
        table.add_row(str(index), str(rank), f"{start} to {stop - 1}", str(stop - start), policies)
    _show(console, "Stages", table)
    console.print()
    console.print("To use this layout, replace the spec's section parallel by")
    console.print(own_yaml(plan), end="", markup=False, highlight=False, soft_wrap=True)


def comparison(old: Plan, new: Plan) -> PlanComparison:
    """Return the differences in what two plans run, the inputs that changed, and both predictions."""
    rows: list[PredictedPair] = [
        {"name": name, "old": first, "new": second} for name, first, second in predictions(old, new)
    ]
    lines = differences(old, new)
    return {
        "same": not lines,
        "moved": moved_inputs(old, new),
        "differences": lines,
        "verified": verified_change(old, new),
        "predictions": rows,
        "score": _score_pairs(old, new),
    }


def _score_pairs(old: Plan, new: Plan) -> list[PredictedPair]:
    """Return the scores of two plans, and each share that one of them has."""
    before, after = rescored(old), rescored(new)
    if before is None or after is None:
        return []
    names = dict.fromkeys([*before.shares, *after.shares])
    shares = [(name, before.shares.get(name, 0.0), after.shares.get(name, 0.0)) for name in names]
    rows = [("score_s", before.score_s, after.score_s), *shares]
    return [{"name": name, "old": first, "new": second} for name, first, second in rows]


def moved_figures(compared: PlanComparison) -> list[str]:
    """Return a line for each of step time, memory and score that moved, the score with its shares that moved."""
    figures = {row["name"]: row for row in compared["predictions"]}
    score = compared["score"][0] if compared["score"] else None
    rows = [("step time", figures["step_time_s"], seconds), ("memory", figures["memory_bytes"], _in_gib)]
    rows += [("score", score, seconds)] if score is not None else []
    lines = [f"{name}: {_moved(row, show)}" for name, row, show in rows if _differ(row)]
    shares = [f"{row['name']} {row['old']:.2%} → {row['new']:.2%}" for row in compared["score"][1:] if _differ(row)]
    return [*lines, *([f"shares of the score: {', '.join(shares)}"] if shares else [])]


def _in_gib(size: float) -> str:
    return f"{gib(size)} GiB"


def _differ(row: PredictedPair) -> bool:
    """Return True if two figures differ by more than rounding."""
    return abs(row["new"] - row["old"]) > _TINY * max(row["old"], row["new"])


def _moved(row: PredictedPair, show: Callable[[float], str]) -> str:
    change = f" ({row['new'] / row['old'] - 1.0:+.1%})" if row["old"] else ""
    return f"{show(row['old'])} → {show(row['new'])}{change}"


def render_comparison(old: Plan, new: Plan, console: Console) -> None:
    """Print the differences in what two plans run, and both predictions side by side."""
    lines = differences(old, new)
    console.print(Text("What would run differently", "bold"))
    for line in lines or ["nothing"]:
        console.print(f" • {line}", markup=False, highlight=False)
    if change := verified_change(old, new):
        console.print(f"{change[:1].upper()}{change[1:]}.", markup=False, highlight=False)
    console.print()
    table = _table("figure", "old", "new", "change")
    for name, first, second in predictions(old, new):
        show = gib if "memory" in name else seconds
        unit = " GiB" if "memory" in name else ""
        change = f"{second / first - 1.0:+.1%}" if first else "new"
        table.add_row(name.removesuffix("_s").removesuffix("_bytes"), show(first) + unit, show(second) + unit, change)
    _show(console, "Predictions", table)
    if pairs := _score_pairs(old, new):
        table = _table("score", "old", "new")
        for number, row in enumerate(pairs):
            show = seconds if number == 0 else "{:.2%}".format
            table.add_row(row["name"].removesuffix("_s"), show(row["old"]), show(row["new"]))
        console.print()
        _show(console, "Order of layouts: the step time and the shares that raise it", table)


def render_varied(rows: list[tuple[list[str], Plan | None, str]], console: Console) -> None:
    """Print one line per what-if; a what-if is (overrides, plan or None, error)."""
    keys = [override.partition("=")[0].rpartition(".")[2] for override in rows[0][0]] if rows else []
    table = _table(*keys, "layout", "step", "tokens/s/device", "MFU", "GiB", "fits", left=len(keys) + 1)
    for overrides, plan, wrong in rows:
        values = [override.partition("=")[2] for override in overrides]
        if plan is None:
            table.add_row(*values, wrong, *("-",) * 5)
            continue
        time, memory = plan.prediction.time, plan.prediction.memory
        world = plan.layout.mesh.world_size
        table.add_row(
            *values,
            plan_summary(plan) + ("" if plan.runnable else f" (cannot run yet: {' '.join(plan.not_runnable)})"),
            seconds(time.step_time_s),
            amount(time.tokens_per_s / world),
            f"{time.mfu:.1%}" if time.mfu is not None else "-",
            gib(memory.total_bytes),
            probability(memory.fit_probability),
        )
    _show(console, "What if", table)


def plan_summary(plan: Plan) -> str:
    """Return a plan's layout in one line."""
    return next((row.summary for row in plan.candidates if not row.why_not), "")


def varied_rows(rows: list[tuple[list[str], Plan | None, str]]) -> list[WhatIf]:
    """Return what-ifs as data, one dictionary per (overrides, plan or None, error)."""
    what_ifs = []
    for overrides, plan, wrong in rows:
        row: WhatIf = {"with": overrides, "plan": None, "problem": wrong or None}
        if plan is not None:
            time, memory = plan.prediction.time, plan.prediction.memory
            row["plan"] = {
                "summary": plan_summary(plan),
                "devices": plan.layout.mesh.world_size,
                "step_time_s": time.step_time_s,
                "tokens_per_s": time.tokens_per_s,
                "mfu": time.mfu,
                "device_hours": time.device_hours,
                "memory_bytes": memory.total_bytes,
                "fit_probability": memory.fit_probability,
                "verdict": memory.verdict,
                "runnable": plan.runnable,
                "hash": plan.hash,
            }
        what_ifs.append(row)
    return what_ifs
