"""A plan on one screen: layout, memory, time, reasons, alternatives, next command."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from partool.plan.terms import MEMORY_TERMS, TIME_TERMS
from partool.plan.types import Plan
from partool.planner.search.longest import GRAIN, NONE, Longest
from partool.report import environment
from partool.report.tables import plan_summary, varied_rows
from partool.report.units import amount, gib, in_order, probability, seconds
from partool.report.verification import render_verification
from partool.spec.numbers import duration
from partool.strategies.targets import SCHEDULERS, TARGETS

_IN = {"cpu": "in host memory", "nvme": "in files"}
_BAR = 24
_SMALL = 0.001
"""Terms below this share of the step time have no separate line."""
_SIDE_BY_SIDE = 120
"""Terminal width from which memory and time are printed side by side, if nothing is cut off."""
_APART = 4


def _bar(share: float) -> str:
    """Return a bar as text for a share of the whole; shares over 4 are cut to 4, as a plan file may hold any number."""
    return "█" * round(_BAR * min(share, 4.0)) or "▏"


def render_plan(plan: Plan, console: Console, *, source: str | None = None, told: bool = False) -> None:
    """Print a plan; ``source`` is the file that ``partool launch`` takes to run the plan.

    ``told`` means that the reader has just seen the plan's findings, so that they are left out.
    """
    console.print(_head(plan))
    console.print(_labelled(_layout(plan)))
    console.print()
    memory, time = _memory(plan), _time(plan)
    if console.width >= max(_SIDE_BY_SIDE, _wanted(console, memory) + _APART + _wanted(console, time)):
        both = Table.grid(padding=(0, _APART, 0, 0))
        both.add_row(memory, time)
        console.print(both)
    else:
        console.print(memory, Text(), time, sep="\n")
    render_verification(plan, console)
    _lines(console, "Why", (*plan.reasons, *([f"Limit: {plan.limit}"] if plan.limit else [])))
    if plan.alternatives:
        console.print()
        console.print(_alternatives(plan))
    _lines(console, "Warnings", () if told else tuple(f"{f.code} {f.message}" for f in plan.findings))
    console.print()
    console.print(_labelled([("Next", _next(plan, source))]))


def _wanted(console: Console, table: Table) -> int:
    """Return the number of columns that a table would take on a terminal of unlimited width."""
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


def _head(plan: Plan) -> Text:
    count = _parameters(plan)
    text = Text.assemble((plan.name, "bold"), f": {count} parameters ({plan.model_source}), ")
    text.append(
        f"{plan.training.precision}, {plan.training.sequence_length} tokens × {plan.training.global_batch} per step, "
    )
    text.append(f"{plan.training.steps} steps")
    return text


def _parameters(plan: Plan) -> str:
    from partool.layout.parameters import count, parameters

    return amount(count(parameters(plan.model)))


def _labelled(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of (bold label, text) rows; wrapped text stays to the right of the label."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="bold", no_wrap=True, min_width=6)
    grid.add_column()
    for row in rows:
        grid.add_row(*row)
    return grid


def _layout(plan: Plan) -> Iterator[tuple[str, str]]:
    devices, layout, mesh = plan.devices, plan.layout, plan.layout.mesh
    nodes = f"{devices.nodes} node{'s' * (devices.nodes > 1)} × {devices.per_node}"
    unit = f"rank{'s' * (devices.per_node > 1)} on the CPU" if devices.backend == "cpu" else devices.accelerator
    unit += f", slice {devices.slice}" if devices.slice else ""
    yield "Mesh", f"{nodes} {unit}: {_axes(plan)}"
    copies = f", {mesh.dp_replicate} copies" if layout.data.zero and mesh.dp_replicate > 1 else ""
    sharing = mesh.dp_shard * mesh.cp
    shard = f", state shared by {sharing}" if layout.data.zero and sharing > 1 else ""
    parts = [
        f"ZeRO-{layout.data.zero}{shard}{copies}",
        f"micro-batch {layout.micro_batch} × {layout.derived.accumulation} per step",
    ]
    if mesh.pp > 1:
        parts.append(f"schedule {layout.pipeline.form}, {_stage_sizes(plan)} per stage")
    if mesh.cp > 1:
        parts.append(f"sequences over {mesh.cp} ranks by {layout.sequence.form}, {layout.sequence.order}")
    parts += [f"recompute {_recompute(plan)}", f"compile {layout.compile}", *_tiles(plan), *_offloaded(plan)]
    yield "Layout", "; ".join(parts)
    if variables := environment.summary(plan):
        yield "Env", variables


def _stage_sizes(plan: Plan) -> str:
    sizes = sorted({stop - start for start, stop in plan.layout.pipeline.bounds})
    text = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    return f"{text} layer{'s' * (sizes[-1] > 1)}"


def _tiles(plan: Plan) -> Iterator[str]:
    """Yield the parts of the model that compute a micro-batch in tiles of tokens."""
    for what, tokens in (("networks", plan.layout.tiles.mlp), ("loss", plan.layout.tiles.loss)):
        if tokens:
            yield f"{what} in tiles of {tokens:,} tokens"


def _offloaded(plan: Plan) -> Iterator[str]:
    """Yield a text for each kind of state that is kept off the device."""
    layout = plan.layout
    if layout.offload.optimizer != "none":
        yield f"{1.0 - layout.offload.gpu_fraction:.0%} of the optimizer {_IN[layout.offload.optimizer]}"
    if layout.offload.parameters != "none":
        yield f"parameters {_IN[layout.offload.parameters]}"
    if layout.offload.activations == "cpu":
        yield "activations in host memory"


def _axes(plan: Plan) -> str:
    """Return the axes of the mesh as text, outermost first: ``pp 2 × dp 2 × tp 4``."""
    mesh = plan.layout.mesh
    sizes = (("pp", mesh.pp), ("dp", mesh.dp), ("cp", mesh.cp), ("tp", mesh.tp))
    parts = [f"{name} {size}" for name, size in sizes if size > 1]
    text = " × ".join(parts) if parts else "one rank"
    return text + (f" (experts over {plan.layout.expert_ranks})" if plan.layout.expert > 1 else "")


def _recompute(plan: Plan) -> str:
    policies = plan.layout.recompute
    kinds = list(dict.fromkeys(policies))
    if len(kinds) == 1:
        return kinds[0]
    return ", ".join(f"{kind} in {policies.count(kind)} layers" for kind in kinds)


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
    _host_rows(table, plan)
    return table


def _host_rows(table: Table, plan: Plan) -> None:
    """Add rows on host memory: a rank's terms, and the sum over a node's ranks as a share of the node's memory."""
    memory, host = plan.prediction.memory, plan.devices.host_memory_bytes
    own = [row.host_bytes for row in plan.candidates if not row.why_not]
    total = memory.host_bytes or (own[0] if own else 0)
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
    error = f"± {plan.prediction.relative_error:.0%}"
    speed = f"{error}; {amount(time.tokens_per_s)} tokens/s" + (f", MFU {time.mfu:.1%}" if time.mfu is not None else "")
    table.add_row(Text("step", "bold"), Text(seconds(time.step_time_s), "bold"), speed)
    whole = f"{plan.training.steps} steps; {_hours(time.device_hours)} device-hours"
    table.add_row(Text("training", "bold"), Text(duration(time.total_s), "bold"), whole)
    return table


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _alternatives(plan: Plan) -> Table:
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


