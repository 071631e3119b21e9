"""Seconds of one matrix product, computed from its shape."""

from __future__ import annotations

import math

import numpy as np

from partool.catalog.bandwidth import MEMORY_SHARE
from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts, Mask
from partool.cost.silicon.products import EQUATION_WIDTHS, MEASURED_WIDTHS, priced_table
from partool.work.base import Workload

_TILES = ((256, 128, 1.0), (128, 128, 0.97), (128, 64, 0.80), (64, 64, 0.60))
"""Rows and columns of the result that one multiprocessor computes at a time, and the share of the best rate that such a
tile reaches: small tiles read each operand more often. Libraries choose among these tiles (CUTLASS, "Efficient GEMM in
CUDA")."""
_TILE_COLUMNS = tuple(np.array(part) for part in zip(*_TILES, strict=True))
_SHARE_BY_REUSE = (
    [0.0, *sorted(rows * columns / (rows + columns) for rows, columns, _ in _TILES)],
    [0.0, *sorted(share for _, _, share in _TILES)],
)
_DEPTH_S = 0.8e-6
"""Seconds to fill and drain one tile's pipeline over the inner dimension, whatever the length of this dimension."""
_START_S = 2.8e-6
"""Seconds between two kernels on a device: 2 to 5 us without CUDA graphs."""
_MISALIGNED = ((64, 1.0), (8, 1.18), (1, 1.6))
"""Slowdown of products whose widths are multiples of 64 elements, of 8 elements, or of neither (NVIDIA, "Matrix
Multiplication Background User's Guide": tensor cores need multiples of 8; full 128-byte lines are best)."""


def matmul_s(job: Workload, m: Column, n: Column, k: Column, *, wide: bool = False, batch: Column = 1) -> Column:
    """Return the seconds of ``batch`` concurrent products [m, k] × [k, n]; under fp8, ``wide`` products use 16 bits.

    They come from a table of measurements where there is one for the device, or where a calibration measured rows
    (:mod:`partool.cost.silicon.products`).
    Tables have single products of widths that are multiples of 32; the ratios to other products are the equations'.
    """
    table = priced_table(job, equations_s, wide=wide)
    if table is None:
        return equations_s(job, m, n, k, wide=wide, batch=batch)
    m, n, k = (np.maximum(side, 1.0) for side in (m, n, k))
    widths = MEASURED_WIDTHS if table.name else EQUATION_WIDTHS
    seconds = table.seconds(m, n, k) * misaligned(n, widths) * misaligned(k, widths)
    if np.ndim(batch) == 0 and batch == 1:
        return seconds
    several, one = (equations_s(job, m, n, k, wide=wide, batch=each) for each in (batch, 1))
    return seconds * (several / one)


def equations_s(job: Workload, m: Column, n: Column, k: Column, *, wide: bool = False, batch: Column = 1) -> Column:
    """Return the seconds of products from a device's rates alone; see :func:`matmul_s`."""
    devices = job.devices
    rate = devices.achievable_flops
    if wide and devices.wide_flops:
        rate = devices.wide_flops
    rate = rate * devices.sustained_share
    m, n, k = (np.maximum(side, 1.0) for side in (m, n, k))
    flops = 2.0 * batch * m * n * k
    if devices.product_element_s is not None:
        return flops / rate + elements_s(job, batch * (m * k + k * n + m * n))
    moved = 2.0 * batch * (m * k + k * n + m * n) / (MEMORY_SHARE * devices.memory_bytes_per_s)
    if not devices.units:
        return np.maximum(flops / rate, moved) + 0.0
    share = _tile_share(devices.units, m, n, batch)
    depth = _DEPTH_S * np.ceil(batch * m * n / (128 * 128) / devices.units)
    seconds = flops / (rate * share) * misaligned(n) * misaligned(k) + depth
    return np.maximum(seconds, moved) + _START_S


def elements_s(job: Workload, elements: Column) -> Column:
    """Return the seconds in which matrix products on a CPU read and write elements, beside their FLOPs.

    A core computes nothing while it waits for memory, so both add up. The seconds are 0 where they were not measured.
    """
    return elements * (job.devices.product_element_s or 0.0)


