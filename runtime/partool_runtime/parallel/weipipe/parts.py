"""The part of a decoder that one rank of a ring holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from partool.spec.model import ModelConfig
from partool_runtime.model.attention import Tokens
from partool_runtime.model.decoder import AnyDecoder, Block, Contexts, Head, HeadLoss, embedded
from partool_runtime.model.embedding import Embedding
from partool_runtime.model.loss import loss
from partool_runtime.model.norm import make_norm

Span = tuple[int, int]
"""Index of the first layer, and index after the last layer."""


class _Inputs(nn.Module):
    def __init__(self, embed: nn.Embedding, position: nn.Embedding | None) -> None:
        super().__init__()
        self.embed, self.position = embed, position

    def forward(self, tokens_BS: torch.Tensor, documents_BL: torch.Tensor | None = None) -> torch.Tensor:
        where = Tokens(tokens_BS.shape[1], documents_BL=documents_BL)
        return embedded(tokens_BS, self.embed, self.position, where)


class _Stage(nn.Module):
    def __init__(self, blocks: Sequence[Block], contexts: Contexts) -> None:
        super().__init__()
        self.blocks, self.contexts = nn.ModuleList(blocks), contexts

    def forward(self, x_BSH: torch.Tensor, documents_BL: torch.Tensor | None = None) -> torch.Tensor:
        context = self.contexts(x_BSH, self.contexts.tokens(x_BSH.shape[1], x_BSH.device, documents_BL))
        for block in self.blocks:
            x_BSH = block(x_BSH, context)
        return x_BSH


class _Outputs(nn.Module):
    def __init__(self, final_norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.final_norm, self.head = final_norm, head
        self.loss: HeadLoss = loss

    def forward(self, x_BSH: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        hidden_BSH = self.final_norm(x_BSH)
        return self.loss(hidden_BSH, cast(torch.Tensor, self.head.weight), labels_BS)


class RingDecoder(AnyDecoder):
    """A ring rank's part of a decoder: embeddings, final norm and head, and the layers of the rank's stages.

    ``named_parameters`` yields the part's parameters under the names of the whole decoder. Layers of other stages are
    on the meta device and are called with received weights; they are not registered as submodules.
    """

    def __init__(self, config: ModelConfig, spans: Sequence[Span], mine: Sequence[int]) -> None:
        """``spans`` are the layers of each stage, ``mine`` the numbers of this rank's stages."""
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.hidden, config.padding_token)
        self.position = Embedding(config.max_position, config.hidden) if config.position == "learned" else None
        local_layers = {layer for stage in mine for layer in range(*spans[stage])}
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in sorted(local_layers)})
        self.final_norm = make_norm(config)
        self.head = None if config.tied_embeddings else Head(config)
        contexts = Contexts(config)
        self._elsewhere: dict[int, Block] = {}
        # A tuple, since layers that are registered under the whole decoder's names must not be registered twice.
        self._parts = (
            _Inputs(self.embed, self.position),
            tuple(_Stage([self._block(layer) for layer in range(*span)], contexts) for span in spans),
            _Outputs(self.final_norm, self.embed if self.head is None else self.head),
        )

    @property
    def first(self) -> nn.Module:
        """See :class:`partool_runtime.parallel.weipipe.compute.RingModel`."""
        return self._parts[0]

    @property
    def stages(self) -> Sequence[nn.Module]:
        """See :class:`partool_runtime.parallel.weipipe.compute.RingModel`."""
        return self._parts[1]

    @property
    def last(self) -> nn.Module:
        """See :class:`partool_runtime.parallel.weipipe.compute.RingModel`."""
        return self._parts[2]

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield (number, layer) for each layer of this rank."""
        return ((int(layer), cast(Block, block)) for layer, block in self.layers.items())

    def elsewhere(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, meta parameter) for other ranks' parameters; with these, all ranks freeze the same layers."""
        for layer, block in self._elsewhere.items():
            yield from ((f"layers.{layer}.{name}", parameter) for name, parameter in block.named_parameters())

    def replicated(self) -> frozenset[str]:
        """Return the names of the parameters that every rank of the ring holds."""
        return frozenset(name for name, _ in self.named_parameters() if not name.startswith("layers."))

    def _block(self, layer: int) -> Block:
        if str(layer) in self.layers:
            return cast(Block, self.layers[str(layer)])
        with torch.device("meta"):
            self._elsewhere[layer] = Block(self.config, layer)
        return self._elsewhere[layer]
