"""Writes distilled tables beside :mod:`partool.catalog.silicon.grid`, which reads them."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from partool.catalog.silicon.grid import STEP, Family, MeasuredGrid, Origin, TableEntry

FOLDER = Path(__file__).parents[2] / "partool" / "catalog" / "silicon"
DATA = Path(__file__).parents[3] / "shared" / "data" / "silicon"
"""Measurements as their sources publish them; they are not part of the project."""
AICONFIGURATOR = "aiconfigurator-core 0.12.0 (PyPI), NVIDIA"
SYSTEMS = {
    "a100_sxm": "a100-80", "h100_sxm": "h100-sxm", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300",
    "gb200": "gb200", "gb300": "gb300", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
"""Name of a system in the measurements → catalog name. Intel's B60 has no entry in the catalog."""


def origin(device: str, kernel: str, framework: str, rows: int, dropped: dict[str, int]) -> Origin:
    """Return where a table of NVIDIA's measurements comes from."""
    return Origin(
        device=device, kernel=kernel, framework=framework, source=AICONFIGURATOR, licence="Apache-2.0",
        date="2026-11", rows=rows, dropped=dropped,
    )  # fmt: skip


def write(
    family: Family, grids: dict[str, MeasuredGrid], integers: Mapping[str, NDArray[np.int16]] | None = None
) -> int:
    """Write a family's two files and return their bytes; the same grids give the same bytes.

    ``integers`` are further arrays of the file of seconds, by name.
    """
    entries = {
        name: TableEntry(**grid.origin, axes={axis: values.tolist() for axis, values in grid.axes.items()})
        for name, grid in sorted(grids.items())
    }
    text = json.dumps(entries, separators=(",", ":"))
    (FOLDER / f"{family}.json").write_text(text.replace('"},"', '"},\n"') + "\n", encoding="utf-8")
    path = FOLDER / f"{family}.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        arrays = {name: encoded(grid.log_s) for name, grid in grids.items()} | dict(integers or {})
        for name, array in sorted(arrays.items()):
            member = io.BytesIO()
            np.lib.format.write_array(member, array)
            info = zipfile.ZipInfo(f"{name.replace('/', '|')}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, member.getvalue())
    return path.stat().st_size + (FOLDER / f"{family}.json").stat().st_size


def encoded(log_s: NDArray[np.float64]) -> NDArray[np.int16]:
    """Return logarithms of seconds as they are stored: rounded steps, each less the one before it on the last axis."""
    steps = np.rint(log_s / STEP).astype(np.int64)
    return np.diff(steps, axis=-1, prepend=0).astype(np.int16)
