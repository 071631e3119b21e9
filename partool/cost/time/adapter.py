"""Seconds that an adapter adds to a pass of a layer: its products, and the sums with those of the frozen matrices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts
from partool.cost.silicon.products import TRANSPOSED
from partool.cost.time.elementwise import stream_bytes_per_s
from partool.cost.time.gemm import matmul_s
from partool.cost.traffic.messages import tokens
from partool.layout.adapters import is_target
from partool.layout.parameters import layer_parameters, projection_of
from partool.spec.model import ModelConfig
from partool.work.base import Workload

_FORWARD, _BACKWARD = 4, 7
"""Operators per projection: A x, its scale, B (A x) and the sum; backward two products for each of A and B, the scale,
and two sums of gradients (``partool_runtime/model/adapter.py``)."""
_OF_NORMS_FORWARD, _OF_NORMS_BACKWARD = 14, 4
"""Operators that DoRA adds per projection: the norms of rows, their quotient and the product with it; backward the
gradients of that product."""


_HASH_PASSES = 12
"""Passes over a mask that make hashes of 32 bits and compare them (``runtime/partool_runtime/hashing.py``)."""


class Added(NamedTuple):
    """What an adapter adds to a pass; each field is a column."""

    matmul_s: Column = 0.0
    elementwise_s: Column = 0.0
    operators: Column = 0.0


class _Target(NamedTuple):
    rows: int
    columns: int
    cut: bool
    """True if tensor ranks hold parts of the columns, False if of the rows."""
    share: float
    """Products per token: 1, or of an expert its share of the tokens times the number of experts."""
    present: float
    """Share of the layers that have it."""


def added(job: Workload, layouts: Layouts, moe: bool, *, backward: bool) -> Added:
    """Return what the adapter adds to a pass of a layer, with experts or without; zeros without an adapter.

    A backward pass multiplies by A and B as the forward pass does, and computes the gradients of both.
    """
    adapter = job.model.adapter
    if adapter is None:
        return Added()
    rank, ranks, every = adapter.rank, tensor_shares.outer(layouts), tokens(job, layouts)
    matmul: Column = 0.0
    moved: Column = 0.0
    operators: Column = 0.0
    for target in _targets(job.model, moe):
        out = target.rows if target.cut else tensor_shares.width(target.rows, ranks)
        into = tensor_shares.width(target.columns, ranks) if target.cut else target.columns
        rows = target.share * every
        products = matmul_s(job, rows, rank, into) + matmul_s(job, rows, out, rank)
        if backward:
            products = TRANSPOSED * (matmul_s(job, rank, into, rows) + matmul_s(job, out, rank, rows)) + (
                matmul_s(job, rows, into, rank) + matmul_s(job, rows, rank, out)
            )
        width = into if backward else out
        dropout: Column = _masked(job, layouts) * into if adapter.dropout else 0.0
        count: Column = _BACKWARD if backward else _FORWARD
        elements = rows * (3.0 * width + dropout + 2.0 * rank)
        if adapter.kind == "dora":
            norms = _norms(job, rows, out, into, backward=backward)
            products, elements = products + norms.matmul_s, elements + norms.elements
            count = count + norms.operators
        matmul = matmul + target.present * products
        moved = moved + target.present * elements
        operators = operators + target.present * count
    bytes_moved = moved * job.compute_bytes
    return Added(matmul, bytes_moved / stream_bytes_per_s(job), operators + 0.0 * np.asarray(layouts.tp))


def _masked(job: Workload, layouts: Layouts) -> Column:
    """Return how many elements are moved for each that dropout looks at.

    Compiled, a mask is computed where it is used. Otherwise hashes of 32 bits are made in passes of their own.
    """
    hashes = 2.0 * _HASH_PASSES * 4 / job.compute_bytes
    return np.where(np.asarray(layouts.compiled) == 1, 2.0, 2.0 + hashes)


class _Norms(NamedTuple):
    """What DoRA adds to a pass of a projection."""

    matmul_s: Column
    elements: Column
    """Number of elements that are read and written."""
    operators: int


def _norms(job: Workload, rows: Column, out: Column, into: Column, *, backward: bool) -> _Norms:
    """Return what DoRA adds: the norms read W and multiply it by A, and the result is scaled, row by row of W.

    Backward the gradient is scaled, and multiplied by the result for the magnitudes' gradients. Under dropout, W is
    multiplied by what is left of the input, too.
    """
    adapter = job.model.adapter
    assert adapter is not None, "no adapter"
    dropped_product_s = matmul_s(job, rows, into, out) if backward else matmul_s(job, rows, out, into)
    dropped: Column = dropped_product_s if adapter.dropout else 0.0
    if backward:
        return _Norms(dropped, 4.0 * rows * out, _OF_NORMS_BACKWARD)
    return _Norms(dropped + matmul_s(job, adapter.rank, out, into), out * into + 2.0 * rows * out, _OF_NORMS_FORWARD)


def saved_per_token(job: Workload, layouts: Layouts, moe: bool, *, products: bool) -> Column:
    """Return the bytes per token that a layer keeps for its adapter's gradients, beside what other gradients read.

    These are A x, and with dropout the input that is left and the mask; with ``products``, the results of B, too. DoRA
    keeps the results before they are scaled; with dropout there are two of them.
    """
    adapter = job.model.adapter
    if adapter is None:
        return 0.0
    ranks = tensor_shares.outer(layouts)
    total: Column = 0.0
    for target in _targets(job.model, moe):
        into = tensor_shares.width(target.columns, ranks) if target.cut else target.columns
        dropped = into * (job.compute_bytes + 1) if adapter.dropout else 0.0
        out = target.rows if target.cut else tensor_shares.width(target.rows, ranks)
        kept = (adapter.rank + (out if products else 0.0)) * job.compute_bytes
        if adapter.kind == "dora" and (adapter.dropout or not products):
            kept = kept + out * job.compute_bytes * (2.0 if adapter.dropout else 1.0)
        total = total + target.present * target.share * (kept + (0.0 if products else dropped))
    return total


def norm_sums(model: ModelConfig, moe: bool) -> float:
    """Return how many projections of a layer have DoRA's norms over columns, which tensor ranks share."""
    if model.adapter is None or model.adapter.kind != "dora":
        return 0.0
    return sum(target.present for target in _targets(model, moe) if target.cut)


