"""Matrix products of a layer: their sizes on a rank, and the seconds of all of them in a pass."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from partool.cost import tensor_shares
from partool.cost.case import Column, Layouts
from partool.cost.kinds import Kind
from partool.cost.silicon.products import TRANSPOSED
from partool.cost.time import tensor as tensor_time
from partool.cost.time.experts import experts_s
from partool.cost.time.gemm import elements_s, matmul_s
from partool.cost.traffic.messages import tokens
from partool.spec.model import ModelConfig
from partool.work.base import Workload


class Product(NamedTuple):
    """A dense product of a layer over all tokens, on the tensor rank with the largest part of it."""

    n: Column
    """Output width."""
    k: Column
    """Input width."""
    place: Literal["first", "second", "whole", "down"]
    """``first`` or ``second`` matrix of a pair, sharded by columns or rows; ``whole``: every rank computes all of
    it; ``down``: every rank has the matrix, and multiplies the tokens that its norms work on."""
    parts: int = 1
    """Number of products of one input that it stands for."""


def products(model: ModelConfig, layouts: Layouts, moe: bool) -> list[Product]:
    """Return a layer's dense products over all tokens."""
    ranks = tensor_shares.outer(layouts)
    hidden = tensor_shares.width(model.hidden, layouts.tensor_inner)
    queries, keys = tensor_shares.heads(model, ranks)
    mla = model.mla
    if mla:
        query = queries * (mla.nope_head_dim + mla.rope_head_dim)
        layer_products: list[Product] = []
        if mla.q_rank is None:
            layer_products.append(Product(query, hidden, "first"))
        else:
            layer_products += [Product(mla.q_rank, hidden, "down"), Product(query, mla.q_rank, "first")]
        layer_products.append(Product(mla.kv_rank + mla.rope_head_dim, hidden, "down"))
        layer_products.append(Product(queries * (mla.nope_head_dim + mla.v_head_dim), mla.kv_rank, "first"))
        layer_products.append(Product(hidden, queries * mla.v_head_dim, "second"))
    else:
        query, key = queries * model.head_dim, keys * model.head_dim
        layer_products = [Product(query + 2 * key, hidden, "first", 3), Product(hidden, query, "second")]
    width = model.ffn_hidden
    if moe and model.moe:
        layer_products.append(Product(model.moe.experts, hidden, "whole"))
        if model.moe.residual:
            layer_products.append(Product(2, hidden, "whole"))
        width = model.moe.shared_experts * model.moe.ffn_hidden
    if width:
        inner = tensor_shares.width(width, ranks)
        gates = 1 + model.gated
        layer_products += [Product(gates * inner, hidden, "first", gates), Product(hidden, inner, "second")]
    return layer_products


def forward_s(job: Workload, layouts: Layouts, kind: Kind) -> tuple[Column, Column]:
    """Return the seconds of all products in a layer's forward pass, and of only the second products of pairs."""
    rows, pieces = tokens(job, layouts), tensor_time.pieces_sent(layouts)
    total: Column = 0.0
    second: Column = 0.0
    for n, k, place, parts in products(job.model, layouts, kind.moe):
        if place == "second":
            each = pieces * matmul_s(job, rows / pieces, n, k)
            total, second = total + each, second + each
        else:
            local_rows = rows / _sharers(layouts, place)
            total = total + matmul_s(job, local_rows, n, k) + _read_again_s(job, layouts, parts, local_rows * k)
    if kind.moe:
        total = total + experts_s(job, layouts, rows)[0]
    return total, second


def backward_s(job: Workload, layouts: Layouts, kind: Kind) -> tuple[Column, Column, Column]:
    """Return the seconds of inputs' gradients [m, k] = [m, n] × [n, k] and weights' gradients [n, k] = [n, m] × [m, k].

    The third value is the seconds of the weight gradients of the first matrices of pairs.
    """
    rows = tokens(job, layouts)
    inputs: Column = 0.0
    weights: Column = 0.0
    first: Column = 0.0
    for n, k, place, parts in products(job.model, layouts, kind.moe):
        local_rows = rows / _sharers(layouts, place)
        read_s = _read_again_s(job, layouts, parts, local_rows * k)
        weight = TRANSPOSED * matmul_s(job, n, k, local_rows) + read_s
        inputs, weights = inputs + matmul_s(job, local_rows, k, n) + read_s, weights + weight
        first = first + (weight if place == "first" else 0.0)
    if kind.moe:
        _, of_inputs, of_weights = experts_s(job, layouts, rows)
        inputs, weights = inputs + of_inputs, weights + of_weights
    return inputs, weights, first


def _read_again_s(job: Workload, layouts: Layouts, parts: int, elements: Column) -> Column:
    """Return the additional seconds of a CPU for ``parts`` products of one input, which each reads by itself.

    Backward, each writes a gradient of the input. With tensor ranks they are one product.
    """
    if parts == 1 or job.devices.product_element_s is None:
        return 0.0
    return elements_s(job, np.where(np.asarray(layouts.tp) > 1, 0, parts - 1) * elements)


def _sharers(layouts: Layouts, place: str) -> Column:
    """Return the number of tensor ranks among which the tokens of a product are divided."""
    return np.where(np.asarray(layouts.sequence_norms) == 1, layouts.tp, 1) if place == "down" else 1


def last_product_share(model: ModelConfig) -> float:
    """Return the share of a dense layer's forward products that its last product takes, by weights."""
    heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
    return model.ffn_hidden / (heads + (2 + model.gated) * model.ffn_hidden)
