"""The decoder; the fields of one configuration select a model of the Llama, Mistral, Qwen or GPT families."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol, cast

import torch
from torch import nn
from torch.nn import functional as F

from partool.layout.parameters import parameters
from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.model.adapter import add_adapters
from partool_runtime.model.around import Around
from partool_runtime.model.attention import Context, Tokens
from partool_runtime.model.dropout import Masks, token_keys
from partool_runtime.model.embedding import Embedding
from partool_runtime.model.ffn import FeedForward
from partool_runtime.model.latent_attention import make_attention
from partool_runtime.model.loss import loss
from partool_runtime.model.moe import MixtureOfExperts
from partool_runtime.model.multi_token import Ahead, MultiTokenLosses, TokenPrediction, look_ahead
from partool_runtime.model.norm import make_norm
from partool_runtime.model.rope import Tables, tables
from partool_runtime.model.stored import QuantisedMatrix
from partool_runtime.placement import Placement


class HeadLoss(Protocol):
    """Type of :func:`partool_runtime.model.loss.loss` and of the losses over a vocabulary that ranks share."""

    def __call__(self, hidden: torch.Tensor, head_weight_VH: torch.Tensor, labels_BS: torch.Tensor, /) -> torch.Tensor:
        """Return the sum of token losses, a scalar, of the hidden state ``[B, S, H]``."""


class HasLoss(Protocol):
    """A module that computes the loss: the head, or what a tied embedding belongs to."""

    loss: HeadLoss
    """The function that computes it; tensor parallelism replaces it, and kernels and tiles set its options."""


class Block(nn.Module):
    """One layer: attention and feed-forward network, each on a normalised copy of the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.number = layer
        """Index of the layer in the whole model, from 0."""
        self.attention_norm = make_norm(config)
        self.attention = make_attention(config, layer)
        self.ffn_norm = make_norm(config)
        self.ffn: FeedForward | None = None
        self.moe: MixtureOfExperts | None = None
        if config.is_moe_layer(layer):
            self.moe = MixtureOfExperts(config.of_layer(layer))
        else:
            self.ffn = FeedForward(config)
        self.masks = Masks()
        """Keys of the tokens of a pass, for dropout in adapters."""
        if config.adapter is not None:
            add_adapters(self, config.adapter, f"layers.{layer}", self.masks)
        self.add_norm: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
        """Function that computes a sum and its ``ffn_norm`` in one kernel; None means that torch computes them."""
        self.around: Around | None = None
        """Runs :meth:`compute` so that the backward pass recomputes it; None keeps all tensors."""

    def forward(self, x_BSH: torch.Tensor, context: Context) -> torch.Tensor:
        """Map ``[B, S, H]`` to ``[B, S, H]``."""
        self.masks.keys_BS = context.keys_BS
        return self.compute(x_BSH, context) if self.around is None else self.around(self.compute, x_BSH, context)

    def compute(self, x_BSH: torch.Tensor, context: Context) -> torch.Tensor:
        """Compute the layer."""
        if not torch.compiler.is_compiling():  # recomputation calls this with the context of an earlier micro-batch
            self.masks.keys_BS = context.keys_BS
        attended_BSH: torch.Tensor = self.attention(self.attention_norm(x_BSH), context)
        if self.add_norm is not None:
            x_BSH, normed_BSH = self.add_norm(x_BSH, attended_BSH)
        else:
            x_BSH = x_BSH + attended_BSH
            normed_BSH = self.ffn_norm(x_BSH)
        network = self.ffn if self.ffn is not None else self.moe
        assert network is not None, "a layer has a dense network or experts"
        out: torch.Tensor = x_BSH + network(normed_BSH)
        return out


