"""The load of a run's experts, from the events of its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from partool.plan.event_data import ExpertLayer
from partool.plan.event_log import EVENTS, last_events
from partool.plan.record import Count
from partool.report.units import figure


class ExpertLoad(ExpertLayer):
    """The load of a layer's experts, and the step that it was measured in."""

    step: Count


def expert_loads(run_dir: Path) -> list[ExpertLoad]:
    """Return the latest load of every layer of experts, in the order of the layers; empty for a dense model.

    Raises :class:`partool.plan.record.DamagedRecordError`.
    """
    newest: dict[int, ExpertLoad] = {}
    for data in _events(run_dir):
        for layer in data["layers"]:
            load = ExpertLoad.model_validate({"step": data["step"], **layer})
            if load.layer not in newest or newest[load.layer].step <= load.step:
                newest[load.layer] = load
    return [newest[number] for number in sorted(newest)]


def _events(run_dir: Path) -> Iterator[dict[str, Any]]:
    for log in sorted((run_dir / EVENTS).glob("rank-*.jsonl")):
        yield from (event["data"] for event in last_events(log, strict=True) if event["kind"] == "experts")


def load_table(layers: Sequence[ExpertLoad]) -> tuple[list[str], list[list[str]]]:
    """Return the headings of the loads' table, and the cells of each layer's row."""
    biased = any(layer.bias is not None for layer in layers)
    heads = ["layer", "busiest", "idlest", "unused", "dropped", "entropy", *(["bias"] if biased else [])]
    return heads, [_cells(layer, biased=biased) for layer in layers]


def _cells(layer: ExpertLayer, *, biased: bool) -> list[str]:
    cells = [
        str(layer.layer), f"{figure(layer.imbalance, '.2f')} ×", f"{min(shares(layer)):.2f} ×",
        str(layer.tokens.count(0)), figure(layer.dropped, ".1%"), figure(layer.entropy, ".2f"),
    ]  # fmt: skip
    low, high = (figure(value, "+.3g") for value in layer.bias or (0.0, 0.0))
    return [*cells, f"{low} to {high}"] if biased else cells


def shares(layer: ExpertLayer) -> list[float]:
    """Return the tokens of each expert of a layer as multiples of the mean expert's."""
    mean = max(sum(layer.tokens), 1) / len(layer.tokens)
    return [tokens / mean for tokens in layer.tokens]


def load_title(layers: Sequence[ExpertLoad]) -> str:
    """Return the title of the loads' table."""
    return f"Experts at step {layers[-1].step}: tokens as multiples of the mean expert's"


def render_expert_loads(layers: Sequence[ExpertLoad], console: Console) -> None:
    """Print the loads as a table; nothing if there are none."""
    if not layers:
        return
    heads, rows = load_table(layers)
    table = Table(box=None, pad_edge=False)
    for at, name in enumerate(heads):
        table.add_column(name, justify="right" if at else "left", header_style="dim")
    for cells in rows:
        table.add_row(*cells)
    console.print(Text(load_title(layers), "bold"))
    console.print(table)
    console.print()
