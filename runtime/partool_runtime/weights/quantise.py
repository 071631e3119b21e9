"""Quantises a source of weights into the codes and scales that a rank holds.

Whole rows are read, so that every layout has the same codes. Scales that have scales of their own depend on all rows:
each rank computes them, which needs a pass over the whole matrix, but only the memory of a few rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from partool_kernels.quantised.codes import RowCodes, packed, quantise_scales
from partool_runtime.errors import ConfigurationError
from partool_runtime.model.stored import QuantisedMatrix
from partool_runtime.pieces import local_part
from partool_runtime.weights.draw import BlockSource, block_rows

_ROW_ELEMENTS = 2**20
"""Maximum number of elements that are quantised at a time."""


def fill_matrix(name: str, module: nn.Module, matrix: QuantisedMatrix, source: BlockSource) -> None:
    """Fill a rank's part of the matrix ``name``; raises ConfigurationError PT622 for values that are not finite."""
    stored, scales = matrix.of(module), None
    if matrix.doubled:
        every = range(matrix.placement.shape[0])
        absmax = torch.cat([block.absmax for _, block in _quantised(name, matrix, source, every)])
        with _one_thread():
            scales, seconds = quantise_scales(absmax)
        stored.seconds.copy_(seconds)
    targets, at = (local_part(stored.codes), local_part(stored.absmax)), 0
    for start, stop in matrix.rows(module):
        for first, (codes, absmax) in _quantised(name, matrix, source, range(start, stop)):
            kept = absmax if scales is None else scales[first : first + len(codes)]
            rows = slice(at, at + len(codes))
            of_codes, of_scales = codes[:, matrix.columns[0]], kept[:, matrix.columns[1]]
            targets[0][rows].copy_(packed(of_codes) if matrix.four_bits else of_codes)
            targets[1][rows].copy_(of_scales)
            at = rows.stop


def _quantised(name: str, matrix: QuantisedMatrix, source: BlockSource, rows: range) -> Iterator[tuple[int, RowCodes]]:
    """Yield the first row and the codes and scales of consecutive rows of the whole matrix."""
    shape = matrix.placement.shape
    step = block_rows(shape) * max(1, _ROW_ELEMENTS // (block_rows(shape) * max(1, shape[1])))
    # Steps end at multiples of drawn blocks, so that no block is drawn twice.
    for begin in range(rows.start - rows.start % step, rows.stop, step):
        first, stop = max(begin, rows.start), min(begin + step, rows.stop)
        block = source(name, shape, (first, 0), (stop - first, shape[1])).to(matrix.dtype)
        quantised = matrix.quantise(block)
        if not bool(quantised.absmax.isfinite().all()):
            raise ConfigurationError("PT622", f"the weights hold values that are not finite: {name}")
        yield first, quantised


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute with one thread within the context: sums of several threads differ in the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
