"""The data of a spec as one HTML page: lengths of the samples, and sequences as the model sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from partool.planner.data_counts import DataCounts
from partool.report.data import length_bins, of_samples, of_sequences, row_title
from partool.report.html import page
from partool.report.html_svg import bar


@dataclass(frozen=True)
class LengthRow:
    """A row of the table of lengths."""

    words: str
    svg: str
    samples: str
    ends: bool
    """Whether a sequence's length is one of these."""


def render_data_html(
    name: str, lengths: list[int], counts: DataCounts, *, trained: int, length: int, rows: list[dict[str, Any]]
) -> str:
    """Return the page.

    ``lengths`` are the samples' tokens, of which ``trained`` are trained on in all; ``length`` is the tokens of a
    sequence, and ``rows`` are the sequences that are shown.
    """
    bins = length_bins(lengths)
    most = max((each.samples for each in bins), default=1)
    table = [
        LengthRow(
            f"{low:,} to {high:,}",
            bar(f"length-{low}", f"{count:,} samples", [("c0", count, f"{count:,} samples")], most, []),
            f"{count:,}",
            low <= length <= high,
        )
        for low, high, count in bins
    ]
    return page(
        "data.html.jinja",
        name=name,
        samples=list(of_samples(lengths, trained)),
        sequences=list(of_sequences(counts, length)),
        lengths=table,
        length=length,
        rows=[(row_title(row), row["documents"]) for row in rows],
    )
