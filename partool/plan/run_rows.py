"""Predicted and measured figures of finished runs: ``measured_runs.csv`` in the folder of the runs.

Each run has one row. The first columns (model, layout, speed) equal those of a collection of published runs, so that
one tool can read both files. An empty field means that the value is unknown.
"""

from __future__ import annotations

import csv
import errno
import io
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from partool.plan import posix
from partool.plan.terms import HOST_TERMS, MEMORY_TERMS, TIME_TERMS, TRAFFIC_TERMS

RUNS_FILE = "measured_runs.csv"
SOURCE = "partool run"
LEAST_STEPS = 10
"""Minimum number of steps of an attempt that gets a row, not counting warm-up and steps with a validation or
checkpoint."""
COLUMNS = (
    "source", "url_or_repo_path", "year", "model", "params_b", "n_layers", "hidden", "ffn_hidden", "n_heads",
    "n_kv_heads", "vocab", "seq_len", "gpu", "n_gpus", "gpus_per_node", "intra_bw_note", "inter_bw_note", "dtype",
    "dp", "tp", "pp", "cp", "ep", "vpp_or_schedule", "zero_or_fsdp", "sequence_parallel", "recompute", "micro_batch",
    "global_batch", "step_time_s", "tflops_per_gpu", "mfu_pct", "tokens_per_s_per_gpu", "peak_mem_gib", "notes",
)  # fmt: skip
"""Columns shared with collections of published runs; ``url_or_repo_path`` holds the run's id."""
OWN_COLUMNS = (
    "stack", "partool_version", "calibration", "time_scalar", "memory_scalar", "attempt", "steps",
    "predicted_step_time_s", "predicted_memory_bytes", "measured_memory_bytes",
)  # fmt: skip
"""Further columns: ``calibration`` is the hash of the machine's figures that the plan used, empty for the catalog's;
the scalars are already contained in the predictions."""
_PATIENCE_S = 10.0
_UNITS = {"memory": "bytes", "host": "bytes", "time": "s", "traffic": "bytes"}
TERM_COLUMNS = tuple(
    f"{what}_{section}_{term}_{_UNITS[section]}"
    for section, terms in (
        ("time", TIME_TERMS),
        ("memory", MEMORY_TERMS),
        ("traffic", TRAFFIC_TERMS),
        ("host", HOST_TERMS),
    )
    for term in terms
    for what in ("predicted", "measured")
)
ALL_COLUMNS = COLUMNS + OWN_COLUMNS + TERM_COLUMNS


def term_column(what: str, section: str, term: str) -> str:
    """Return the name of the column of a term; ``what`` is ``predicted`` or ``measured``."""
    return f"{what}_{section}_{term}_{_UNITS[section]}"


def append_row(file: Path, row: Mapping[str, str]) -> None:
    """Append a row, and the header to a new file; several processes may do so at once. Raises OSError.

    A file that an older version created is rewritten with the columns that it lacks.
    """
    with _locked(file):
        header = _header(file)
        if header is not None and set(ALL_COLUMNS) - set(header):
            header = _widen(file, header)
        columns = header or list(ALL_COLUMNS)
        lines = [] if header else [columns]
        text = _csv([*lines, [row.get(column, "") for column in columns]])
        torn = header is not None and not _ends_whole(file)
        with file.open("ab", buffering=0) as output:
            output.write(("\n" * torn + text).encode())


def read_rows(file: Path) -> list[dict[str, str]]:
    """Return the rows of a file; lines with too few or too many fields are skipped. Raises OSError."""
    with file.open(encoding="utf-8", errors="replace", newline="") as source:
        rows = list(csv.reader(source, strict=False))
    if not rows:
        return []
    header, *lines = rows
    return [dict(zip(header, line, strict=True)) for line in lines if len(line) == len(header)]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Lock a file beside ``file``, as ``file`` may be replaced; the system releases the lock however a process ends."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(f".{file.name}.lock").open("a") as lock:
        deadline = time.monotonic() + _PATIENCE_S
        while not posix.lock(lock):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process holds it")
            time.sleep(0.01)
        yield


def _header(file: Path) -> list[str] | None:
    try:
        with file.open(encoding="utf-8", errors="replace", newline="") as source:
            return next(csv.reader(source), None)
    except FileNotFoundError:
        return None


def _widen(file: Path, header: list[str]) -> list[str]:
    wider = [*ALL_COLUMNS, *(column for column in header if column not in ALL_COLUMNS)]
    rows = [[row.get(column, "") for column in wider] for row in read_rows(file)]
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(_csv([wider, *rows]), encoding="utf-8")
    temporary.replace(file)
    return wider


def _ends_whole(file: Path) -> bool:
    with file.open("rb") as source:
        source.seek(-1, os.SEEK_END)
        return source.read() == b"\n"


def _csv(rows: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()
