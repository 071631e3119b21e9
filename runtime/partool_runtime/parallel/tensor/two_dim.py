"""Hooks in layers and norms of partool's decoder for two-dimensional tensor parallelism (ATP, arXiv 2301.08658).

The hidden state is ``[B, S, H/d2]`` everywhere between embedding and head. Attention heads are distributed over all
ranks.
Parameters must already be the rank's parts (:mod:`partool.layout.tensor.own`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from partool.plan.layout import Layout
from partool_runtime.mesh import Ranks
from partool_runtime.model import Block, Decoder, DecoderParts
from partool_runtime.model.attention import SelfAttention
from partool_runtime.model.ffn import FeedForward
from partool_runtime.model.norm import RMSNorm, wide_dtype
from partool_runtime.parallel.tensor.two_dim_comm import Axis
from partool_runtime.parallel.tensor.two_dim_ops import Grid, first_products, inner_sum, second_product


def grid_of(layout: Layout, ranks: Ranks) -> Grid:
    """Return the grid of this rank; a collective of all ranks of the world."""
    outer, inner = (
        Axis(group.group_name if (group := ranks.groups.of(axis.parts)) else "", axis.size, axis.place)
        for axis in (ranks.tp0, ranks.tp1)
    )
    return Grid(outer, inner, layout.tensor.chunks, overlap=layout.tensor.overlap == "backward")


def put_products(model: Decoder | DecoderParts, grid: Grid) -> None:
    """Make the layers and norms of a decoder, or of a pipeline rank's stages, work in two dimensions, in place.

    Only functions of modules are replaced: modules and names of parameters stay as they are.
    """
    for block in _blocks(model):
        put_norm(block.attention_norm, grid)
        put_norm(block.ffn_norm, grid)
        _put(block.attention, "inputs", _attention_inputs, grid)
        _put(block.attention, "output", _attention_output, grid)
        _put(block.ffn, "inputs", _ffn_inputs, grid)
        _put(block.ffn, "output", _ffn_output, grid)
    if model.final_norm is not None:
        put_norm(model.final_norm, grid)


def put_norm(norm: nn.Module, grid: Grid) -> None:
    """Make a norm compute its statistics over the widths of all inner ranks."""
    _put(norm, "forward", _rms_norm if isinstance(norm, RMSNorm) else _layer_norm, grid)


def _put(module: Any, name: str, function: Callable[..., Any], grid: Grid) -> None:
    # A function, as torch.compile treats each partial as a different function, and recompiles layers until it gives up.
    def hook(x: torch.Tensor) -> Any:
        return function(module, grid, x)

    setattr(module, name, hook)


def _blocks(model: Decoder | DecoderParts) -> Iterator[Block]:
    return (cast(Block, block) for _, block in model.blocks())


def _attention_inputs(module: SelfAttention, grid: Grid, x_BSH: torch.Tensor) -> tuple[torch.Tensor, ...]:
    linears = (module.q, module.k, module.v)
    heads = first_products(grid, x_BSH, [linear.weight for linear in linears], deal=True)
    return _biased(heads, linears)


def _attention_output(module: SelfAttention, grid: Grid, heads_BSX: torch.Tensor) -> torch.Tensor:
    return _biased((second_product(grid, heads_BSX, module.o.weight, dealt=True),), (module.o,))[0]


def _ffn_inputs(module: FeedForward, grid: Grid, x_BSH: torch.Tensor) -> tuple[torch.Tensor, ...]:
    linears = (module.gate, module.up) if module.gated else (module.up,)
    return _biased(first_products(grid, x_BSH, [linear.weight for linear in linears], deal=False), linears)


def _ffn_output(module: FeedForward, grid: Grid, inner_BSF: torch.Tensor) -> torch.Tensor:
    return _biased((second_product(grid, inner_BSF, module.down.weight, dealt=False),), (module.down,))[0]


def _biased(sums: tuple[torch.Tensor, ...], linears: tuple[nn.Linear, ...]) -> tuple[torch.Tensor, ...]:
    """Add biases to products that are already summed over ranks."""
    return tuple(x if linear.bias is None else x + linear.bias for x, linear in zip(sums, linears, strict=True))


def _rms_norm(module: RMSNorm, grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    wide = x_BSH.to(wide_dtype(x_BSH.dtype))
    scale = torch.rsqrt(_mean(grid, wide.square()) + module.eps)
    return (wide * scale).to(x_BSH.dtype) * module.weight


def _layer_norm(module: nn.LayerNorm, grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    wide = x_BSH.to(wide_dtype(x_BSH.dtype))
    # The variance uses centred values: E[x²] - E[x]² as a difference of two large numbers would lose digits.
    centred = wide - _mean(grid, wide)
    scale = torch.rsqrt(_mean(grid, centred.square()) + module.eps)
    return (centred * scale * module.weight + module.bias).to(x_BSH.dtype)


def _mean(grid: Grid, x_BSH: torch.Tensor) -> torch.Tensor:
    """Return the mean over all inner ranks' widths, ``[B, S, 1]``."""
    return inner_sum(grid, x_BSH.sum(-1, keepdim=True)) / (x_BSH.shape[-1] * grid.inner.size)
