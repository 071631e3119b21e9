"""What it costs to make numbers of frozen matrices in few bits, which each pass does anew."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts
from partool.cost.time.elementwise import stream_bytes_per_s
from partool.layout.parameters import layer_parameters
from partool.layout.quantised import FewBits, is_quantised, stored_bytes
from partool.spec.model import ModelConfig
from partool.work.base import Workload

_HOST_ELEMENTS_PER_S = 1.3e9
"""Elements that a thread of the compiled library converts per second: 4 bits to bf16, on an EPYC with AVX2
(``partool_kernels/cpu/quantised.h``; median of 7 on a matrix of 2,048 × 2,048)."""
_OPERATORS, _DOUBLE_OPERATORS = 2, 10
"""Operators per matrix: the conversion and what calls it, with double quantisation also those that make the scales
(``partool_kernels/quantised/codes.py``)."""


class Converted(NamedTuple):
    """What a pass of a layer converts; each field is a column."""

    seconds: Column = 0.0
    operators: Column = 0.0


class _Matrices(NamedTuple):
    """Sizes of a layer's matrices in few bits: those outside of experts, and those of experts."""

    elements: tuple[float, float]
    size_bytes: tuple[float, float]
    largest: tuple[float, float]
    """Elements of the largest of them."""
    number: float


def converted(job: Workload, layouts: Layouts, moe: bool) -> Converted:
    """Return what the forward or backward pass of a layer converts; nothing without matrices in few bits."""
    few_bits = job.few_bits
    if few_bits is None:
        return Converted()
    of = _matrices(job.model, few_bits, moe)
    elements, read_bytes = _on_rank(layouts, of.elements), _on_rank(layouts, of.size_bytes)
    seconds = (read_bytes + job.compute_bytes * elements) / stream_bytes_per_s(job)
    if job.devices.backend == "cpu":
        seconds = np.maximum(seconds, elements / _HOST_ELEMENTS_PER_S)
    doubled = few_bits.adapter.base == "nf4" and few_bits.adapter.double_quant
    operators = of.number * (_OPERATORS + doubled * _DOUBLE_OPERATORS)
    return Converted(seconds, operators + 0.0 * np.asarray(layouts.tp))


def numbers_bytes(job: Workload, layouts: Layouts) -> Column:
    """Return the bytes of the largest matrix as numbers, which a product holds beside its codes."""
    if job.few_bits is None:
        return 0.0
    largest: Column = 0.0
    for moe in {job.model.is_moe_layer(layer) for layer in range(job.model.layers)}:
        dense, expert = _matrices(job.model, job.few_bits, moe).largest
        largest = np.maximum(largest, np.maximum(_on_rank(layouts, (dense, 0.0)), _on_rank(layouts, (0.0, expert))))
    return job.compute_bytes * largest


def _on_rank(layouts: Layouts, sizes: tuple[float, float]) -> Column:
    """Return a rank's part of sizes outside of experts and of experts, which expert ranks or tensor ranks share."""
    outer = tensor_shares.outer(layouts)
    shared = np.where(np.asarray(layouts.ep) > 1, layouts.ep * np.asarray(layouts.etp), outer)
    return sizes[0] / outer + sizes[1] / shared


@lru_cache(maxsize=64)
def _matrices(model: ModelConfig, few_bits: FewBits, moe: bool) -> _Matrices:
    """Return the matrices of the layers with experts, or of the others: means over these layers."""
    layers = [layer for layer in range(model.layers) if model.is_moe_layer(layer) == moe]
    elements, size_bytes, largest, number = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0
    for layer in layers:
        for info in layer_parameters(model, layer):
            if is_quantised(info, few_bits.adapter, few_bits.frozen):
                kind = int(info.kind == "expert")
                elements[kind] += info.elements
                size_bytes[kind] += stored_bytes(few_bits.adapter, info.shape)
                largest[kind] = max(largest[kind], info.elements)
                number += 1
    many = max(len(layers), 1)
    return _Matrices(
        (elements[0] / many, elements[1] / many), (size_bytes[0] / many, size_bytes[1] / many),
        (largest[0], largest[1]), number / many,
    )  # fmt: skip
