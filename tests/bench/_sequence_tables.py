"""Writes the measured tables into ``docs/results/sequence.md``, between its two marks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from _pipeline_tables import table

DOCUMENT = Path(__file__).parents[2] / "docs/results/sequence.md"
MARKS = "<!-- measured: written by tests/bench/sequence.py -->", "<!-- end of measured -->"


def text(result: Mapping[str, Any]) -> str:
    """Return everything measured as Markdown."""
    return "\n\n".join([*(_setting(one) for one in result["settings"]), _memory(result)])


def _memory(result: Mapping[str, Any]) -> str:
    low, high = result["memory_lengths"]
    rows = [
        [row["method"], f"{row['activations']:.1f}", f"{row['peak_bytes'][1] / 2**20:.1f}"] for row in result["memory"]
    ]
    heads = ["method", "activations per token", f"most at {high:,} tokens (MiB)"]
    title = f"### Most memory of one layer, forward and backward, between {low:,} and {high:,} tokens"
    return f"{title}\n\n{table(heads, rows)}"


def _setting(one: Mapping[str, Any]) -> str:
    rows = [
        [
            row["method"],
            f"{1e3 * row['step_s']:.0f}",
            f"{1e3 * row['predicted_s']:.0f}",
            "" if row["of_ring"] is None else f"{row['of_ring']:.2f}",
            f"{row['of_ulysses']:.2f}",
            f"{row['sent_bytes'] / 2**20:.1f}",
        ]
        for row in one["rows"]
    ]
    heads = ["method", "step (ms)", "predicted (ms)", "of ring", "of Ulysses", "sent by all (MiB)"]
    order = one["order"]
    wrong = "; ".join(" and ".join(pair) for pair in order["otherwise"])
    words = (
        f"{len(order['otherwise'])} of {order['pairs']} pairs that differ by more than 5 % are predicted the other way"
    )
    return f"### {one['setting']}\n\n{table(heads, rows)}\n\n{words}{f': {wrong}' if wrong else ''}."


def write_tables(result: Mapping[str, Any]) -> None:
    """Put the tables between the document's marks."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise SystemExit(f"{DOCUMENT} has lost its marks")
    DOCUMENT.write_text(f"{before}{MARKS[0]}\n\n{text(result)}\n\n{MARKS[1]}{after}", encoding="utf-8")