def tiled_s(
    job: Workload, sides: tuple[float, float, float], tile: tuple[int, int], *, splits: int = 1, batch: float = 1.0
) -> float:
    """Return the seconds of ``batch`` products with sides (m, n, k) in tiles; other costs are as in :func:`matmul_s`.

    ``tile`` is the tile's (rows, columns). ``splits`` is the number of parts of the inner dimension that are computed
    concurrently; the results of these parts, in a wider type, are summed afterwards. A tile reads ``rows + columns``
    operands per ``rows · columns`` products; the share of the best rate is interpolated between the tiles of
    :data:`_TILES`, linearly in the products per operand.
    """
    m, n, k = (max(side, 1.0) for side in sides)
    devices, (rows, columns) = job.devices, tile
    tiles = batch * math.ceil(m / rows) * math.ceil(n / columns)
    waves = math.ceil(tiles * splits / max(devices.units, 1))
    share = float(np.interp(rows * columns / (rows + columns), *_SHARE_BY_REUSE)) * batch * m * n / (rows * columns)
    share /= waves * max(devices.units, 1) / splits
    flops = 2.0 * batch * m * n * k
    seconds = flops / (devices.achievable_flops * devices.sustained_share * share) * misaligned(n) * misaligned(k)
    moved = 2.0 * batch * (m * k + k * n + m * n) / (MEMORY_SHARE * devices.memory_bytes_per_s)
    sums = streamed_s(job, 8.0 * splits * batch * m * n) if splits > 1 else 0.0
    depth = _DEPTH_S * math.ceil(batch * m * n / (128 * 128) / max(devices.units, 1))
    return float(max(seconds + depth, moved) + _START_S + sums)


def streamed_s(job: Workload, moved_bytes: Column) -> Column:
    """Return the seconds of a kernel that only moves bytes through memory."""
    return moved_bytes / (MEMORY_SHARE * job.devices.memory_bytes_per_s) + _START_S


def misaligned(width: Column, widest: int = _MISALIGNED[0][0]) -> Column:
    """Return the slowdown of a product whose inner or outer width is not a multiple of ``widest`` elements."""
    _, (eight, some), (_, none) = _MISALIGNED
    if not hasattr(width, "shape") or width.shape == ():
        return 1.0 if width % widest == 0 else some if width % eight == 0 else none
    return np.where(np.mod(width, widest) == 0, 1.0, np.where(np.mod(width, eight) == 0, some, none))


def _tile_share(units: int, m: Column, n: Column, batch: Column) -> Column:
    """Return the best tile's share of the best rate: the share in :data:`_TILES` times the use of multiprocessors."""
    # All tiles are computed at once, along a first axis: columns are short, and numpy calls cost more than their data.
    each = np.shape(m * n * batch)
    rows, columns, share = (part.reshape(-1, *(1 for _ in each)) for part in _TILE_COLUMNS)
    tiles = batch * np.ceil(m / rows) * np.ceil(n / columns)
    waves = tiles / units
    used = share * (m * n * batch) / (rows * columns)
    best: Column = np.max(used / (np.ceil(waves) * units), axis=0)
    return best


def in_tiles(job: Workload, layouts: Layouts) -> Mask:
    """Return True where feed-forward networks process a rank's part of the sequence in tiles."""
    tile = np.asarray(layouts.mlp_tile_tokens)
    return (tile > 0) & (tile < job.sequence_length / np.asarray(layouts.cp))


def products_s(job: Workload, layouts: Layouts) -> Column:
    """Return the seconds of a dense network's products in one forward pass of a micro-batch, tile by tile."""
    model, inner = job.model, tensor_shares.width(job.model.ffn_hidden, tensor_shares.outer(layouts))
    length = job.sequence_length / np.asarray(layouts.cp)
    tile = np.where(in_tiles(job, layouts), layouts.mlp_tile_tokens, length)
    rows = tile * layouts.micro_batch
    first = matmul_s(job, rows, (1 + model.gated) * inner, model.hidden)
    return length / tile * (first + matmul_s(job, rows, model.hidden, inner))
