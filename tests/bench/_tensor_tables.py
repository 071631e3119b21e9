"""Writes the measured tables into ``docs/results/tensor.md``, between its two marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _pipeline_tables import table

DOCUMENT = Path(__file__).parents[2] / "docs/results/tensor.md"
MARKS = "<!-- measured: written by tests/bench/tensor.py -->", "<!-- end of measured -->"


def text(result: Mapping[str, Any]) -> str:
    """Return everything measured as Markdown."""
    parts = []
    if "hand" in result:
        parts.append(f"### Against the same step written by hand with DTensor\n\n{_hand(result['hand'])}")
    if "overlap" in result:
        parts.append(f"### Overlapped and chunked against plain\n\n{_cases(result['overlap'], 'of plain')}")
    if "one" in result:
        parts.append(f"### Exchanges in a group of one rank, which the trainer leaves out\n\n{_one(result['one'])}")
    if "deepspeed" in result:
        title = "A Hugging Face Llama against DeepSpeed's AutoTP"
        parts.append(f"### {title}\n\n{_cases(result['deepspeed'], 'of AutoTP')}")
    return "\n\n".join(parts)


def write_tables(result: Mapping[str, Any]) -> None:
    """Put the tables between the document's marks."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(MARKS[0])
    _, found, after = rest.partition(MARKS[1])
    if not found:
        raise SystemExit(f"{DOCUMENT} has lost its marks")
    DOCUMENT.write_text(f"{before}{MARKS[0]}\n\n{text(result)}\n\n{MARKS[1]}{after}", encoding="utf-8")


def _hand(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        ["model, step", "partool (ms)", "DTensor (ms)", "partool / DTensor"],
        [
            [
                f"{row['size']}, {row['case']}",
                f"{1e3 * row['partool_s']:.1f}",
                f"{1e3 * row['peer_s']:.1f}",
                f"{row['ratio_median']:.3f}",
            ]
            for row in rows
        ],
    )


def _cases(rows: Sequence[Mapping[str, Any]], of_first: str) -> str:
    return table(
        ["model, step", "step (ms)", of_first],
        [
            [f"{row['size']}, {row['case']}", f"{1e3 * row['median_s']:.1f}", f"{row['of_first_median']:.3f}"]
            for row in rows
        ],
    )


def _one(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        ["model", "without (ms)", "with (ms)", "with / without"],
        [
            [
                row["size"],
                f"{1e3 * row['plain_s']:.1f}",
                f"{1e3 * row['hooked_s']:.1f}",
                f"{row['ratio_median']:.3f}",
            ]
            for row in rows
        ],
    )
