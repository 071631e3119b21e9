"""Computes feed-forward networks and losses tile by tile, so that their large tensors never exist whole.

A feed-forward network maps every token independently. So it can process one tile of tokens after the other and
recompute each tile in the backward pass; saved and temporary tensors then do not grow with the sequence (TiledMLP of
ALST, arXiv 2506.13996, section 3.1). Gradients of weights are summed over tiles in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx, once_differentiable

from partool_runtime import deferral
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import structure as of_transformers
from partool_runtime.hf.numerics import stay_wide
from partool_runtime.hf.patches import Patch, patch_forward
from partool_runtime.losses import set_loss
from partool_runtime.model.decoder import Block
from partool_runtime.model.dropout import Masks
from partool_runtime.model.norm import wide_dtype
from partool_runtime.parallel import second_pass

Forward = Callable[[torch.Tensor], torch.Tensor]


def tile_networks(blocks: Iterable[nn.Module], tokens: int) -> None:
    """Make the feed-forward network of every block work on ``tokens`` tokens of each sequence at a time, in place.

    If ``tokens`` is 0, all tokens are processed at once. Call this before recomputation is applied to the layers.
    Raises ConfigurationError PT657 for a layer of transformers that has no feed-forward network.
    """
    if not tokens:
        return
    for block in blocks:
        if isinstance(block, Block) and block.ffn is not None:
            block.ffn.around = TokenTiles(block.ffn, tokens, last=True, masks=block.masks)
            continue
        for network in _networks(block):
            tiles = TokenTiles(network, tokens, last=False, masks=Masks())
            patch_forward(network, Patch.SECOND_PASS, partial(tiles, network.forward))


def _networks(block: nn.Module) -> list[nn.Module]:
    networks = of_transformers.networks(block)
    if not networks:
        message = f"parallel.tiles: {type(block).__name__} has no network that maps every token by itself"
        raise ConfigurationError("PT657", message, "Leave out parallel.tiles.mlp, or set it to 0.")
    for network in networks:
        stay_wide(network)
    return networks


class TokenTiles:
    """Runs a network tile by tile: a :class:`~partool_runtime.model.around.Around`."""

    def __init__(self, network: nn.Module, tokens: int, *, last: bool, masks: Masks) -> None:
        self.parameters = network.parameters
        self.masks = masks
        """The layer's keys for dropout, of which a tile gets those of its tokens."""
        self.tokens = tokens
        self.last = last
        """True if operations that follow the network in its layer save no tensors for the backward pass."""

    def __call__(self, compute: Forward, *inputs: torch.Tensor) -> torch.Tensor:
        """Return ``compute(x_BSH)``, ``[B, S, H]``, of the one input ``x_BSH``."""
        (x_BSH,) = inputs
        if x_BSH.shape[1] <= self.tokens:
            return compute(x_BSH)
        if not torch.is_grad_enabled():
            return self.forward(compute, x_BSH)
        out: torch.Tensor = _Tiled.apply(x_BSH, self, compute, *self.parameters())  # type: ignore[no-untyped-call]
        return out

    def parts(self, x_BSH: torch.Tensor) -> Iterator[slice]:
        """Yield the range of tokens of each tile of a hidden state, as a slice."""
        for start in range(0, x_BSH.shape[1], self.tokens):
            yield slice(start, start + self.tokens)

    def forward(self, body: Forward, x_BSH: torch.Tensor) -> torch.Tensor:
        """Map ``[B, S, H]`` to ``[B, S, H]`` without saving tensors for a backward pass."""
        out_BSH = torch.empty_like(x_BSH)
        keys_BS = self.masks.keys_BS
        with second_pass.tile():
            for part in self.parts(x_BSH):
                with self.masks.of(of_part(keys_BS, part)):
                    out_BSH[:, part] = body(x_BSH[:, part])
        return out_BSH


def of_part(keys_BS: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """Return the keys of a tile's tokens, if tokens have keys."""
    return None if keys_BS is None else keys_BS[:, part]


class _Tiled(torch.autograd.Function):
    """Runs a network tile by tile; the backward pass recomputes each tile."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_BSH: torch.Tensor, tiles: TokenTiles, body: Forward, *parameters: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_BSH)
        ctx.tiles, ctx.body, ctx.keys_BS = tiles, body, tiles.masks.keys_BS  # type: ignore[attr-defined]
        if second_pass.is_recomputing_layer() and tiles.last:
            # Only the residual sum follows, and it is the layer's output: no more tensors are saved.
            return torch.empty_like(x_BSH)
        return tiles.forward(body, x_BSH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x_BSH,) = ctx.saved_tensors
        tiles: TokenTiles = ctx.tiles
        needs_x, _, _, *needs = ctx.needs_input_grad
        grad_x_BSH = torch.empty_like(x_BSH) if needs_x else None
        trained = [parameter for parameter, wanted in zip(tiles.parameters(), needs, strict=True) if wanted]
        sums = [torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype)) for parameter in trained]
        for part in tiles.parts(x_BSH):
            x_BTH = x_BSH[:, part].detach().requires_grad_(needs_x)
            keys = tiles.masks.of(of_part(ctx.keys_BS, part))
            with keys, torch.enable_grad(), deferral.undivided(), second_pass.tile(unread=tiles.last):
                out_BTH = ctx.body(x_BTH)
            inputs = [x_BTH, *trained] if needs_x else trained
            gradients = list(torch.autograd.grad(out_BTH, inputs, grad_BSH[:, part], allow_unused=True))
            del out_BTH
            if grad_x_BSH is not None:
                grad_x_BSH[:, part] = gradients.pop(0)
            for total, gradient in zip(sums, gradients, strict=True):
                if gradient is not None:
                    total.add_(gradient)
        narrow = (total.to(parameter.dtype) for total, parameter in zip(sums, trained, strict=True))
        return grad_x_BSH, None, None, *(next(narrow) if wanted else None for wanted in needs)


def tile_loss(model: nn.Module, tokens: int, *, ranks: int = 1) -> None:
    """Make the loss of a model, or of a pipeline rank's part of a model, hold the logits of ``tokens`` tokens at once.

    If ``tokens`` is 0, the loss keeps its default. If several tensor ``ranks`` share the vocabulary, their ``Team``
    sets the number of tokens instead.
    """
    if tokens and ranks == 1:
        set_loss(model, tile=tokens)
