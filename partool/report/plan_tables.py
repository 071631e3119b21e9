"""The tables of a plan: memory and time by term, and the layouts that were considered and not chosen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.terms import MEMORY_TERMS, TIME_TERMS
from partool.plan.types import Plan
from partool.report.plan_rows import host_bytes
from partool.report.units import amount, bars, gib, in_order, probability, seconds
from partool.spec.numbers import duration
from partool.strategies.jobs import JOBS

_BAR = 24
_SMALL = 0.001
"""Terms below this share of the step time have no separate line."""
_SIDE_BY_SIDE = 120
"""Terminal width from which memory and time are printed side by side, if nothing is cut off."""
_APART = 4


def render_terms(plan: Plan, console: Console) -> None:
    """Print the tables of memory and time, side by side where the terminal is wide enough."""
    memory, time = _memory(plan), _time(plan)
    if console.width >= max(_SIDE_BY_SIDE, _wanted(console, memory) + _APART + _wanted(console, time)):
        both = Table.grid(padding=(0, _APART, 0, 0))
        both.add_row(memory, time)
        console.print(both)
    else:
        console.print(memory, Text(), time, sep="\n")


def _bar(share: float) -> str:
    """Return a bar as text for a share of the whole; shares over 4 are cut to 4, as a plan file may hold any number."""
    return "█" * round(_BAR * min(share, 4.0)) or "▏"


def _wanted(console: Console, table: Table) -> int:
    """Return the number of columns that a table would take on a terminal of unlimited width."""
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def _memory(plan: Plan) -> Table:
    memory = plan.prediction.memory
    table = Table(
        title="Memory per rank, at the peak", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("term", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("share of the device")
    device = max(plan.devices.memory_bytes, memory.total_bytes)
    for name, size in in_order(memory.terms_bytes, MEMORY_TERMS):
        table.add_row(name, gib(size), _bar(size / device))
    share, likely = memory.total_bytes / plan.devices.memory_bytes, probability(memory.fit_probability, counted=True)
    fits = f"{share:.0%} of {gib(plan.devices.memory_bytes)}; {memory.verdict}, {likely}"
    table.add_row(Text("total", "bold"), Text(gib(memory.total_bytes), "bold"), fits)
    if memory.idle_bytes:
        table.add_row("idle streams", gib(memory.idle_bytes), "held where there is room, returned before memory fails")
    _host_rows(table, plan)
    return table


def _host_rows(table: Table, plan: Plan) -> None:
    """Add rows on host memory: a rank's terms, and the sum over a node's ranks as a share of the node's memory."""
    memory, host = plan.prediction.memory, plan.devices.host_memory_bytes
    total = host_bytes(plan)
    if not total or not host:
        return
    for name, size in memory.host_terms_bytes.items():
        bar = _bar(size * plan.devices.per_node / max(host, total))
        table.add_row(f"host {name}", gib(size), bar)
    apart = memory.pinned_bytes and plan.devices.backend != "cpu"
    pinned = f", {gib(memory.pinned_bytes)} pinned per rank" if apart else ""
    several = plan.devices.per_node > 1
    ranks = f" for {plan.devices.per_node} ranks" if several else " per node"
    table.add_row(Text("host", "bold"), Text(gib(total), "bold"), f"{total / host:.0%} of {gib(host)}{ranks}{pinned}")


def _time(plan: Plan) -> Table:
    time = plan.prediction.time
    table = Table(title="Time per step", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("term", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share of the step")
    small = sum(value for value in time.terms_s.values() if value < _SMALL * time.step_time_s)
    ordered = in_order(time.terms_s, TIME_TERMS)
    large = {name: value for name, value in ordered if value >= _SMALL * time.step_time_s}
    for name, value in {**large, "all else": small}.items():
        if value:
            table.add_row(name, seconds(value), _bar(value / time.step_time_s))
    speed = f"{bars(plan.prediction)}; {amount(time.tokens_per_s)} tokens/s"
    speed += f", MFU {time.mfu:.1%}" if time.mfu is not None else ""
    table.add_row(Text("step", "bold"), Text(seconds(time.step_time_s), "bold"), speed)
    totals = f"{plan.at_most}{plan.training.steps:,} steps; {_hours(time.device_hours)} device-hours"
    if not plan.judges_by_tasks:
        table.add_row(Text(JOBS[plan.job].title, "bold"), Text(duration(time.total_s), "bold"), totals)
    return table


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def alternatives(plan: Plan) -> Table:
    """Return the table of layouts that were not chosen, with the reason for each."""
    table = Table(title="Next best", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("layout", ratio=3)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("GiB", justify="right", no_wrap=True)
    table.add_column("why not", ratio=2)
    for other in plan.alternatives:
        step = seconds(other.step_time_s) if other.step_time_s is not None else "-"
        size = gib(other.memory_bytes) if other.memory_bytes is not None else "-"
        table.add_row(
            f"{other.role}: {other.summary}" if other.role else other.summary,
            step,
            size,
            other.why_not + ("" if other.runnable or not plan.runnable else "; cannot run yet"),
        )
    return table