class Head(nn.Module):
    """The output matrix. Its forward pass computes the loss, so that a wrapper sees when the weight is in use."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab, config.hidden))
        nn.init.normal_(self.weight, std=config.init_std)
        self.loss: HeadLoss = loss
        """Loss function; tensor parallelism replaces it."""

    def forward(self, hidden_BSH: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """Return the sum of token losses, see :func:`partool_runtime.model.loss.loss`."""
        return self.loss(hidden_BSH, self.weight, labels_BS)


class Contexts:
    """Creates the context of a pass; rotary tables are cached by length, type and device."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._drops = config.adapter is not None and config.adapter.dropout > 0
        self.seed, self.first_sequence = 0, 0
        """What dropout's masks follow from: the run's seed, and the number of the pass's first sequence in the run."""
        self.length: int | None = None
        """Number of tokens that attention sees on this rank, if the hidden state holds only some of these tokens."""
        self.share: tuple[int, tuple[int, ...]] | None = None
        """Number of tokens of a whole sequence, and the positions of this rank's tokens, if ranks share sequences."""
        self.row_positions: tuple[int, ...] | None = None
        """Positions of this rank's tokens in layers that attend along rows of a grid, if they differ from ``share``."""
        self._index: dict[tuple[bool, torch.device], torch.Tensor] = {}
        self._rope: dict[tuple[int, bool, torch.dtype, torch.device], Tables] = {}

    def __call__(self, x_BSH: torch.Tensor, tokens: Tokens | None = None) -> Context:
        """Return the layers' inputs other than ``x_BSH``, in the type and on the device of ``x_BSH``.

        Without ``tokens`` the inputs are for all tokens of ``x_BSH``.
        """
        tokens = tokens or self.tokens(x_BSH.shape[1], x_BSH.device)
        context = Context(self._rope_tables(tokens, x_BSH.dtype, x_BSH.device), tokens)
        if self._drops and torch.is_grad_enabled():
            index = tokens.index_S
            at_S = torch.arange(tokens.length, device=x_BSH.device) if index is None else index
            context.keys_BS = token_keys(self.seed, self.first_sequence, len(x_BSH), at_S)
        if self.row_positions is not None:
            index_S = self._index_of(self.row_positions, x_BSH.device, along_rows=True)
            row_tokens = Tokens(tokens.length, index_S, tokens.documents_BL, tokens.grid)
            context.along_rows = Context(
                self._rope_tables(row_tokens, x_BSH.dtype, x_BSH.device, along_rows=True), row_tokens
            )
        return context

    def tokens(self, length: int, device: torch.device, documents_BL: torch.Tensor | None = None) -> Tokens:
        """Return the rank's tokens in a pass: a share if ranks share sequences, else all ``length`` tokens.

        ``documents_BL`` is the document number of each token of the whole sequence; None if documents do not matter.
        """
        grid, share = self._config.grid, self.share
        full_length = length if share is None else share[0]
        if grid is not None and full_length != grid[0] * grid[1]:
            message = f"sequences of {full_length} tokens, where the model lays them on {grid[0]} × {grid[1]}"
            raise ConfigurationError("PT656", message, "Use sequences of as many tokens as model.attention.grid has.")
        if share is None:
            return Tokens(length, None, documents_BL, grid)
        return Tokens(full_length, self._index_of(share[1], device), documents_BL, grid)

    def _index_of(self, places: tuple[int, ...], device: torch.device, *, along_rows: bool = False) -> torch.Tensor:
        key = (along_rows, device)
        if key not in self._index:
            with torch.inference_mode(False):
                self._index[key] = torch.tensor(places, dtype=torch.int64, device=device)
        return self._index[key]

    def _rope_tables(
        self, tokens: Tokens, dtype: torch.dtype, device: torch.device, *, along_rows: bool = False
    ) -> Tables | None:
        if self._config.position != "rope":
            return None
        key = (tokens.length, along_rows, dtype, device)
        if key not in self._rope:
            # No inference tensors, because later passes with gradients use these tables, too.
            with torch.inference_mode(False):
                cos_SD, sin_SD = tables(self._config, tokens.length, dtype, device)
                mine = tokens.index_S
                self._rope[key] = (cos_SD, sin_SD) if mine is None else (cos_SD[mine], sin_SD[mine])
        return self._rope[key]


