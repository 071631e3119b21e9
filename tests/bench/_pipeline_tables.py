"""Writes the measured tables into ``docs/results/pipelines.md``, between its two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs/results/pipelines.md"
MARKS = "<!-- measured: written by tests/bench/pipeline.py -->", "<!-- end of measured -->"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: its first column is text, the others are numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def text(result: Mapping[str, Any]) -> str:
    """Return everything measured as Markdown."""
    parts = []
    for key, title in (
        ("lists", "Four ranks, {} micro-batches, waits in place of arithmetic"),
        ("lists_fewest_micro_batches", "Four ranks, {} micro-batches (as many as ranks), waits in place of arithmetic"),
        ("real", "Two ranks on two cores, {} micro-batches, real layers"),
    ):
        if key in result:
            parts.append(f"### {title.format(result[key][0]['micro_batches'])}\n\n{_lists(result[key])}")
    if "overhead" in result:
        parts.append(f"### Four ranks on two cores, no waits at all: the executors themselves\n\n{_overhead(result)}")
    if "links" in result:
        parts.append(f"### WeiPipe and 1F1B over links of a given rate\n\n{_links(result['links'])}")
    return "\n\n".join(parts)


def write_tables(result: Mapping[str, Any]) -> None:
    """Put the tables between the document's marks."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise SystemExit(f"{DOCUMENT} has lost its marks")
    DOCUMENT.write_text(f"{before}{MARKS[0]}\n\n{text(result)}\n\n{MARKS[1]}{after}", encoding="utf-8")


def _lists(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["schedule", "partool (ms)", "torch (ms)", "partool / torch", "simulated (ms)", "executed / simulated"]
    return table(
        head,
        [
            [
                row["schedule"],
                f"{1e3 * row['partool_s']:.1f}",
                f"{1e3 * row['torch_s']:.1f}",
                f"{row['ratio_median']:.3f}",
                f"{1e3 * row['simulated_s']:.1f}",
                f"{row['executed_over_simulated']:.3f}",
            ]
            for row in rows
        ],
    )


def _overhead(result: Mapping[str, Any]) -> str:
    rows = [
        [
            row["schedule"],
            f"{1e3 * row['partool_s']:.1f}",
            f"{1e3 * row['torch_s']:.1f}",
            f"{row['ratio_median']:.3f}",
        ]
        for row in result["overhead"]
    ]
    return table(["schedule", "partool (ms)", "torch (ms)", "partool / torch"], rows)


def _links(rows: Sequence[Mapping[str, Any]]) -> str:
    head = [
        "tokens",
        "Mbit/s",
        "schedule",
        "step (ms)",
        "of 1F1B with recompute",
        "simulated (ms)",
        "sent (MB)",
        "formula (MB)",
    ]
    return table(
        head,
        [
            [
                f"{row['tokens']}",
                f"{row['rate_mbit']:g}",
                row["schedule"],
                f"{1e3 * row['step_s']:.0f}",
                f"{row['of_recomputed']:.2f}",
                f"{1e3 * row['simulated_s']:.0f}",
                f"{row['sent_bytes'] / 1e6:.1f}",
                f"{row['formula_bytes'] / 1e6:.1f}",
            ]
            for row in rows
        ],
    )
