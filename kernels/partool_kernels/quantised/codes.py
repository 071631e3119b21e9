"""Codes of quantised matrices: how a matrix becomes codes and scales, and the reference of the way back.

nf4 (Dettmers et al., QLoRA, arXiv 2305.14314, section 3 and appendix E): each row is divided into blocks of 64
elements, of which the last may be shorter. A block is divided by its largest magnitude, and each element becomes the
nearest of 16 numbers, the quantiles of a normal distribution. Double quantisation stores the magnitudes less their mean
in 8 bits, in blocks of 256 over all rows.

int8 (Dettmers et al., LLM.int8(), arXiv 2208.07339, section 3.1): a row is divided by its largest magnitude, and its
elements become the nearest of -127 to 127.

Codes and scales have the bits of bitsandbytes 0.50 on the CPU. A matrix whose width is no multiple of 64 has those of
its rows, each quantised by itself: bitsandbytes lets blocks continue in the next row, where ranks cut matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

NF4_BLOCK = 64
"""Elements of a row that share a scale."""
SCALES_BLOCK = 256
"""Scales that share a scale with double quantisation."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Numbers of the 16 codes (QLoRA, appendix E)."""
_ZERO = 7
"""Code of zero, which fills the last byte of a row of odd length."""
_INT8_STEP = 7.874015718698502e-3
"""1 / 127 in the bits that bitsandbytes multiplies by."""
_LEAST = 1e-38
"""Smallest divisor, for blocks of zeros."""
_EXPONENTS, _PLACES = 7, 65536
"""Powers of ten of the 8-bit numbers, and the number of places between -1 and 1 at which the nearest is looked up."""


class RowCodes(NamedTuple):
    """Rows of a matrix in few bits."""

    codes: torch.Tensor
    """``[rows, columns]``: 0 to 15 in uint8, or int8."""
    absmax: torch.Tensor
    """Largest magnitudes in float32: ``[rows, ceil(columns / 64)]``, for int8 ``[rows, 1]``."""


