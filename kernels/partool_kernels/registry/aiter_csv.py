"""Read CSV files in which AMD's aiter keeps measurements of its compiled products (CK, assembly, hipBLASLt).

Columns are as in https://github.com/ROCm/aiter, ``aiter/configs/*_tuned_gemm.csv``: ``cu_num`` and, in newer files,
``gfx`` for the device; M, N, K; ``libtype``; ``us``. The file's name gives the computation.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from partool_kernels.registry.aiter import is_forward
from partool_kernels.registry.distance import ROWS
from partool_kernels.registry.tables import TableError
from partool_kernels.registry.types import Choice, Config, Request

FILES = {"a8w8_blockscale_tuned_gemm": "gemm_a8w8", "bf16_tuned_gemm": "gemm"}
"""partool's kernel for the computation that a file measures, by the beginning of the file's name."""
_NEEDED = ("cu_num", "M", "N", "K", "us")
_UNITS = {304: "gfx942", 80: "gfx942", 256: "gfx950"}
"""Architecture by ``cu_num``, for older files without ``gfx``: MI300X and MI325X; MI308X; MI350X and MI355X."""
_PADS = ((256, 16), (1024, 32), (4096, 64))
"""Pairs (most, step) that round up a number of rows without a measurement. Up to ``most`` rows the number is rounded up
to a multiple of ``step``; above 4096 rows it is rounded up to a multiple of 128."""


class _Row(NamedTuple):
    library: str
    time_s: float
    file: str


class _Key(NamedTuple):
    kernel: str
    architecture: str
    units: int
    m: int
    n: int
    k: int


class AiterTimes:
    """Lines of aiter's CSV files; if a product has several lines, the fastest line is used, as in aiter."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Read the files; raises :class:`TableError` for a file that lacks columns or has an unknown name."""
        self._rows: dict[_Key, _Row] = {}
        self.doubts: list[str] = []
        """Lines that were left out because their time is invalid, in words."""
        for file in files:
            for number, key, row in _read(file):
                if not 0 < row.time_s < math.inf:
                    self.doubts.append(f"{file}: line {number}: {row.time_s * 1e6:g} us is no time, it is not used")
                elif key not in self._rows or row.time_s < self._rows[key].time_s:
                    self._rows[key] = row

    def look_up(self, request: Request) -> tuple[int, _Row] | None:
        """Return the first number of rows of :func:`padded` that has a measurement, and the measurement; else None."""
        if "n" not in request.width or "k" not in request.width or not is_forward(request):
            return None
        for m in padded(request.rows):
            key = _Key(request.kernel, request.architecture, request.units, m, request.width["n"], request.width["k"])
            if key in self._rows:
                return m, self._rows[key]
        return None

    def choices(self, request: Request) -> Iterator[Choice]:
        """Yield nothing, as the files hold no parameters of Triton kernels."""
        yield from ()

    def coverage(self, request: Request) -> Iterator[Choice]:
        """Yield the measurements of aiter's kernel."""
        entry = self.look_up(request)
        if entry:
            m, row = entry
            exact = m == request.rows
            time_s = row.time_s if exact else None
            yield Choice(
                row.library, Config(), "exact" if exact else "rows", 0.0 if exact else ROWS, time_s, table=row.file
            )


def padded(m: int) -> tuple[int, int, int]:
    """Return the numbers of rows to look for, in order: ``m``, ``m`` rounded up by ``_PADS``, the next power of two."""
    step = next((step for most, step in _PADS if m <= most), 128)
    return m, -(-m // step) * step, 1 << max(m - 1, 0).bit_length()


def kernel_of(path: Path) -> str | None:
    """Return partool's kernel for the computation that a file measures, or None."""
    return next((kernel for name, kernel in FILES.items() if path.name.startswith(name)), None)


def _read(path: Path) -> Iterator[tuple[int, _Key, _Row]]:
    kernel = kernel_of(path)
    if kernel is None:
        raise TableError(path, f"the names of files of products begin with {' or '.join(FILES)}")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.DictReader(file)
            missing = [name for name in _NEEDED if name not in (lines.fieldnames or ())]
            if missing:
                raise TableError(path, f"there is no column {missing[0]}")
            for number, line in enumerate(lines, 2):
                try:
                    entry = _row(kernel, line, str(path))
                except (TypeError, ValueError) as error:
                    raise TableError(path, f"line {number}: {error}") from None
                if entry:
                    yield number, *entry
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(path, str(error)) from None


def _row(kernel: str, line: dict[str, str], file: str) -> tuple[_Key, _Row] | None:
    """Return a line's key and row, or None if the product has a bias, other types or another layout of weights."""
    plain = all(line.get(name, "False") in ("False", "") for name in ("bias", "scaleAB", "bpreshuffle"))
    types = [line.get(name, "torch.bfloat16") for name in ("dtype", "outdtype")]
    time_s = float(line["us"]) * 1e-6
    units = int(line["cu_num"])
    architecture = line.get("gfx") or _UNITS.get(units, "")
    key = _Key(kernel, architecture, units, int(line["M"]), int(line["N"]), int(line["K"]))
    if not plain or (kernel == "gemm" and types != ["torch.bfloat16"] * 2):
        return None
    return key, _Row(f"aiter ({line.get('libtype') or 'ck'})", time_s, file)
