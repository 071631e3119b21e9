"""The order in which the layout is applied to a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from partool.plan.types import Plan
from partool_runtime.fp8 import use_fp8
from partool_runtime.fused import fuse
from partool_runtime.fused.attention import select_attention
from partool_runtime.hf.model import HfDecoder, HfPart
from partool_runtime.hf.stages import HfParts
from partool_runtime.losses import set_loss
from partool_runtime.mesh import Ranks
from partool_runtime.model import AnyDecoder, Decoder, DecoderParts
from partool_runtime.offload import Activations, Slabs
from partool_runtime.offload.memory import HostMemory
from partool_runtime.parallel.grad_sync import GradSync
from partool_runtime.parallel.pipeline.sync import Unit
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.sequence.apply import apply_sequence
from partool_runtime.parallel.tensor.apply import apply_tensor
from partool_runtime.parallel.tensor.hf import apply_to_transformers
from partool_runtime.parallel.tiling import tile_loss, tile_networks
from partool_runtime.parallel.zero import shard, shard_stages
from partool_runtime.precision import COMPUTE_DTYPE


def compile_blocks(blocks: Iterable[nn.Module]) -> None:
    """Compile the forward pass of every block; equal blocks share one compilation.

    Only ``forward`` is compiled, so hooks that gather and release parameters stay outside of the graph.
    """
    for block in blocks:
        setattr(block, "forward", torch.compile(block.forward))  # noqa: B010 - mypy forbids assigning a method


_SPARE = 1.1
"""Of what layers are predicted to save: host memory that is missing during the run is slower."""


def parallelize(model: Decoder | HfDecoder, plan: Plan, ranks: Ranks, memory: HostMemory | None = None) -> GradSync:
    """Apply the plan's layout to a model, in place, and return what exchanges its gradients.

    The order is fixed: tensor ranks cut the heads whose tokens are exchanged, fused kernels compute on what a rank then
    has, networks work on tiles of what is then a
    layer, all of it is part of what is computed again, recomputation is part of what is compiled, what is kept after
    that may go to the host, and gathers happen outside of all, on the parameters that the rank computes with.
    """
    if isinstance(model, HfDecoder):
        apply_to_transformers(model, plan, ranks)
    else:
        apply_tensor(model, plan, ranks)
    use_fp8(model.layers, plan, ranks.device)
    apply_sequence(model, plan, ranks)
    fuse(model, plan)
    select_attention(model, plan, ranks.device)
    blocks = dict(enumerate(model.layers))
    _tile(model, blocks, plan)
    recompute(model.layers, plan.layout.recompute, draws=_draws(model), tiled=plan.layout.tiles.mlp > 0)
    if plan.layout.compile == "block":
        compile_blocks(model.layers)
    _offload(blocks, plan, ranks, memory)
    _narrow(model, plan)
    return shard(model, layout=plan.layout, precision=plan.training.precision, ranks=ranks)


def parallelize_stages(
    parts: DecoderParts | HfParts, plan: Plan, ranks: Ranks, memory: HostMemory | None = None
) -> list[Unit]:
    """Apply the plan's layout to the stages of a pipeline rank, in place and in the same order.

    Return what is gathered and reduced together. ``memory`` is what owns the rank's pinned host memory, here as above.
    """
    if isinstance(parts, HfParts):
        apply_to_transformers(parts, plan, ranks)
    else:
        apply_tensor(parts, plan, ranks)
    use_fp8((block for _, block in parts.blocks()), plan, ranks.device)
    apply_sequence(parts, plan, ranks)
    fuse(parts, plan)
    select_attention(parts, plan, ranks.device)
    blocks: dict[int, nn.Module] = dict(parts.blocks())
    _tile(parts, blocks, plan)
    policies = [plan.layout.recompute[layer] for layer in blocks]
    recompute(blocks.values(), policies, draws=_draws(parts), tiled=plan.layout.tiles.mlp > 0)
    if plan.layout.compile == "block":
        compile_blocks(blocks.values())
    _offload(blocks, plan, ranks, memory)
    _narrow(parts, plan)
    return shard_stages(parts, layout=plan.layout, precision=plan.training.precision, ranks=ranks)


def _tile(model: AnyDecoder, blocks: Mapping[int, nn.Module], plan: Plan) -> None:
    tile_networks(blocks.values(), plan.layout.tiles.mlp)
    tile_loss(model, plan.layout.tiles.loss, ranks=plan.layout.mesh.tp)
    if plan.training.z_loss:
        set_loss(model, z_loss=plan.training.z_loss)


def _offload(blocks: Mapping[int, nn.Module], plan: Plan, ranks: Ranks, memory: HostMemory | None) -> None:
    """Let layers keep what they save in host memory; outside of all that decides what that is."""
    if plan.layout.offload.activations == "cpu":
        slabs = None if memory is None else Slabs(memory)
        if slabs is not None:
            slabs.reserve(round(_SPARE * plan.prediction.memory.host_terms_bytes.get("activations", 0)))
        Activations(ranks.device, slabs=slabs).put(blocks, last=plan.model.layers - 1)


def _narrow(model: nn.Module, plan: Plan) -> None:
    """Let the device hold parameters in the type of computation where masters are in host memory."""
    if plan.layout.offload.optimizer == "none":
        return
    for parameter in model.parameters():
        parameter.data = parameter.data.to(COMPUTE_DTYPE[plan.training.precision])


def _draws(model: AnyDecoder) -> bool:
    return isinstance(model, HfPart) and model.draws
