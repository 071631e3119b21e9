"""The part of a decoder that one pipeline rank holds: its stages, with the whole decoder's parameter names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import nn

from partool.spec.model import ModelConfig
from partool_runtime.model.decoder import Block, Contexts, Head, HeadLoss, StagedDecoder, embedded
from partool_runtime.model.embedding import Embedding
from partool_runtime.model.loss import loss
from partool_runtime.model.norm import make_norm

Span = tuple[int, int]
"""Range of layers: the number of the first layer, and the number after the last layer."""


class TiedEmbedding(Embedding):
    """An embedding whose weight is also the output matrix. Both uses are forward passes, visible to wrappers."""

    def __init__(self, vocab: int, hidden: int, padding: int | None = None) -> None:
        super().__init__(vocab, hidden, padding)
        self.loss: HeadLoss = loss
        """Loss function; tensor parallelism replaces it."""

    def forward(self, x: torch.Tensor, labels_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Return embeddings ``[B, S, H]`` of tokens ``x``; with labels, the sum of token losses of hidden states."""
        return super().forward(x) if labels_BS is None else self.loss(x, self.weight, labels_BS)


class StageModule(nn.Module):
    """A pipeline stage of consecutive layers; the first also has the embedding, the last also norm, head and loss.

    Modules are passed in. A module that several stages of a rank share is registered with none of these stages.
    """

    def __init__(self, layers: Mapping[str, Block], contexts: Contexts) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self.contexts = contexts
        self.first = False
        self.embed: Embedding | None = None
        self.position: Embedding | None = None
        self.final_norm: nn.Module | None = None
        self.head: nn.Module | None = None
        self.shared: tuple[TiedEmbedding, ...] = ()
        """The embedding, where another stage of this rank uses it too."""

    def forward(
        self, x: torch.Tensor, labels_BS: torch.Tensor | None = None, documents_BL: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map tokens ``[B, S]`` (first stage) or ``[B, S, H]`` to ``[B, S, H]``, or on the last stage to the loss.

        Only the last stage takes labels; all take the documents of the whole sequences, where these matter.
        """
        embedding = self.shared[0] if self.shared else self.embed
        where = self.contexts.tokens(
            x.shape[1] if self.first else self.contexts.length or x.shape[1], x.device, documents_BL
        )
        if self.first and embedding is not None:
            x = embedded(x, embedding, self.position, where)
        context = self.contexts(x, where)
        for block in self.layers.values():
            x = block(x, context)
        if self.final_norm is None:
            return x
        head = self.head if self.head is not None else cast(nn.Module, embedding)
        return cast(torch.Tensor, head(self.final_norm(x), labels_BS))

    @property
    def last(self) -> bool:
        """True if this stage computes the loss."""
        return self.final_norm is not None

    def groups(self) -> list[list[nn.Module]]:
        """Return the units of sharding and gathering in order of use, except the last unit of the last stage.

        That unit stays in the root: final norm and head, or the last stage's copy of a tied embedding.
        """
        inputs: list[nn.Module] = (
            [module for module in (self.embed, self.position) if module is not None] if self.first else []
        )
        blocks: list[list[nn.Module]] = [[block] for block in self.layers.values()]
        return [inputs, *blocks] if inputs else blocks


class DecoderParts(StagedDecoder):
    """The stages of a decoder that one rank holds.

    ``named_parameters`` yields the names of the whole decoder, each once. With tied embeddings the ranks of the first
    and of the last stage both hold ``embed.weight``; if one rank holds both stages, the weight is one parameter.
    """

    def __init__(self, config: ModelConfig, spans: Sequence[Span], mine: Sequence[int]) -> None:
        """``spans`` lists the layers of each stage, ``mine`` the numbers of this rank's stages."""
        super().__init__()
        last = len(spans) - 1
        local_layers = sorted(layer for stage in mine for layer in range(*spans[stage]))
        self.config = config
        self.embed: Embedding | None = None
        self.position: Embedding | None = None
        if 0 in mine or (last in mine and config.tied_embeddings):
            kind = TiedEmbedding if config.tied_embeddings else Embedding
            self.embed = kind(config.vocab, config.hidden, config.padding_token)
        if 0 in mine and config.position == "learned":
            self.position = Embedding(config.max_position, config.hidden)
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in local_layers})
        self.final_norm = make_norm(config) if last in mine else None
        self.head = Head(config) if last in mine and not config.tied_embeddings else None
        # In a tuple, so that it is not registered a second time.
        self._shared = (self.embed if config.tied_embeddings and 0 in mine and last in mine and last > 0 else None,)
        self.copies = frozenset({"embed.weight"} if self.embed is not None and 0 not in mine else ())
        contexts = Contexts(config)
        self._stages = {stage: self._stage(spans[stage], contexts, stage == 0, stage == last) for stage in mine}

    @property
    def stages(self) -> dict[int, StageModule]:
        """See :class:`StagedDecoder`."""
        return self._stages

    @property
    def shared(self) -> Embedding | None:
        """See :class:`StagedDecoder`."""
        return self._shared[0]

    @property
    def loss_module(self) -> nn.Module | None:
        """The head, or the tied embedding used as head."""
        return self.head if self.head is not None else self.embed if self.config.tied_embeddings else None

    def blocks(self) -> Iterator[tuple[int, Block]]:
        """Yield (number, layer) for each layer of this rank."""
        return ((int(layer), cast(Block, block)) for layer, block in self.layers.items())

    def _stage(self, span: Span, contexts: Contexts, first: bool, last: bool) -> StageModule:
        names = [str(layer) for layer in range(*span)]
        stage = StageModule({name: cast(Block, self.layers[name]) for name in names}, contexts)
        if first:
            stage.first, stage.position = True, self.position
        if last:
            stage.final_norm, stage.head = self.final_norm, self.head
        if self.shared is not None and (first or last):
            stage.shared = (cast(TiedEmbedding, self.shared),)
        elif first or (last and self.head is None):
            stage.embed = self.embed
        return stage
