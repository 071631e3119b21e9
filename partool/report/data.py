"""What a spec's data look like: samples as the model sees them, and their lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich.text import Text

from partool.planner.data_counts import DataCounts
from partool.report.units import amount, counted

_ROLE = 10
"""Columns of the roles."""
_BAR = 40
"""Columns of the longest bar of a histogram."""


def row_lines(event: dict[str, Any], width: int) -> Iterator[Text]:
    """Yield a sequence of tokens in lines of ``width`` columns; text that is trained on is behind a heavy bar."""
    yield Text(row_title(event))
    for one in event["documents"]:
        cut = f", {one['cut']:,} cut away" if one["cut"] else ""
        yield Text(f"── {one['origin']}: {counted(one['tokens'], 'token')}{cut}", style="bold")
        role = None
        for run in one["runs"]:
            name = run["role"] if run["role"] != role else ""
            role = run["role"]
            mark, style = ("┃", "") if run["trained"] else ("│", "dim")
            for line in _wrapped(run["text"].removesuffix("\n"), width - _ROLE - 3):
                yield Text.assemble((f"{name:>{_ROLE}} ", "cyan"), (f"{mark} ", "green"), (line, style))
                name = ""


def row_title(event: dict[str, Any]) -> str:
    """Return in a line what a sequence of tokens holds."""
    documents = event["documents"]
    tokens = sum(one["tokens"] for one in documents)
    trained = sum(run["tokens"] for one in documents for run in one["runs"] if run["trained"])
    head = f"sequence {event['row'] + 1} of {event['of']:,}: {counted(len(documents), 'sample')}, "
    return f"{head}{tokens:,} of {event['room']:,} tokens, {trained:,} of them trained on ({_share(trained, tokens)})"


def _wrapped(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a text, long ones in parts."""
    for line in text.split("\n"):
        for start in range(0, max(len(line), 1), max(width, 20)):
            yield line[start : start + max(width, 20)]


def _share(part: int, of: int) -> str:
    return f"{part / of:.0%}" if of else "none"


def statistics(lengths: list[int], counts: DataCounts, trained: int, length: int) -> Iterator[str]:
    """Yield the lengths of a data set's samples as a histogram, and what sequences of ``length`` tokens hold."""
    yield from of_samples(lengths, trained)
    if lengths:
        yield ""
        yield from histogram(lengths, length)
        yield ""
    yield from of_sequences(counts, length)


def of_samples(lengths: list[int], trained: int) -> Iterator[str]:
    """Yield sentences about the samples: their tokens, the share of trained ones, and usual lengths."""
    total = sum(lengths)
    yield f"{counted(len(lengths), 'sample')}, {amount(total)} tokens, {_share(trained, total)} of them trained on"
    if lengths:
        ordered = sorted(lengths)
        median, ninth = ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10]
        yield f"tokens per sample: median {median:,}, nine in ten at most {ninth:,}, longest {ordered[-1]:,}"


def of_sequences(counts: DataCounts, length: int) -> Iterator[str]:
    """Yield sentences about the sequences of ``length`` tokens that the samples are packed into."""
    if counts.rows:
        filled = (counts.tokens or 0) / (counts.rows * length)
        yield f"in sequences of {length:,} tokens: {counts.rows:,} per epoch, {min(filled, 1.0):.0%} full"
    yield f"{counts.truncated:,} samples are longer and cut, {counts.left_out:,} are left out"


class LengthBin(NamedTuple):
    """Samples whose lengths are alike."""

    low: int
    """Least length, in tokens."""
    high: int
    """Greatest length, in tokens."""
    samples: int


def length_bins(lengths: list[int]) -> list[LengthBin]:
    """Return the samples by doublings of their length, shortest first, with empty bins between others."""
    bins: dict[int, int] = {}
    for each in lengths:
        bins[each.bit_length()] = bins.get(each.bit_length(), 0) + 1
    exponents = range(min(bins), max(bins) + 1) if bins else range(0)
    return [LengthBin(2 ** (each - 1), 2**each - 1, bins.get(each, 0)) for each in exponents]


def histogram(lengths: list[int], length: int) -> Iterator[str]:
    """Yield one line per doubling of the length; a line marks where a sequence ends."""
    bins = length_bins(lengths)
    most = max(each.samples for each in bins)
    width = len(f"{bins[-1].high:,}")
    for low, high, count in bins:
        bar = "█" * max(round(_BAR * count / most), 1 if count else 0)
        ends = f"  ← sequence_length {length:,}" if low <= length <= high else ""
        yield f"  {low:>{width},}–{high:<{width},} {bar} {count:,}{ends}"
