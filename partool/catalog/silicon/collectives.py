"""Measured collectives within a node: which table prices a device, and its times as curves over bytes.

Tables were measured back to back on devices that did nothing else, so they lack the host's time and the slowdown beside
products, which code bases add as ``contention`` and as shares of overlap (:class:`partool.work.stack.Stack`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from partool.catalog.lookup import table
from partool.catalog.silicon.grid import MeasuredGrid, grid

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

_PCIE = (("l40s", 31.0), ("rtx-pro-6000", 63.0))
"""Measured servers of cards without links between them, by ascending GB/s of the slot (PCIe 4 and PCIe 5)."""
_SUMMING_SWITCHES = 90
"""Least compute capability of devices whose NVLink switches sum (NVLink SHARP of Hopper)."""


@cache
def measured_device(accelerator: str, measured_as: str) -> str:
    """Return the catalog name of the device whose table prices collectives of ``accelerator``; empty if none does.

    Cards without links take a measured server of cards: what ranks send there goes over PCIe, between sockets through
    the host. That of the same or the next faster PCIe generation is nearest. All other devices take the table of
    ``measured_as``. A device that is not in the catalog has no table, whatever its rates are.
    """
    entry = table("accelerators").get(accelerator)
    if entry is None or entry["backend"] != "cuda":
        return ""
    if entry["topology"] == "none":
        return next((name for name, rate in _PCIE if entry["link_gb_per_s"] <= rate), _PCIE[-1][0])
    return measured_as if collectives(measured_as, "all_gather") is not None else ""


def collectives(device: str, operation: Operation) -> MeasuredGrid | None:
    """Return the seconds of an operation by number of ranks and bytes of the whole tensor; None without a table."""
    return grid("collectives", f"{device}/{operation}/nccl")


def seconds_by_rank(measured: MeasuredGrid, most: int) -> NDArray[np.float64]:
    """Return seconds at the table's sizes for 2 to ``most`` ranks, one row each.

    Between measured numbers of ranks the logarithm of the seconds is linear in the logarithm of the ranks. Beyond the
    largest, a collective starts later by what one doubling of the ranks has measured, per doubling, and its bytes take
    longer by :func:`_growth`.
    """
    ranks, log_s = measured.axes["ranks"], measured.log_s
    inner = np.arange(2, min(most, int(ranks[-1])) + 1)
    rows = np.stack([np.interp(np.log(inner), np.log(ranks), column) for column in log_s.T], axis=1)
    seconds = np.exp(rows)
    more = np.arange(int(ranks[-1]) + 1, most + 1)[:, None]
    if not len(more):
        return np.asarray(seconds)
    largest, start_s = np.exp(log_s[-1]), np.exp(log_s[:, 0])
    per_doubling_s = (start_s[-1] - start_s[-2]) / np.log2(ranks[-1] / ranks[-2])
    started_s = start_s[-1] + per_doubling_s * np.log2(more / ranks[-1])
    return np.concatenate([seconds, started_s + _growth(measured, more) * (largest - start_s[-1])])


def _growth(measured: MeasuredGrid, more: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how much longer bytes take with ``more`` ranks than with the most that were measured.

    Behind switches of NVLink a rank sends (n-1)/n of the tensor over its own links, and from Hopper on the switches sum
    all-reduces, whose time per byte stays (GB200: 413 GB/s at 4 ranks, 423 at 72,
    https://github.com/coreweave/nccl-tests#gb200).

    Cards in PCIe slots have no links of their own. Eight cards with 16 lanes each take about all lanes of two host
    processors (128 to 160 with AMD EPYC 9004, https://www.amd.com/en/products/processors/server/epyc.html), so that
    more cards share the lanes of eight. What n ranks send, (n-1)/n of the tensor each, then takes in proportion to
    n-1. This is an assumption, as nobody published measurements of servers with more than eight cards.
    """
    most = measured.axes["ranks"][-1]
    entry = table("accelerators")[measured.origin["device"]]
    if entry["topology"] == "none":
        return np.asarray((more - 1.0) / (most - 1.0))
    if measured.origin["kernel"] == "all_reduce" and _capability(entry) >= _SUMMING_SWITCHES:
        return np.ones_like(more, dtype=float)
    return np.asarray((1.0 - 1.0 / more) / (1.0 - 1.0 / most))


def _capability(entry: Mapping[str, Any]) -> int:
    return int(entry["kernel_limits"]["architecture"].removeprefix("sm_"))
