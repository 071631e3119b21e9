"""Frozen matrices of projections that are stored in 4 or 8 bits.

A projection's ``stored`` says how its matrix is stored; None means as a parameter ``weight``. In few bits, ``codes``
and ``absmax`` are parameters in its place: sharding, gathering and offload treat them as all others, and move few
bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import nn

from partool.layout.quantised import ABSMAX, CODES, NF4_BLOCK, SECONDS, stored_tensors
from partool.spec.adapter import LowRank
from partool_kernels.quantised.codes import PartPlace, RowCodes, quantise_int8, quantise_nf4, unpacked
from partool_kernels.quantised.op import Stored, dequantise, grouped, linear
from partool_runtime.model.moe import Stacked
from partool_runtime.model.projection import Linear
from partool_runtime.pieces import local_part, local_rows
from partool_runtime.placement import Placement, full_placement


class StoredPart(NamedTuple):
    """Values of a rank's part of a matrix, with their place in those of the whole matrix."""

    name: str
    values: torch.Tensor
    placement: Placement


@dataclass(frozen=True)
class QuantisedMatrix:
    """How a rank stores its part of a frozen matrix; the tensors belong to a module, which sharding may change."""

    adapter: LowRank
    placement: Placement
    """The part's place in the whole matrix ``[O, I]``."""
    dtype: torch.dtype
    """Type of the matrix before it is quantised."""

    @property
    def four_bits(self) -> bool:
        """Whether two codes share a byte."""
        return self.adapter.base == "nf4"

    @property
    def doubled(self) -> bool:
        """Whether the scales have scales of their own."""
        return self.four_bits and self.adapter.double_quant

    @cached_property
    def place(self) -> PartPlace:
        """The part's place, as operators take it."""
        rows, columns = self.placement.spans
        return PartPlace(self.placement.shape[1], columns[0] if columns else (0, 0), rows)

    @cached_property
    def _numbers_of_place(self) -> tuple[int, ...]:
        return tuple(self.place.flat())

    @property
    def quantise(self) -> Callable[[torch.Tensor], RowCodes]:
        """The function from rows of the matrix to codes and scales."""
        return quantise_nf4 if self.four_bits else quantise_int8

    def of(self, module: nn.Module) -> Stored:
        """Return the part as operators take it."""
        codes, absmax, seconds = (cast(torch.Tensor, getattr(module, name)) for name in (CODES, ABSMAX, SECONDS))
        return Stored(codes, absmax, seconds, self._numbers_of_place)

    def linear(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Return ``x [..., I]`` times the part's transpose."""
        return linear(x, self.of(module))

    def grouped(self, rows_RI: torch.Tensor, module: nn.Module, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the product of each row with its expert's matrix."""
        return grouped(rows_RI, self.of(module), ends_E)

    def numbers(self, module: nn.Module) -> torch.Tensor:
        """Return the part ``[O, I]`` as numbers in the type of computation."""
        return dequantise(self.of(module), self.dtype)

    @property
    def columns(self) -> tuple[slice, slice]:
        """The part's columns among the whole matrix's codes, and among its scales."""
        return slice(*self.place.columns), slice(*self.place.blocks) if self.four_bits else slice(0, 1)

    def parts(self, module: nn.Module) -> Iterator[StoredPart]:
        """Yield the codes, a byte each, and the scales; of ranks that share a scale, the first has it."""
        codes, absmax, seconds = (local_part(tensor) for tensor in self.of(module)[:3])
        rows = self.rows(module)
        (start, stop), first = self.place.columns, 0
        blocks = (0, 1)
        if self.four_bits:
            codes = unpacked(codes, stop - start)
            first = int(start % NF4_BLOCK > 0)
            blocks = self.place.blocks[0] + first, self.place.blocks[1]
        shapes = {tensor.name: tensor.shape for tensor in stored_tensors(self.adapter, self.placement.shape)}
        yield StoredPart(CODES, codes, Placement(self.placement.shape, (rows, ((start, stop),))))
        yield StoredPart(ABSMAX, absmax[:, first:], Placement(shapes[ABSMAX], (rows, (blocks,))))
        if self.doubled:
            yield StoredPart(SECONDS, seconds, full_placement(shapes[SECONDS]))

    def rows(self, module: nn.Module) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the whole matrix's rows that this rank holds, without those of other data ranks."""
        local = local_rows(cast(torch.Tensor, getattr(module, CODES)))
        return tuple((box.offsets[0], box.offsets[0] + box.sizes[0]) for box in self._one_column().boxes(local))

    def _one_column(self) -> Placement:
        return Placement((self.placement.shape[0], 1), (self.placement.spans[0], ((0, 1),)))


def store(
    module: Linear | Stacked, adapter: LowRank, placement: Placement | None, *, dtype: torch.dtype
) -> QuantisedMatrix:
    """Replace a module's frozen weight by parameters of few bits, in place; they have the weight's device.

    ``placement`` is the weight's, None for a whole matrix; ``dtype`` is the type of its values before.
    """
    weight = module.weight
    matrix = QuantisedMatrix(adapter, placement or full_placement(weight.shape), dtype)
    assert len(matrix.placement.spans[1]) <= 1, "columns that are not consecutive"
    codes, absmax = ((each.stop - each.start) for each in matrix.columns)
    sizes = {CODES: -(-codes // 2) if matrix.four_bits else codes, ABSMAX: absmax}
    del module.weight
    module.register_buffer(SECONDS, torch.empty(0), persistent=False)
    for tensor in stored_tensors(adapter, matrix.placement.shape):
        if tensor.name == SECONDS:
            module.register_buffer(SECONDS, torch.full(tensor.shape, torch.nan), persistent=False)
            continue
        kind = _TYPES[tensor.integers, tensor.name == CODES and not matrix.four_bits]
        empty = torch.empty(len(weight), sizes[tensor.name], dtype=kind, device=weight.device)
        module.register_parameter(tensor.name, nn.Parameter(empty, requires_grad=False))
    module.stored = matrix
    return matrix


_TYPES = {(False, False): torch.float32, (True, False): torch.uint8, (True, True): torch.int8}
"""Types of tensors by whether their elements are integers, and whether these have a sign."""
