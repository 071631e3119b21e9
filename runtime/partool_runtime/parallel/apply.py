"""Applies the plan's layout to a model, step by step in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import cast

import torch
from torch import nn

from partool.layout.parameters import is_selection_bias
from partool.plan.types import Plan
from partool_runtime.fp8 import use_fp8
from partool_runtime.fused import fuse
from partool_runtime.fused.attention import select_attention
from partool_runtime.hf.model import HfPart
from partool_runtime.losses import set_loss
from partool_runtime.mesh import Ranks
from partool_runtime.model import Block, Decoder, DecoderParts, StagedDecoder
from partool_runtime.parallel.expert.apply import apply_experts
from partool_runtime.parallel.expert.dispatch import Read, read_rows
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.sequence.apply import apply_sequence
from partool_runtime.parallel.tensor.apply import apply_tensor
from partool_runtime.parallel.tensor.hf import apply_to_transformers
from partool_runtime.parallel.tiling import tile_loss, tile_networks
from partool_runtime.precision import COMPUTE_DTYPE


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile the forward pass of every block whose sizes do not depend on its tokens; equal blocks share it.

    Only ``forward`` is compiled, so hooks that gather and release parameters stay outside of the graph. Where the host
    reads how many rows the experts of other ranks get, a layer would be compiled in pieces, and anew for new numbers.
    """
    for block in blocks:
        if isinstance(block, Block) and block.moe is not None and block.moe.dispatch.waits:
            continue
        setattr(block, "forward", torch.compile(block.forward))  # noqa: B010 - mypy forbids assigning a method


def parallelize(
    model: StagedDecoder,
    plan: Plan,
    ranks: Ranks,
    *,
    offload: Callable[[Mapping[int, nn.Module]], None] | None = None,
    read: Read = read_rows,
) -> None:
    """Apply the plan's layout in place to a model, or to the model's stages that a pipeline rank holds.

    The order is fixed, because each step wraps the previous step's result: tensor parallelism cuts the heads, expert
    parallelism gives the rank its experts, sequence parallelism exchanges the heads' tokens, fused kernels replace
    parts of the cut layers, feed-forward networks are tiled, layers are recomputed, recomputed layers are compiled, and
    saved activations are offloaded.
    Sharding (:mod:`partool_runtime.parallel.zero`) comes last: sharding gathers parameters outside of all these
    wrappers, in the shapes that the rank computes with. ``offload`` makes layers, by number, keep saved activations in
    host memory where the plan says so; without it they stay. ``read`` reads how many rows experts get.
    """
    if isinstance(model, HfPart):
        apply_to_transformers(model, plan, ranks)
    else:
        apply_tensor(cast("Decoder | DecoderParts", model), plan, ranks)
        apply_experts(cast("Decoder | DecoderParts", model), plan, ranks, read)
    blocks = dict(model.blocks())
    use_fp8(blocks.values(), plan, ranks.device)
    apply_sequence(model, plan, ranks)
    fuse(model, plan)
    select_attention(model, plan, ranks.device)
    _tile(model, blocks, plan)
    policies = [plan.layout.recompute[layer] for layer in blocks]
    recompute(blocks.values(), policies, draws=model.draws, tiled=plan.layout.tiles.mlp > 0)
    if plan.layout.compile == "block":
        compile_blocks(blocks.values())
    if offload is not None:
        offload(blocks)
    _narrow(model, plan)


def _tile(model: StagedDecoder, blocks: Mapping[int, nn.Module], plan: Plan) -> None:
    tile_networks(blocks.values(), plan.layout.tiles.mlp)
    tile_loss(model, plan.layout.tiles.loss, ranks=plan.layout.mesh.tp)
    if plan.training.z_loss:
        set_loss(model, z_loss=plan.training.z_loss)


def _narrow(model: nn.Module, plan: Plan) -> None:
    """If master weights are in host memory, cast the parameters on the device to the type of computation."""
    if plan.layout.offload.optimizer == "none":
        return
    for name, parameter in model.named_parameters():
        if not is_selection_bias(name):
            parameter.data = parameter.data.to(COMPUTE_DTYPE[plan.training.precision])