def quantise_nf4(matrix: torch.Tensor) -> RowCodes:
    """Return a matrix ``[rows, columns]`` in blocks of 4 bits."""
    rows, columns = matrix.shape
    wide = matrix.float()
    full = columns - columns % NF4_BLOCK
    blocks = wide[:, :full].reshape(rows, full // NF4_BLOCK, NF4_BLOCK)
    absmax = blocks.abs().amax(2) if full else wide.new_zeros(rows, 0)
    # bitsandbytes multiplies whole blocks by a reciprocal, and divides a shorter one.
    scaled = (blocks * (1.0 / absmax.clamp(min=_LEAST)).unsqueeze(2)).reshape(rows, full)
    if full < columns:
        rest = wide[:, full:]
        last = rest.abs().amax(1, keepdim=True).clamp(min=_LEAST)
        absmax, scaled = torch.cat([absmax, last], 1), torch.cat([scaled, rest / last], 1)
    numbers = torch.tensor(NF4, dtype=torch.float32, device=matrix.device)
    nearest = torch.bucketize(scaled.clamp(-1.0, 1.0), (numbers[:-1] + numbers[1:]) / 2, out_int32=True)
    return RowCodes(nearest.to(torch.uint8), absmax)


def quantise_int8(matrix: torch.Tensor) -> RowCodes:
    """Return a matrix ``[rows, columns]`` in 8 bits per element and a scale per row."""
    wide = matrix.float()
    absmax = wide.abs().amax(1, keepdim=True)
    codes = torch.round(wide * (127.0 / absmax)).nan_to_num(0.0)  # rows of zeros
    return RowCodes(codes.to(torch.int8), absmax)


class Scales(NamedTuple):
    """Scales of a whole matrix in 8 bits."""

    codes: torch.Tensor
    """uint8, in the shape of the scales."""
    seconds: torch.Tensor
    """float32: the scale of each block of 256 scales, row after row, and behind them the mean of all."""


def quantise_scales(absmax: torch.Tensor) -> Scales:
    """Return the scales of a whole matrix in 8 bits (double quantisation).

    The mean of more than 2¹⁵ scales depends in its last bit on the number of torch's threads: call it with one thread.
    """
    offset = absmax.mean()
    flat = (absmax - offset).flatten()
    blocks = torch.nn.functional.pad(flat, (0, -len(flat) % SCALES_BLOCK)).view(-1, SCALES_BLOCK)
    seconds = blocks.abs().amax(1)
    scaled = blocks * (1.0 / seconds)[:, None]
    places = ((scaled + 1.0) * ((_PLACES - 1) / 2) + 0.5).nan_to_num(0.0).floor().clamp(0, _PLACES - 1)
    codes = _nearest_eight_bit()[places.long()].flatten()[: len(flat)]
    return Scales(codes.view(absmax.shape), torch.cat([seconds, offset[None]]))


@cache
def eight_bit_numbers() -> torch.Tensor:
    """Return the numbers of the 256 codes of scales in ascending order, float32 on the CPU.

    Seven powers of ten, each with 2^i evenly spaced fractions between 0.1 and 1 of both signs, with 0 and 1 (dynamic
    data type, Dettmers, arXiv 1511.04561, section 2.3).
    """
    numbers = [torch.tensor([0.0, 1.0])]
    for power in range(_EXPONENTS):
        edges = torch.linspace(0.1, 1.0, 2**power + 1)
        fractions = 10 ** (power - _EXPONENTS + 1) * ((edges[:-1] + edges[1:]) / 2.0)
        numbers += [fractions, -fractions]
    return torch.cat(numbers).sort().values


@cache
def _nearest_eight_bit() -> torch.Tensor:
    """Return the nearest code at each of 65,536 places from -1 to 1: bitsandbytes looks codes up there."""
    numbers = eight_bit_numbers()
    places = torch.arange(_PLACES).double() / ((_PLACES - 1) / 2) - 1.0
    return torch.bucketize(places.float(), (numbers[:-1] + numbers[1:]) / 2).to(torch.uint8)


class PartPlace(NamedTuple):
    """The part of a matrix that a rank holds: some rows, and some consecutive columns.

    A block that the first or the last column cuts has its scale on both ranks, so that any cut keeps the whole matrix's
    numbers.
    """

    width: int
    """Columns of the whole matrix."""
    columns: tuple[int, int]
    rows: tuple[tuple[int, int], ...]
    """Ranges of rows."""

    @property
    def blocks(self) -> tuple[int, int]:
        """Return the range of a row's blocks of which the part has columns."""
        start, stop = self.columns
        return start // NF4_BLOCK, -(-stop // NF4_BLOCK) if stop > start else start // NF4_BLOCK

    def flat(self) -> list[int]:
        """Return the place as numbers, which operators take."""
        return [self.width, *self.columns, *(edge for span in self.rows for edge in span)]

    @classmethod
    def of_flat(cls, numbers: Sequence[int]) -> PartPlace:
        """Return the place of :meth:`flat`."""
        width, start, stop, *edges = numbers
        return cls(width, (start, stop), tuple(zip(edges[::2], edges[1::2], strict=True)))


def scales_of(absmax: torch.Tensor, seconds: torch.Tensor, place: PartPlace) -> torch.Tensor:
    """Return scales in float32; ``seconds`` without elements means that ``absmax`` has them already."""
    if seconds.numel() == 0 or absmax.numel() == 0:
        return absmax.float()
    device, across = absmax.device, -(-place.width // NF4_BLOCK)
    rows = torch.cat([torch.arange(*span, device=device) for span in place.rows])
    number = rows[:, None] * across + torch.arange(*place.blocks, device=device)
    second = seconds[torch.div(number, SCALES_BLOCK, rounding_mode="floor")]
    return eight_bit_numbers().to(device)[absmax.int()] * second + seconds[-1]


def packed(codes: torch.Tensor) -> torch.Tensor:
    """Return 4-bit codes ``[rows, columns]`` as bytes, the first of two in the higher bits."""
    even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2), value=_ZERO)
    return (even[:, ::2] << 4) | even[:, 1::2]


def unpacked(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the 4-bit codes of :func:`packed`, a byte each."""
    return torch.stack([codes >> 4, codes & 15], 2).flatten(1)[:, :columns]


def reference(codes: torch.Tensor, scales: torch.Tensor, place: PartPlace, dtype: torch.dtype) -> torch.Tensor:
    """Return a part ``[rows, columns]`` of a matrix: products in float32, rounded to ``dtype``."""
    if codes.dtype == torch.int8:
        return (codes * scales * _INT8_STEP).to(dtype)
    columns, skipped = place.columns[1] - place.columns[0], place.columns[0] % NF4_BLOCK
    numbers = torch.tensor(NF4, dtype=torch.float32, device=codes.device)
    widened = scales.repeat_interleave(NF4_BLOCK, 1)[:, skipped : skipped + columns]
    return (numbers[unpacked(codes, columns).int()] * widened).to(dtype)
