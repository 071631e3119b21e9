"""Tables of runs: one reader for collections of published runs and for a user's own measurements.

A table is a CSV file with a header. Columns are those of :data:`partool.plan.run_rows.COLUMNS` and :data:`MORE`; a
missing column is blank in every row. A row that cannot be read keeps its place and says why.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from pathlib import Path

from partool.diagnostics.record import CodedError
from partool.plan.run_rows import ALL_COLUMNS
from partool.replay.cells import Cells
from partool.strategies.schedules import SCHEDULES

MEASURES = (
    "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "peak_mem_gib", "peak_mem_value",
)  # fmt: skip
"""Columns that hold measurements."""
MORE = (
    "gpu_mem_gib_nominal", "optimizer", "method", "offload", "attention_kernel", "compile", "peak_mem_value",
    "peak_mem_unit_as_printed", "reading_kind", "fits", "also_in_measured_runs",
)  # fmt: skip
"""Columns of collections of peaks of memory, beside those of step times."""
_NEEDED = (("model", "n_layers", "params_b"), ("gpu",), ("n_gpus", "dp"), ("seq_len",), ("global_batch",), MEASURES)
"""Columns of which a table needs at least one each."""
_COUNTS = (
    "year", "n_layers", "hidden", "ffn_hidden", "n_heads", "n_kv_heads", "vocab", "seq_len", "n_gpus", "gpus_per_node",
    "dp", "tp", "pp", "cp", "ep", "micro_batch", "global_batch",
)  # fmt: skip
_NUMBERS = (*_COUNTS, "params_b", *MEASURES)
_NUMBER = re.compile(r"\+?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_WORDS = {
    "dtype": r"bf16|bfloat|m?x?fp\d|float\d|half|int\d|nf4|tf32|f8|mixed",
    "zero_or_fsdp": r"zero|fsdp|hsdp|dist|opt|ddp|none|\bno\b|shard",
    "vpp_or_schedule": r"1f1b|interleav|gpipe|afab|zb|zero.bubble|\d|vp|v-half|v-min|dualpipe|hanayo|bitpipe|chimera",
    "sequence_parallel": r"^(y|t|1|n|f|0)",
    "recompute": r"^(none|no|off|false|true|yes|on|0|1|ac)\b|full|select|attention|attn|act|norm|mla|rope|softmax"
    r"|expert|every|half|per.op|minimal|save_|layers|moe",
    "fits": r"^(y|t|1|n|f|0)",
}
"""Patterns of what is read in columns of words, in lower case; other words would be passed over in silence."""
_MOST_BYTES = 256 * 2**20


class RunTableError(CodedError):
    """Raised for a file that is no table of runs; ``code`` is PT286 or PT287."""


@dataclass(frozen=True)
class Line:
    """A row of a table."""

    number: int
    """Number of the row's first line in the file, from 1."""
    cells: Cells
    fault: str = ""
    """Why the row cannot be read; empty for a sound row."""


@dataclass(frozen=True)
class RunTable:
    """A table of runs."""

    lines: tuple[Line, ...]
    ignored: tuple[str, ...] = ()
    """Columns that nothing reads, each with the column that may have been meant."""


def read_table(path: Path) -> RunTable:
    """Read a table; raises :class:`RunTableError` for a file that is none."""
    records = _records(path, _text(path))
    _, header = next(records, (0, []))
    header = [name.strip() for name in header]
    _check_header(path, header)
    lines = tuple(_line(number, header, values) for number, values in records if any(map(str.strip, values)))
    if not lines:
        raise RunTableError("PT286", f"{path} has a header and no rows", "each run is a row")
    return RunTable(lines, tuple(_ignored(header)))