def embedded(
    tokens_BS: torch.Tensor,
    embed: Callable[[torch.Tensor], torch.Tensor],
    position: nn.Embedding | None,
    where: Tokens | None = None,
) -> torch.Tensor:
    """Return the first hidden state, ``[B, S, H]``; raises PT257 for more tokens than there are learned positions."""
    x_BSH: torch.Tensor = embed(tokens_BS)
    if position is None:
        return x_BSH
    length = tokens_BS.shape[1] if where is None else where.length
    if length > position.num_embeddings:
        message = f"{length} tokens are more than the {position.num_embeddings} learned positions"
        raise ConfigurationError("PT257", message, "Raise model.max_position or shorten training.sequence_length.")
    return cast(torch.Tensor, x_BSH + position(positions(tokens_BS, where)))


def positions(tokens_BS: torch.Tensor, where: Tokens | None) -> torch.Tensor:
    """Return the position of each token, ``[S]``, or ``[B, S]`` where positions start anew in each document."""
    if where is None:
        return torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    index = torch.arange(where.length, device=tokens_BS.device)
    if where.documents_BL is not None:
        documents = where.documents_BL.to(tokens_BS.device)
        starts = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0), value=True)
        index = index - torch.where(starts, index, 0).cummax(dim=1).values
    return index if where.index_S is None else index[..., where.index_S]


class AnyDecoder(nn.Module):
    """A decoder, or one rank's part of it: ``named_parameters`` yields names of the whole decoder, each once."""

    config: ModelConfig
    copies: frozenset[str] = frozenset()
    """Names of parameters that this rank leaves out of the gradient norm, as another rank counts an equal gradient."""
    placements: Mapping[str, Placement] = MappingProxyType({})
    """Placements of parameters that are sharded over tensor ranks, by name; all other parameters are whole."""
    stored: Mapping[str, tuple[nn.Module, QuantisedMatrix]] = MappingProxyType({})
    """Of each frozen weight that this rank stores in few bits, by name: its module, and how the module stores it."""

    def roots(self) -> tuple[nn.Module, ...]:
        """Return the modules that are sharded separately; together they hold every parameter once."""
        return (self,)

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of the whole model, by name; the result is the same on all ranks."""
        return {info.name: info.shape for info in parameters(self.config)}


class StagedDecoder(AnyDecoder):
    """A decoder divided into stages; a rank computes some of the stages. A whole model is a single stage."""

    draws: bool = False
    """Whether training draws random numbers."""

    @property
    def stages(self) -> Mapping[int, nn.Module]:
        """Stages of this rank by number; each has a forward pass, units of sharding (``groups``), and ``contexts``.

        The submodules of stages are registered, under the names of the whole model; the stages themselves are not.
        """
        return {0: self}

    @property
    def shared(self) -> nn.Module | None:
        """The tied embedding if two stages of this rank use it, else None; it is sharded and gathered separately."""
        return None

    @property
    def loss_module(self) -> nn.Module | None:
        """The module whose ``loss`` computes the loss; None if this rank has no such module."""
        raise NotImplementedError

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (number, layer) for each layer of this rank."""
        raise NotImplementedError

    def roots(self) -> tuple[nn.Module, ...]:
        """Return the stages, and modules that stages share."""
        return (*self.stages.values(), *([] if self.shared is None else [self.shared]))