def adapts_inputs(model: ModelConfig) -> bool:
    """Return True if projections of a layer's inputs, of which tensor ranks hold rows, have adapters."""
    kinds = {model.is_moe_layer(layer) for layer in range(model.layers)}
    return model.adapter is not None and any(not target.cut for moe in kinds for target in _targets(model, moe))


@lru_cache(maxsize=64)
def _targets(model: ModelConfig, moe: bool) -> tuple[_Target, ...]:
    """Return the projections with an adapter of layers with experts, or of the others."""
    layers = [layer for layer in range(model.layers) if model.is_moe_layer(layer) == moe]
    counts: dict[_Target, int] = {}
    for layer in layers:
        for target in _of_layer(model, layer):
            counts[target] = counts.get(target, 0) + 1
    return tuple(target._replace(present=count / len(layers)) for target, count in counts.items())


def _of_layer(model: ModelConfig, layer: int) -> Iterator[_Target]:
    adapter, moe = model.adapter, model.of_layer(layer).moe
    assert adapter is not None, "no adapter"
    for number, info in enumerate(layer_parameters(model, layer)):
        name = projection_of(info)
        if name is None or not is_target(adapter, name):
            continue
        experts = moe.experts if info.kind == "expert" and moe is not None else 1
        share = float(moe.top_k) if info.kind == "expert" and moe is not None else 1.0
        cut = name.rpartition(".")[2] in ("o", "down")
        # ``present`` tells targets of equal sizes apart until they are counted.
        yield _Target(info.shape[0] // experts, info.shape[1], cut, share, float(number))
