"""Seconds of measured attention kernels, relative to the equation of :mod:`partool.cost.time.attention`.

Tables (:mod:`partool.catalog.silicon`) have forward passes of causal attention in 16 bits on whole devices. A price is
the equation's seconds times a ratio: measured seconds of the nearest shape in a table, divided by the equation's
seconds of that shape on the measured device. At a table's points the result is the measurement; beyond them the
equation says how seconds grow; and rates that a spec or a calibration gives scale the result.

Measured kernels ran alone and shortly. Over a whole step power limits lower the clocks, those of attention too, so
seconds are divided by ``Devices.sustained_share``. The tables show as much: on H100 with 8,192 tokens they have 640
TFLOP/s with 16 heads, and 530 with 1,024 heads, whose kernel takes 30 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from partool.catalog.lookup import table
from partool.catalog.silicon.grid import MeasuredGrid, entries, grid
from partool.cost import repeats
from partool.cost.case import Column
from partool.cost.silicon.origin import PriceOrigin
from partool.spec.hardware import Devices

FLASH2, FLASH3 = "flash2", "flash3"
GENERATIONS = {
    "vllm_flash_attn": FLASH2,
    "vllm_flash_attn_fa2": FLASH2,
    "vllm_flash_attn_fa3": FLASH3,
    "vllm_flashinfer_trtllmprefill": FLASH3,
    "default": FLASH3,
    "trtllm_mla": FLASH3,
}
"""Measured kernel → the generation of :class:`partool.work.stack.Stack` whose equation it is compared with. A100, L40S
and RTX PRO 6000 have FlashAttention-2, Hopper has FlashAttention-3. On Blackwell TensorRT-LLM's kernels stand for the
ones of cuDNN and FlashAttention-4 that train there, which nobody published in this form. ``default`` is
TensorRT-LLM's kernel of latent attention."""
BACKWARD_RATE = 0.85
"""FLOP/s of a backward pass relative to those of the forward pass; nobody published tables of backward passes.
FlashAttention-2 reaches 63 % of an A100's peak in its backward pass and 73 % in its forward pass (arXiv 2307.08691,
section 4). FlashAttention-3 reaches 0.87 of its forward pass without a causal mask and with 16,384 tokens (561 and 648
TFLOP/s, arXiv 2407.08608, figures 5 and 6). For Blackwell it is assumed."""
_NARROW_POWER = 0.13
"""Exponent of FLOP/s against the width of heads from 64 to 128 elements, where only wider heads were measured:
FlashAttention-2 with 64 reaches 0.91 of its rate with 128 on both devices that have tables of both."""
_NARROWEST = 64
"""Narrower heads take as many seconds as this width: exponentials limit them, and their number stays the same."""
_LARGE = (16384.0, 64.0)
"""Length and heads of work that fills every device."""
_MASKED_KEYS = 128.0
"""Keys beside those in a window that a query's tile computes and masks, where no window was measured: one tile."""


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one kernel, as columns."""

    length: Column
    """Tokens of a sequence, each of which is a query and a key."""
    heads: Column
    """Query heads of all sequences together."""
    window: int | None
    widths: tuple[int, int]
    """Elements of a query (and key) and of a value, per head."""
    latent: bool = False


@dataclass(frozen=True)
class _Width:
    """Tables of one head width, by window; 0 stands for all keys."""

    widths: tuple[int, int]
    names: dict[int, str]

    def grid(self, window: int) -> MeasuredGrid:
        """Return the seconds with a window."""
        loaded = grid("attention", self.names[window])
        assert loaded is not None
        return loaded


def covers(devices: Devices, generation: str, element_bytes: int, *, latent: bool) -> bool:
    """Return True if measured kernels price attention: of this generation, in 16 bits, on these devices."""
    return generation in (FLASH2, FLASH3) and element_bytes == 2 and bool(_widths(devices.measured_as, latent=latent))


def generation(devices: Devices, *, latent: bool) -> str:
    """Return the generation of the measured kernel."""
    return GENERATIONS[_kernel(devices.measured_as, latent=latent)]


@cache
def catalog_flops(device: str) -> float:
    """Return the catalog's FLOP/s of attention in 16 bits on a device, over both passes."""
    entry = table("accelerators")[device]
    return float(max(entry["attention_share"].values()) * entry["peak_tflops"]["bf16"] * 1e12)


