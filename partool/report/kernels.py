"""``partool plan --show kernels``: the kernels of a plan's matrix products, their tuning, and the time lost."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.types import Plan
from partool.planner.kernels.choose import STATES, Coverage, KernelLine, State, coverage
from partool.report.units import counted, seconds

_WORDS: dict[State, str] = {
    "tuned": "for the shape, on this device",
    "nearest": "for other rows or widths, or on another device",
    "untuned": "by an unmeasured entry, or by a rule",
    "library": "a torch library with its own tuning",
}
_SHORT = {"input gradient": "dx", "weight gradient": "dW"}
_STYLES: dict[State, str] = {"tuned": "green", "nearest": "yellow", "untuned": "red", "library": ""}


def render_kernels(plan: Plan, console: Console, source: str) -> None:
    """Print which kernels compute a plan's matrix products; ``source`` is the spec or plan file that commands name."""
    kernels = coverage(plan)
    devices = plan.devices
    what = f"{devices.architecture or devices.backend}{f', {devices.units} units' if devices.units else ''}"
    console.print(Text(f"Kernels on {devices.accelerator} ({what}), {plan.training.precision}", "bold"))
    console.print(_summary(kernels))
    products = sorted((line for line in kernels.lines if line.asked.product), key=_order)
    for kernel, lines in groupby(products, key=lambda line: line.asked.kernel):
        table = list(lines)
        console.print(Text(f"\n{kernel}", "bold"), Text(_beside(table)), sep="")
        console.print(_table(table))
    if rest := [line for line in kernels.lines if not line.asked.product]:
        console.print(Text("\nOther kernels, which only move data", "bold"))
        console.print(_moving_table(rest))
    console.print()
    for text in _notes(plan, kernels, source):
        # A command is not wrapped, so that it can be copied.
        console.print(text, markup=False, highlight=False, soft_wrap=text.startswith("  "))


def kernel_data(plan: Plan, source: str) -> dict[str, object]:
    """Return data on the kernels that compute a plan's matrix products."""
    kernels = coverage(plan)
    return {
        "accelerator": plan.devices.accelerator,
        "architecture": kernels.architecture,
        "step_time_s": kernels.step_s,
        "measured_step_time_s": kernels.measured_step_s,
        "worst": kernels.worst,
        "share": kernels.share,
        "lost_s": kernels.lost_s,
        "tune": tune_command(kernels, source),
        "lines": [_line_data(line) for line in kernels.lines],
    }


def tune_command(kernels: Coverage, source: str) -> str:
    """Return the command that tunes the untuned kernels; empty if all kernels are tuned."""
    names = kernels.untuned
    everything = {line.asked.kernel for line in kernels.lines if line.tabled} <= set(names)
    chosen = "" if everything else "".join(f" --kernel {name}" for name in names)
    return f"partool tune {source}{chosen} --out tuned" if names else ""


def _order(line: KernelLine) -> tuple[bool, str]:
    return not line.tabled, line.asked.kernel


def _beside(lines: list[KernelLine]) -> str:
    """Return a note on partool's kernels for products that torch computes; empty if there are no such kernels."""
    kernels = {line.asked.request.kernel for line in lines if line.choice and not line.tabled and line.asked.request}
    names = " and ".join(sorted(kernels))
    return f", of torch; sources are of partool's {names}, not run here" if kernels else ""


def _source(line: KernelLine) -> Text:
    choice = line.choice
    if choice is None:
        return Text("-")
    maker = choice.implementation.replace(" (", ", ").rstrip(")")
    whose = "" if maker == "triton" else f" ({maker})"
    return Text(choice.source + whose, _STYLES[line.state])


def _tool(line: KernelLine) -> str:
    return line.choice.implementation.partition(" ")[0] if line.choice else ""


def _line_data(line: KernelLine) -> dict[str, object]:
    asked, choice = line.asked, line.choice
    m, n, k = asked.sides
    return {
        "name": asked.name,
        "pass": asked.part,
        "kernel": asked.kernel,
        "implementation": choice.implementation if choice and line.tabled else "torch",
        "table_of": asked.request.kernel if asked.request else None,
        "m": m,
        "rows": asdict(asked.rows),
        "n": n,
        "k": k,
        "groups": asked.groups,
        "calls": asked.calls,
        "state": line.state,
        "source": choice.source if choice else None,
        "distance": choice.distance if choice else None,
        "table": choice.table if choice else "",
        "call_s": line.call_s,
        "measured": line.measured,
        "share": line.share,
        "lost_s": line.total_lost_s,
    }


