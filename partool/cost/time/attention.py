"""Seconds that the busiest rank spends on the core of attention: scores, softmax and the product with values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from partool.catalog.bandwidth import STREAM_SHARE
from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts, among
from partool.cost.kinds import Kind
from partool.cost.sequence import shares as sequence_shares
from partool.cost.silicon import attention as silicon
from partool.cost.silicon import calibrated
from partool.cost.silicon.origin import PriceOrigin
from partool.cost.time.gemm import matmul_s
from partool.spec.measured_rows import AttentionRow
from partool.work.base import Workload

_FLASH_SHARE = {"cpu": 0.35, "cuda": 0.50, "rocm": 0.35}
"""Share of the peak rate (on a CPU: of the achievable rate) that fused attention reaches over both passes. It is used
where the devices have no ``attention_flops``, as those that the catalog lacks. These are assumptions, and so are the
catalog's shares of AMD devices (0.30 to 0.34): measured attention was published for NVIDIA's devices only."""
_GENERATIONS = {
    "flash1": (0.70, 200e12, False),
    "flash2": (1.0, 350e12, True),
    "flash3": (1.0, float("inf"), True),
}
"""For each kind of fused attention: share of the best rate, limit in FLOP/s, and whether heads of 128 are faster than
heads of 64. FlashAttention-2 is 1.5 to 2 times as fast as FlashAttention-1 (arXiv 2307.08691). On Hopper it reaches
about 350e12 FLOP/s, as it does not use Hopper's asynchronous tensor cores (arXiv 2407.08608, section 1)."""
_START_S = 5e-6
_BACKWARD = 2.5
"""Time of a fused backward pass relative to the forward pass; it computes five products instead of two."""
_SCORE_BYTES_FORWARD, _SCORE_BYTES_BACKWARD = 16.0, 16.0
"""Bytes of memory traffic per score of unfused attention in a forward and in a backward pass. A forward pass moves the
scores, the scaled and masked softmax, and dropout with its mask, and the second product reads the result. A backward
pass moves as many bytes, with gradients."""
_ALL = Kind(None, False)


def keys_seen(length: int, window: int | None) -> float:
    """Return how many keys a causal query attends to on average, in a window or in the whole sequence."""
    return float(keys_between(0, length, length if window is None else window))


def keys_between(start: Column, stop: Column, window: int) -> Column:
    """Return the mean number of keys of queries at positions ``start`` to ``stop``: mean of min(position, window)."""

    def until(place: Column) -> Column:
        low = np.minimum(place, window)
        return low * low / 2.0 + window * (place - low)

    return (until(stop) - until(start)) / np.maximum(stop - start, 1e-9)


def widths(job: Workload, layouts: Layouts) -> tuple[Column, Column, Column]:
    """Return the numbers of elements per token of queries, of keys and of values in one tensor rank's heads."""
    model = job.model
    queries, keys = tensor_shares.heads(model, layouts.tp)
    if model.mla:
        query = queries * (model.mla.nope_head_dim + model.mla.rope_head_dim)
        return query, query, queries * model.mla.v_head_dim
    return queries * model.head_dim, keys * model.head_dim, keys * model.head_dim