def slowness(devices: Devices, shape: AttentionShape, equation: Callable[[Column], Column]) -> Column:
    """Return measured seconds divided by the equation's, for the nearest measured shapes.

    ``equation`` gives the equation's seconds for FLOPs on the measured device and with the measured kernel's rate.
    """
    length, heads = np.broadcast_arrays(*np.atleast_1d(shape.length, shape.heads))
    if length.size == 1:
        return float(np.ravel(_slowness(devices, shape, equation))[0])
    first, place = repeats.distinct(repeats.codes(length.size, (length, heads)))
    few = replace(shape, length=length[first], heads=heads[first])
    ratio: Column = np.broadcast_to(_slowness(devices, few, equation), first.shape)[place]
    return ratio


def _slowness(devices: Devices, shape: AttentionShape, equation: Callable[[Column], Column]) -> Column:
    """Return :func:`slowness`: linear, in logarithms, in the width between two measured head widths."""
    tables = _widths(devices.measured_as, latent=shape.latent)
    width = shape.widths[0]
    high = next((one for one in tables if one.widths[0] >= width), tables[-1])
    if high is tables[0] or high.widths[0] <= width:
        ratio = _ratio(high, tables, shape, equation)
        narrow = not shape.latent and high.widths[0] > width
        return ratio * _narrow_slowness(high, shape, equation) if narrow else ratio
    low = tables[tables.index(high) - 1]
    share = np.log(width / low.widths[0]) / np.log(high.widths[0] / low.widths[0])
    first, second = (np.log(_ratio(one, tables, shape, equation)) for one in (low, high))
    between: Column = np.exp((1.0 - share) * first + share * second)
    return between


def origin(devices: Devices, shape: AttentionShape, *, wanted: str, backward: bool) -> PriceOrigin:
    """Return where a price comes from; ``wanted`` is the generation of the code base's kernel."""
    if not covers(devices, wanted, 2, latent=shape.latent):
        return PriceOrigin("assumed", "a share of the peak rate")
    tables = _widths(devices.measured_as, latent=shape.latent)
    names = [one for one in tables if one.widths == shape.widths]
    entry = entries("attention")[(names or list(tables))[0].names[0]]
    ratios = []
    if devices.measured_as != devices.accelerator:
        ratios.append(f"rate of {devices.accelerator} relative to {devices.measured_as}")
    if devices.sustained_share < 1.0:
        ratios.append(f"clocks of a whole step, {devices.sustained_share:g}")
    if backward:
        ratios.append(f"2.5 times the FLOPs at {BACKWARD_RATE:g} of the rate")
    if generation(devices, latent=shape.latent) == FLASH3 and wanted == FLASH2:
        ratios.append("slower generation of the kernel")
    if not names:
        ratios.append("other width of heads")
    inside = grid("attention", (names or list(tables))[0].names[0])
    assert inside is not None
    if not np.all(inside.contains(shape.length, shape.heads)):
        ratios.append("beyond the measured lengths or heads")
    text = f"{entry['kernel']} of {entry['framework']} on {entry['device']}, {entry['source']}"
    if ratios:
        return PriceOrigin("scaled", f"{text}; scaled by: {', '.join(ratios)}")
    at_point = all(
        bool(np.all(np.isin(column, values)))
        for column, values in zip((shape.length, shape.heads), inside.axes.values(), strict=True)
    )
    full = shape.window is None or shape.window in names[0].names
    return PriceOrigin("measured" if at_point and full else "interpolated", text)


@cache
def _names(device: str) -> tuple[tuple[str, str, str], ...]:
    """Return (kernel, width, window) of each table of a device."""
    parts = (name.split("/") for name in entries("attention") if name.startswith(f"{device}/"))
    return tuple((kernel, width, window) for _, _, kernel, width, window in parts)


def _kernel(device: str, *, latent: bool) -> str:
    return next(kernel for kernel, width, _ in _names(device) if ("+" in width) is latent)