def _lines(console: Console, title: str, lines: tuple[str, ...]) -> None:
    if lines:
        console.print()
        console.print(Text(title, "bold"))
        for line in lines:
            console.print(Padding(Text(f"• {line}"), (0, 0, 0, 1)))


def _next(plan: Plan, source: str | None) -> str:
    if plan.runnable:
        elsewhere = plan.devices.nodes > 1 and TARGETS[plan.launch.target].starter == "here"
        return f"partool launch {source or 'SPEC'}" + (f" --target {', or '.join(SCHEDULERS)}" if elsewhere else "")
    commands = ", ".join(f"partool explain {code}" for code in plan.not_runnable)
    return f"this plan cannot be launched yet: {commands}"


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


def longest_rows(rows: Rows) -> list[dict[str, Any]]:
    """Return per row the what-if, its method and the tokens of the longest sequence that fits (0 if none fits)."""
    found = varied_rows(
        [([*beside, *one.overrides], plan, "" if plan else _why_none(one)) for beside, one, plan in rows]
    )
    of_methods = ({"method": one.method, "longest_tokens": one.tokens} for _, one, _ in rows)
    return [row | own for row, own in zip(found, of_methods, strict=True)]


def _tokens(one: Longest) -> str:
    return f"{one.tokens:,}" if one.tokens else f"under {GRAIN}"


def _why_none(one: Longest) -> str:
    return "no plan" if one.tokens else f"no {GRAIN} tokens are sure to fit; fewer are not tried"