def pairs(job: Workload, layouts: Layouts, kind: Kind) -> Column:
    """Return the number of query-key pairs of one sequence that the busiest rank computes, over all its query heads.

    With Ulysses each rank attends over the full sequence (on a grid: over all rows or columns) with fewer heads. With
    DSP each rank attends over fewer rows or columns, each of them full. With other methods ranks attend to the keys of
    all ranks; if shares are contiguous, the last rank has more pairs than the mean (almost twice as many if there are
    many ranks).
    """
    length, ranks, inner = job.sequence_length, layouts.cp, sequence_shares.trading(layouts)
    heads = sequence_shares.heads(job, layouts).queries
    if kind.axis and job.model.grid:
        return heads * _line_pairs(job.model.grid, kind, layouts)
    window = length if kind.window is None else kind.window
    share = tensor_shares.width(length, ranks // inner)
    mean: Column = keys_between(0, length, window)
    method, order = layouts.sequence_method, np.asarray(layouts.sequence_order)
    uneven = (order == 0) & (ranks > 1) & among(method, sequence_shares.RINGS + sequence_shares.GATHERED)
    keys: Column = np.where(uneven & (share < length), keys_between(length - share, length, window), mean)
    # The last team computes the scores of all its queries together, each member for a part of the keys.
    team = np.minimum(tensor_shares.width(length, ranks) * layouts.sequence_teams, length)
    last_team = (order == 0) & (ranks > 1) & among(method, sequence_shares.TEAMS)
    keys = np.where(last_team, keys_between(length - team, length, window), keys)
    return share * keys * heads


def _line_pairs(grid: tuple[int, int], kind: Kind, layouts: Layouts) -> Column:
    """Return the number of query-key pairs along one axis of a grid; DSP shards the other axis, Ulysses no axis."""
    line, lines = (grid[1], grid[0]) if kind.axis == "row" else grid
    on_grids = among(layouts.sequence_method, sequence_shares.ON_GRIDS)
    return line * line / 2.0 * np.where(on_grids, tensor_shares.width(lines, layouts.cp), lines)


def attention_s(job: Workload, layouts: Layouts, kind: Kind = _ALL, *, backward: bool) -> Column:
    """Return the seconds that the busiest rank spends on the core of one layer's attention for one micro-batch."""
    if job.stack.attention == "unfused":
        return _unfused_s(job, layouts, layouts.micro_batch * job.sequence_length / layouts.cp, backward=backward)
    flops = 2.0 * layouts.micro_batch * pairs(job, layouts, kind) * sum(_head(job))
    shape = partial(kernel, job, layouts, kind)
    blocks, latent = sequence_shares.blocks(layouts, kind), job.model.mla is not None
    core = _Core(flops, blocks, _length(job, kind), job.model.head_dim, latent, shape)
    seconds = _pass_s(job, core, job.stack.attention, backward=backward) * _measured_ratio(job, core)
    return seconds / _clocks(job, job.stack.attention, latent=latent)


@dataclass(frozen=True)
class _Core:
    """Fused attention of one rank."""

    flops: Column
    """FLOPs of a forward pass."""
    blocks: Column
    """Kernels that follow each other."""
    length: int
    head_dim: int
    latent: bool
    shape: Callable[[], silicon.AttentionShape]
    """Gives what one kernel computes."""


def _covered(job: Workload, generation: str, *, latent: bool) -> bool:
    return silicon.covers(job.devices, generation, job.compute_bytes, latent=latent)


def _clocks(job: Workload, generation: str, *, latent: bool) -> float:
    """Return the share of a kernel's rate that a whole step sustains; the rates of equations are those of steps."""
    return job.devices.sustained_share if _covered(job, generation, latent=latent) else 1.0


def _best_flops(job: Workload, length: int) -> float:
    """Return the FLOP/s over both passes of the device's fastest kernel."""
    rate = _rate_at(job.devices.attention_by_length, length) or job.devices.attention_flops
    return rate or _FLASH_SHARE[job.devices.backend] * _peak(job)


def _pass_s(job: Workload, core: _Core, generation: str, *, backward: bool) -> Column:
    """Return the seconds of one pass, without the clocks of a whole step."""
    devices, rate = job.devices, _best_flops(job, core.length)
    if not _covered(job, generation, latent=core.latent):
        rate = equation_flops(rate, generation, core.head_dim)
        return core.flops * (_BACKWARD if backward else 1.0) / rate + _START_S * core.blocks
    measured = silicon.generation(devices, latent=core.latent)
    passes = _BACKWARD / silicon.BACKWARD_RATE if backward else 1.0
    measured_rate = _generation_rate(silicon.catalog_flops(devices.measured_as), measured)
    ratio = silicon.slowness(devices, core.shape(), lambda work: work / measured_rate + _START_S)
    return (core.flops * passes / _generation_rate(rate, generation) + _START_S * core.blocks) * ratio


def _measured_ratio(job: Workload, core: _Core) -> Column:
    """Return the ratio of the user's machine to the price, from the attention that was measured on it."""
    measured = job.devices.measured_rows
    if measured is None or not measured.attention:
        return 1.0
    if "attention rows" not in job.memo:
        job.memo["attention rows"] = [_row_ratio(job, row) for row in measured.attention]
    shape = core.shape()
    return calibrated.by_length(job.memo["attention rows"], shape.length, shape.heads)


def _row_ratio(job: Workload, row: AttentionRow) -> calibrated.LengthRatio:
    """Return the ratio of a row's seconds to the price of both passes, by the fastest kernel that the device has."""
    widths = (row.width, row.width)
    shape = silicon.AttentionShape(float(row.length), float(row.heads), None, widths)
    flops = 2.0 * row.heads * row.length * keys_seen(row.length, None) * sum(widths)
    core = _Core(flops, 1, row.length, row.width, latent=False, shape=lambda: shape)
    priced_s = sum(float(_pass_s(job, core, silicon.FLASH3, backward=backward)) for backward in (False, True))
    return calibrated.LengthRatio(float(row.length), float(row.heads), math.log(row.seconds / priced_s))


def kernel(job: Workload, layouts: Layouts, kind: Kind = _ALL) -> silicon.AttentionShape:
    """Return the attention that one kernel of the busiest rank computes.

    In a ring a kernel attends to one block of keys, with as many queries: those of a rank or of a team. If keys are
    gathered, a kernel reads all keys for a part of the queries, which is as much work per tile as in fewer heads.
    """
    heads = layouts.micro_batch * sequence_shares.heads(job, layouts).queries
    length: Column = _length(job, kind)
    if kind.axis and job.model.grid:
        lines = job.model.grid[0] if kind.axis == "row" else job.model.grid[1]
        on_grids = among(layouts.sequence_method, sequence_shares.ON_GRIDS)
        heads = heads * np.where(on_grids, tensor_shares.width(lines, layouts.cp), lines)
    elif np.any(np.asarray(layouts.cp) > 1):
        method = layouts.sequence_method
        blocks = sequence_shares.ring(layouts) * np.where(
            among(method, sequence_shares.TEAMS), np.maximum(layouts.sequence_teams, 1), 1
        )
        gathered = among(method, sequence_shares.GATHERED)
        heads = heads * np.where(gathered, tensor_shares.width(length, layouts.cp) / length, 1.0)
        length = np.where(gathered, length, length / blocks)
    return silicon.AttentionShape(length, heads, kind.window, _head(job), job.model.mla is not None)


def origin(job: Workload, layouts: Layouts, kind: Kind = _ALL, *, backward: bool) -> PriceOrigin:
    """Return where the seconds of :func:`attention_s` come from."""
    assumed = PriceOrigin("assumed", "equations of attention")
    if job.stack.attention == "unfused":
        return assumed
    shape, price = kernel(job, layouts, kind), assumed
    if job.compute_bytes == 2:
        price = silicon.origin(job.devices, shape, wanted=job.stack.attention, backward=backward)
    measured = job.devices.measured_rows
    if measured is None or not measured.attention:
        return price
    here, length = calibrated.here(measured.date), float(shape.length)
    if _is_row(job, shape, measured.attention):
        clocks = _clocks(job, job.stack.attention, latent=False)
        return calibrated.at_row(
            f"{here}, both passes together", [f"clocks of a whole step, {clocks:g}"] if clocks < 1.0 else []
        )
    lengths = [row.length for row in measured.attention]
    if price.kind in ("measured", "interpolated") and min(lengths) <= length <= max(lengths):
        return PriceOrigin("interpolated", f"between attention of {here}, along {price.text}")
    return PriceOrigin("scaled", f"{price.text}; by the nearest attention of {here}")


def _is_row(job: Workload, shape: silicon.AttentionShape, rows: Sequence[AttentionRow]) -> bool:
    """Return True if a row's kernel, the fastest of the device, computes this shape."""
    if shape.latent or shape.window is not None:
        return False
    rate = _best_flops(job, int(shape.length))
    at = float(shape.length), float(shape.heads), shape.widths
    fastest = _generation_rate(rate, job.stack.attention) == rate
    return fastest and any(at == (row.length, row.heads, (row.width, row.width)) for row in rows)


def equation_flops(rate: float, generation: str, head_dim: int) -> float:
    """Return the FLOP/s of fused attention on devices without tables, given the best rate of a device."""
    wide_heads = _GENERATIONS[generation][2]
    return _generation_rate(rate, generation) * (_head_share(head_dim) if wide_heads else 1.0)


def _generation_rate(rate: float, generation: str) -> float:
    """Return the FLOP/s of a kind of fused attention, given the best rate of a device."""
    share, limit, _ = _GENERATIONS[generation]
    return min(share * rate, limit)


def _head(job: Workload) -> tuple[int, int]:
    """Return the elements of a query (and key) and of a value, per head."""
    model = job.model
    if model.mla:
        return model.mla.nope_head_dim + model.mla.rope_head_dim, model.mla.v_head_dim
    return model.head_dim, model.head_dim


def _length(job: Workload, kind: Kind) -> int:
    """Return the number of tokens of the sequences, or of the lines of a grid, that attention works on."""
    if kind.axis and job.model.grid:
        return job.model.grid[1] if kind.axis == "row" else job.model.grid[0]
    return job.sequence_length


def _rate_at(by_length: tuple[tuple[int, float], ...], length: int) -> float:
    """Return the rate at a length: between measured lengths linear in its logarithm, beyond them that of the nearest.

    Shorter sequences leave less work per block of queries. The result is 0 if nothing was measured.
    """
    if not by_length:
        return 0.0
    lengths, rates = zip(*by_length, strict=True)
    return float(np.interp(math.log(length), np.log(lengths), rates))


def _peak(job: Workload) -> float:
    devices = job.devices
    return devices.achievable_flops if devices.backend == "cpu" else devices.peak_flops or devices.achievable_flops


def _head_share(head_dim: int) -> float:
    """Return the speed of attention relative to heads of width 128; narrow heads have less work per softmax element."""
    return 1.0 if head_dim >= 128 else 0.85 if head_dim >= 96 else 0.70


def _unfused_s(job: Workload, layouts: Layouts, rows: Column, *, backward: bool) -> Column:
    """Return the seconds of products over all pairs (also masked ones) and of the memory traffic of scores."""
    model, length = job.model, job.sequence_length
    queries, _ = tensor_shares.heads(model, layouts.tp)
    heads = layouts.micro_batch * queries / layouts.cp
    both = matmul_s(job, length, length, model.head_dim, batch=heads, wide=True) + matmul_s(
        job, length, model.head_dim, length, batch=heads, wide=True
    )
    scores = rows * length * queries
    passes = _SCORE_BYTES_BACKWARD if backward else _SCORE_BYTES_FORWARD
    return (2.0 if backward else 1.0) * both + scores * passes * job.compute_bytes / 2 / (
        STREAM_SHARE[job.devices.backend] * job.devices.memory_bytes_per_s
    )


def extra_operators(job: Workload, layouts: Layouts) -> Column:
    """Return the factor by which a layer has more operators where unfused attention has no fused softmax kernel.

    Megatron's masked softmax works on groups of four heads and samples; for other numbers of heads and samples it runs
    a chain of small kernels (``FusedScaleMaskSoftmax`` in https://github.com/NVIDIA/Megatron-LM).
    """
    if job.stack.attention != "unfused":
        return 1.0
    rows = layouts.micro_batch * tensor_shares.heads(job.model, layouts.tp)[0]
    return np.where(np.mod(rows, 4) == 0, 1.0, 1.35)