@cache
def _widths(device: str, *, latent: bool) -> tuple[_Width, ...]:
    """Return a device's tables, by ascending head width."""
    if not device:
        return ()
    by_width: dict[str, dict[int, str]] = {}
    for kernel, width, window in _names(device):
        if ("+" in width) is latent:
            keys = 0 if window == "all" else int(window)
            by_width.setdefault(width, {})[keys] = f"{device}/bf16/{kernel}/{width}/{window}"
    every = []
    for width, names in by_width.items():
        sides = [int(side) for side in width.split("+")]
        every.append(_Width((sides[0], sides[-1]), names))
    return tuple(sorted(every, key=lambda one: one.widths))


def _ratio(
    one: _Width, tables: tuple[_Width, ...], shape: AttentionShape, equation: Callable[[Column], Column]
) -> Column:
    """Return measured seconds with one head width divided by the equation's, at the nearest measured shapes."""
    full = one.grid(0)
    length, heads = full.clipped(shape.length, shape.heads)
    window = shape.window
    seconds: Column = full.seconds(length, heads)
    if window is not None:
        seconds = _windowed_s(one, tables, window, length, heads)
    ratio: Column = seconds / equation(2.0 * heads * length * _keys(length, window) * sum(one.widths))
    return ratio


def _narrow_slowness(measured: _Width, shape: AttentionShape, equation: Callable[[Column], Column]) -> Column:
    """Return the slowness of heads that are narrower than the narrowest measured ones, relative to these."""
    width, least = shape.widths[0], min(_NARROWEST, measured.widths[0])
    slower = float((measured.widths[0] / max(width, least)) ** _NARROW_POWER)
    if width >= least:
        return slower
    # They take the seconds of wider heads, of which the start of the kernel is a part.
    length, heads = measured.grid(0).clipped(shape.length, shape.heads)
    work = 2.0 * heads * length * _keys(length, shape.window) * sum(shape.widths)
    return slower * equation(work * (least / width)) / equation(work)


def _windowed_s(one: _Width, tables: tuple[_Width, ...], window: int, length: Column, heads: Column) -> Column:
    """Return a kernel's seconds with a window.

    Between measured windows, and from the largest one to all keys, seconds are linear in the number of keys that a
    query sees on average; below the smallest one they are constant, as kernels work in tiles of so many keys.
    """
    mean, every = _keys(length, window), _keys(length, None)
    seconds = upper_s = one.grid(0).seconds(length, heads)
    knots = _windows(one, tables)
    if not knots:
        return seconds * np.where(mean < every, (mean + _MASKED_KEYS) / (every + _MASKED_KEYS), 1.0)
    upper_keys = every
    for keys, source in reversed(knots):
        slower = one.grid(0).seconds(*_LARGE) / source.grid(0).seconds(*_LARGE)
        lower_s = np.minimum(source.grid(keys).seconds(length, heads) * slower, upper_s)
        lower_keys = _keys(length, keys)
        part = (upper_keys - mean) / np.maximum(upper_keys - lower_keys, 1e-9)
        seconds = seconds - (upper_s - lower_s) * np.clip(part, 0.0, 1.0)
        upper_s, upper_keys = lower_s, lower_keys
    return seconds


def _windows(one: _Width, tables: tuple[_Width, ...]) -> list[tuple[int, _Width]]:
    """Return the measured windows, ascending, each with the width that was measured.

    A width has its measured windows; smaller ones, or all if it has none, come from the nearest width that has them,
    times the ratio of both widths' seconds for large work.
    """
    mine = [window for window in one.names if window]
    chosen = dict.fromkeys(mine, one)
    for other in sorted(tables, key=lambda other: abs(np.log(other.widths[0] / one.widths[0]))):
        for window in other.names:
            if window and window not in chosen and window < min(mine, default=window + 1):
                chosen[window] = other
    return sorted(chosen.items(), key=lambda each: each[0])


def _keys(length: Column, window: int | None) -> Column:
    """Return how many keys a causal query sees on average."""
    seen = length if window is None else np.minimum(length, window)
    return seen - seen * seen / (2.0 * length)