class Decoder(StagedDecoder):
    """A decoder-only transformer; ``docs/design/architecture.md`` lists its parameter names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.hidden, config.padding_token)
        self.position = Embedding(config.max_position, config.hidden) if config.position == "learned" else None
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.blocks))
        self.final_norm = make_norm(config)
        self.head = None if config.tied_embeddings else Head(config)
        self.predictions = nn.ModuleList(TokenPrediction(config) for _ in range(config.predictions))
        """Modules of further tokens; their blocks are the last of ``layers``."""
        self.multi_token = MultiTokenLosses()
        self.contexts = Contexts(config)
        self.loss: HeadLoss = loss
        """Loss function of a tied head; tensor parallelism replaces the function."""

    @property
    def loss_module(self) -> nn.Module:
        """The head, or the model itself if the head is tied to the embedding."""
        return self if self.head is None else self.head

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield (number, block) for each layer, and then for each module of a further token."""
        return enumerate(self.layers)

    def groups(self) -> list[list[nn.Module]]:
        """Return the units of sharding and gathering, in order of use; together they hold every parameter once.

        The last group, which holds final norm, head and what modules of further tokens have beside their blocks,
        stays gathered in the root of a sharded model. With tied
        embeddings the last group includes the embedding, because the first and the last step of the forward pass use
        the same weight.
        """
        inputs: list[nn.Module] = [self.embed] if self.position is None else [self.embed, self.position]
        blocks: list[list[nn.Module]] = [[layer] for layer in self.layers]
        if self.head is None:
            return [*blocks, [*inputs, self.final_norm, *self.predictions]]
        return [inputs, *blocks, [self.final_norm, self.head, *self.predictions]]

    def forward(
        self,
        tokens_BS: torch.Tensor,
        labels_BS: torch.Tensor,
        documents_BL: torch.Tensor | None = None,
        ahead: Ahead | None = None,
    ) -> torch.Tensor:
        """Return the sum of the losses of all tokens whose label is not −100, a scalar in float32 or wider.

        ``documents_BL`` is the document number of each token of the whole sequences: tokens attend only to tokens of
        their own document. None means that each sequence is one document. Gradients, but not the value, include the
        losses of further tokens; ``ahead`` holds what these read, where the rank has a share of the sequences.
        """
        if not (self.predictions and torch.is_grad_enabled()):
            return self._loss(self.hidden(tokens_BS, documents_BL), labels_BS)
        ahead = ahead or look_ahead(tokens_BS, labels_BS, documents_BL, len(self.predictions))
        where = self.contexts.tokens(tokens_BS.shape[1], tokens_BS.device, documents_BL)
        # One lookup: a sharded embedding is gathered once.
        looked_up = self.embed(torch.cat([tokens_BS, *ahead.tokens_DBS]))
        first_BSH, *later = looked_up.chunk(1 + len(self.predictions))
        x_BSH = embedded(tokens_BS, lambda _: first_BSH, self.position, where)
        context = self.contexts(x_BSH, where)
        hidden_BSH = self._passed(x_BSH, context)
        main, losses = self._loss(hidden_BSH, labels_BS), []
        blocks = list(self.layers)[self.config.layers :]
        for module, block, later_BSH, labels in zip(self.predictions, blocks, later, ahead.labels_DBS, strict=True):
            prediction = cast(TokenPrediction, module)
            hidden_BSH = prediction.final_norm(block(prediction.joined(hidden_BSH, later_BSH), context))
            losses.append(self._loss(hidden_BSH, labels))
        return self.multi_token.added(main, losses)

    def _loss(self, hidden_BSH: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """Return the sum of token losses of normalised hidden states."""
        if self.head is None:
            return self.loss(hidden_BSH, self.embed.weight, labels_BS)
        total: torch.Tensor = self.head(hidden_BSH, labels_BS)
        return total

    def hidden(self, tokens_BS: torch.Tensor, documents_BL: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalised hidden state after the last layer, ``[B, S, H]``."""
        where = self.contexts.tokens(tokens_BS.shape[1], tokens_BS.device, documents_BL)
        x_BSH = embedded(tokens_BS, self.embed, self.position, where)
        return self._passed(x_BSH, self.contexts(x_BSH, where))

    def _passed(self, x_BSH: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the normalised hidden state after the layers, given the first one."""
        for layer in list(self.layers)[: self.config.layers]:
            x_BSH = layer(x_BSH, context)
        return cast(torch.Tensor, self.final_norm(x_BSH))

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return all logits, ``[B, S, V]``; only for tests and small batches."""
        weight = self.embed.weight if self.head is None else self.head.weight
        return F.linear(self.hidden(tokens_BS), weight)