def _text(path: Path) -> str:
    help = "a table is a CSV file in UTF-8, with a header"
    try:
        size = path.stat().st_size
        if path.is_file() and size > _MOST_BYTES:
            raise RunTableError("PT286", f"{path} has {size / 2**20:.0f} MiB, more than a table of runs can have", help)
        content = path.read_bytes()
    except OSError as error:
        raise RunTableError("PT286", f"{path} cannot be read: {error.strerror}", help) from None
    if not content.strip():
        raise RunTableError("PT286", f"{path} is empty", help)
    if b"\0" in content:
        raise RunTableError("PT286", f"{path} is no text: byte {content.index(0) + 1} is 0", help)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise RunTableError("PT286", f"{path} is not in UTF-8: line {line} has other bytes", help) from None


def _records(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line and the values of every record."""
    source = csv.reader(text.splitlines(keepends=True), strict=True)
    while True:
        start = source.line_num + 1
        try:
            values = next(source)
        except StopIteration:
            return
        except csv.Error as error:
            raise RunTableError(
                "PT286", f"{path} is no CSV: line {start}: {error}", 'a quoted cell ends with ", and holds "" for "'
            ) from None
        yield start, values


def _check_header(path: Path, header: list[str]) -> None:
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and mark in header[0]:
            raise RunTableError("PT286", f"the cells of {path} are separated by {name}", "separate them by commas")
    twice = sorted({name for name in header if name and header.count(name) > 1})
    if twice:
        raise RunTableError("PT286", f"{path} has columns of the same name: {', '.join(twice)}", "rename or remove one")
    missing = [" or ".join(names) for names in _NEEDED if not set(names) & set(header)]
    if missing:
        near = "; ".join(_ignored(header))
        columns = ", ".join(header[:8]) + (", ..." if len(header) > 8 else "")
        message = (
            f"{path} lacks columns of a table of runs: {'; '.join(missing)} (its first line reads: {columns[:300]})"
        )
        raise RunTableError(
            "PT287", message, f"unknown columns: {near}" if near else "docs/guide/own-runs.md lists the columns"
        )


def _ignored(header: list[str]) -> Iterator[str]:
    valid_names = (*ALL_COLUMNS, *MORE)
    for name in header:
        if name and name not in valid_names:
            near = get_close_matches(name.lower().replace(" ", "_"), valid_names, n=1, cutoff=0.7)
            yield f"{name} (did you mean {near[0]}?)" if near else name


def _line(number: int, header: list[str], values: list[str]) -> Line:
    cells = Cells(dict(zip(header, values, strict=False)))
    if len(values) != len(header):
        return Line(number, cells, f"it has {len(values)} cells, the header {len(header)}")
    return Line(number, cells, next(_faults(cells), ""))


def _faults(cells: Cells) -> Iterator[str]:
    """Yield what is wrong with a row: numbers that are none, and degrees that contradict the number of devices."""
    for name in _NUMBERS:
        text = cells.text(name)
        if not text:
            continue
        if not _NUMBER.fullmatch(text):
            commas = "; commas separate thousands" if re.fullmatch(r"[\d.,]+", text) else ""
            yield f"{name} is {text[:30]!r}, not a positive number{commas}"
        elif not 0 < (value := float(text.replace(",", ""))) < inf:
            yield f"{name} is {text[:30]}, not a positive number"
        elif name in _COUNTS and value != int(value):
            yield f"{name} is {text[:30]}, not a whole number"
    for name, pattern in _WORDS.items():
        text = cells.lower(name)
        if text and not re.search(pattern, text) and text not in SCHEDULES:
            yield f"{name} is {text[:30]!r}, which says nothing that is known"
    yield from _contradictions(cells)


def _contradictions(cells: Cells) -> Iterator[str]:
    ranks = cells.count("n_gpus")
    dp, tp, pp, cp, ep = (cells.count(name, 1) for name in ("dp", "tp", "pp", "cp", "ep"))
    if ranks and cells.text("dp") and ranks not in (dp * tp * pp * cp, dp * tp * pp):
        yield f"dp · tp · pp · cp is {dp * tp * pp * cp}, n_gpus is {ranks}"
    if ranks and ep > ranks // pp:
        yield f"ep is {ep}, and a pipeline stage has {ranks // pp} devices"