def _summary(kernels: Coverage) -> Table:
    table = _columns("state", "shapes", "of the step", "may lose", "")
    table.columns[-1].justify = "left"
    table.columns[-1].no_wrap = False
    for state in STATES:
        lines = [line for line in kernels.lines if line.state == state]
        if not lines:
            continue
        lost = sum(line.total_lost_s for line in lines)
        cost = f"{seconds(lost)}, {lost / kernels.step_s:.1%}" if lost else "-"
        table.add_row(Text(state, _STYLES[state]), str(len(lines)), f"{kernels.share[state]:.1%}", cost, _WORDS[state])
    return table


def _table(lines: list[KernelLine]) -> Table:
    table = _columns("computes", "pass", "M", "N", "K", "source", "step", "may lose")
    table.columns[1].justify = "left"
    table.columns[5].justify = "left"
    before = ""
    for line in lines:
        asked = line.asked
        m, n, k = asked.sides
        rows = f"{asked.groups} × {m:.0f}" if asked.groups > 1 else f"{m:.0f}"
        name = asked.name if asked.name != before else ""
        before = asked.name
        lost = seconds(line.total_lost_s) if line.total_lost_s else "-"
        part = _SHORT.get(asked.part, asked.part)
        table.add_row(name, part, rows, str(n), str(k) if k else "", _source(line), f"{line.share:.1%}", lost)
    return table


def _moving_table(lines: list[KernelLine]) -> Table:
    table = _columns("computes", "pass", "rows", "widths", "source", "step", "may lose")
    table.columns[1].justify = table.columns[4].justify = "left"
    kernel = ""
    for line in sorted(lines, key=lambda line: line.asked.kernel):
        asked = line.asked
        if asked.kernel != kernel:
            table.add_row(Text(asked.kernel, "bold"))
        kernel = asked.kernel
        widths = " × ".join(str(width) for width in asked.sides[1:] if width)
        lost = seconds(line.total_lost_s) if line.total_lost_s else "-"
        rows = f"{asked.sides[0]:.0f}"
        table.add_row(f"  {asked.name}", asked.part, rows, widths, _source(line), f"{line.share:.1%}", lost)
    return table


def _columns(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(names):
        table.add_column(name, justify="right" if index else "left", no_wrap=index > 0, overflow="fold")
    return table


def _notes(plan: Plan, kernels: Coverage, source: str) -> list[str]:
    notes = []
    if count := sum(line.measured for line in kernels.lines):
        new, old = seconds(kernels.measured_step_s), seconds(kernels.step_s)
        effect = "as long as predicted" if new == old else f"{new} instead of {old}"
        notes.append(f"With the measured times of {counted(count, 'shape')}, a step takes {effect}.")
    others = sorted({_tool(line) for line in kernels.lines if line.state in ("tuned", "nearest")} - {"triton"})
    if others:
        notes.append(f"Entries of {' and '.join(others)} count as tuned; those without times are unchecked.")
    if kernels.lost_s:
        notes.append(
            f"Configurations that are not tuned may lose {seconds(kernels.lost_s)} in a step, beyond the predicted "
            f"{seconds(kernels.step_s)}, which assume good tiles. That is an estimate from the gains of measured "
            "entries of a table if there are any, else from how the tiles fill the device."
        )
    elif not any(line.tabled for line in kernels.lines):
        notes.append("No kernel of this plan has tables of configurations: there is nothing to tune.")
    if command := tune_command(kernels, source):
        notes.append("To measure them on such a device:")
        notes.append(f"  {command}")
        named = list(plan.spec.get("kernels", {}).get("tuned", ()))
        folders = ", ".join([*named, *([] if "tuned" in named else ["tuned"])])
        notes.append(f"and then name the folder in the spec: kernels: {{tuned: [{folders}]}}")
    return notes
