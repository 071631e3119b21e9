"""A transformers model behind the interface of partool's own decoder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from partool.plan.types import HfModel
from partool.spec.adapter import LowRank
from partool.spec.model import ModelConfig
from partool_runtime.graph.capture import Captured
from partool_runtime.hf.adapters import add_to_transformers
from partool_runtime.hf.attention import holding
from partool_runtime.hf.building import (
    aliases,
    base_name,
    blocks_name,
    build_causal,
    check_buffers,
    draws_random,
    head_name,
)
from partool_runtime.hf.experts import plain_experts
from partool_runtime.hf.graph import capture_base
from partool_runtime.hf.load import HfFiles, open_model_files
from partool_runtime.hf.numerics import stay_wide
from partool_runtime.model.attention import Tokens
from partool_runtime.model.decoder import Contexts, StagedDecoder, positions
from partool_runtime.model.loss import loss

if TYPE_CHECKING:
    from partool_runtime.weights.draw import BlockSource


LossOfHead = Callable[[torch.Tensor, nn.Linear, torch.Tensor], torch.Tensor]
"""Function from (hidden ``[B, S, H]``, output matrix, labels ``[B, S]``) to the sum of token losses."""


class HfPart(StagedDecoder):
    """A transformers model, or one rank's part of it; parameters have the names of transformers."""

    base_prefix: str
    """Prefix of all names except the head's."""
    aliases: Mapping[str, str]
    """Mapping from each further name of a tied parameter to the parameter's first name."""
    constants: Mapping[str, float]
    """Maps the name of each vector that the model fills with one number to this number."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all parameters of the whole model."""
    head_name: str
    """Name of the output matrix."""
    _blocks: str
    """Name of the list of layers, within the base model."""
    contexts: Contexts | None = None
    """Provider of a pass's tokens if layers attend through :mod:`partool_runtime.hf.attention`, else None."""
    _loss: LossOfHead

    def _describe(self, causal: nn.Module, layers: int) -> None:
        """Record the properties of the whole model; raises ConfigurationError PT644, PT649."""
        check_buffers(causal)
        self.base_prefix, self.head_name = base_name(causal), head_name(causal)
        self._blocks = blocks_name(causal.get_submodule(self.base_prefix), layers)
        self.shapes = {name: tuple(parameter.shape) for name, parameter in causal.named_parameters()}
        self.constants, self.aliases, self.draws = constants(causal), aliases(causal), draws_random(causal)
        self._loss = head_loss

    @property
    def loss(self) -> LossOfHead:
        """Function that computes the loss; tensor parallelism replaces it."""
        return self._loss

    @loss.setter
    def loss(self, function: LossOfHead) -> None:
        self._loss = function

    @property
    def loss_module(self) -> HfPart:
        """The model itself; its ``loss`` setter sets the function in every module that computes a loss."""
        return self

    @property
    def head_module(self) -> nn.Linear | None:
        """The output matrix, where this rank holds it."""
        raise NotImplementedError

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter of the whole model."""
        return dict(self.shapes)

    def open_weights(self, path: Path) -> AbstractContextManager[HfFiles]:
        """Open a safetensors folder of this model."""
        return open_model_files(path, f"{self.base_prefix}.", self.aliases)

    def first_values(self, drawn: BlockSource) -> BlockSource:
        """Return the source ``drawn``, except that vectors which the model fills with one number get this number."""

        def values(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
            constant = self.constants.get(name)
            return drawn(name, shape, offsets, sizes) if constant is None else torch.full(sizes, constant)

        return values


class HfDecoder(HfPart):
    """A causal language model of transformers; parameters have the names of transformers.

    This module has the same children as the model. Its forward pass runs the base model and then computes the loss, so
    that the logits of a long batch never exist at once, and tensor parallelism can replace ``loss``.
    """

    def __init__(self, hf: HfModel, config: ModelConfig, *, wide: bool = False, adapter: LowRank | None = None) -> None:
        """Build the model of ``hf.path``, with parameters on the meta device; ``wide`` means a run in float64."""
        super().__init__()
        self.captured = False
        """True: a graph computes this rank's share of tokens (:mod:`partool_runtime.parallel.sequence.compiled`)."""
        causal = build_causal(Path(hf.path), hf.code_hash)
        plain_experts(causal, wide)
        add_to_transformers(causal, adapter)
        self.config = config
        self._describe(causal, config.layers)
        for name, parameter in causal.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, child in causal.named_children():
            self.add_module(name, child)
        for module in (self.base, *self.layers):
            stay_wide(module)

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield the layers with their numbers."""
        return enumerate(self.layers)

    @property
    def base(self) -> nn.Module:
        """Module that maps tokens to the normalised hidden state."""
        return self.get_submodule(self.base_prefix)

    @property
    def head(self) -> nn.Linear:
        """The output matrix; its weight may be shared with the embedding."""
        return cast(nn.Linear, self.get_submodule(self.head_name))

    @property
    def head_module(self) -> nn.Linear:
        """The output matrix."""
        return self.head

    @property
    def embed(self) -> nn.Embedding:
        """The embedding of tokens."""
        return cast(nn.Embedding, cast(Any, self.base).get_input_embeddings())

    @property
    def layers(self) -> nn.ModuleList:
        """The layers, in order."""
        return cast(nn.ModuleList, self.base.get_submodule(self._blocks))

    @property
    def tied(self) -> bool:
        """True if the output matrix is the embedding."""
        return self.head.weight is self.embed.weight

    def groups(self) -> list[list[nn.Module]]:
        """Return the units of sharding and gathering; see :meth:`partool_runtime.model.decoder.Decoder.groups`."""
        children = list(self.base.named_children())
        names = [name for name, _ in children]
        before = [module for _, module in children[: names.index(self._blocks)] if has_parameters(module)]
        after = [module for _, module in children[names.index(self._blocks) + 1 :] if has_parameters(module)]
        rest = [*after, self.head]
        blocks: list[list[nn.Module]] = [[block] for block in self.layers]
        return [before, *blocks, rest]

    def to_empty(self, *, device: Any, recurse: bool = True) -> HfDecoder:
        """Allocate parameters like ``nn.Module.to_empty``; tied parameters stay tied."""
        super().to_empty(device=device, recurse=recurse)
        tie(self, self.aliases)
        return self

    def forward(
        self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor, documents_BL: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sum of the losses of all tokens whose label is not −100, a scalar in float32 or wider.

        ``documents_BL`` numbers the documents of the whole sequences, which do not attend to each other; None means one
        document.
        """
        return self.loss(self.hidden(tokens_BS, documents_BL), self.head, labels_BS)

    def hidden(self, tokens_BS: torch.Tensor, documents_BL: torch.Tensor | None = None) -> torch.Tensor:
        """Return the normalised hidden state after the last layer, ``[B, S, H]``."""
        if self.draws and self.training != torch.is_grad_enabled():
            self.train(torch.is_grad_enabled())  # an evaluation has no dropout
        if self.captured:
            return graph_hidden(self.base, cast(Contexts, self.contexts), tokens_BS, documents_BL)
        return base_hidden(self.base, self.contexts, documents_BL, input_ids=tokens_BS)

    def capture(self, *, dtype: torch.dtype, length: int, training: bool, documents: bool, batch: int) -> Captured:
        """Return the graph of the base model for ``length`` tokens; raises CaptureError."""
        return capture_base(self.base, dtype=dtype, length=length, training=training, documents=documents, batch=batch)

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Return all logits, ``[B, S, V]``; only for tests and small batches."""
        return F.linear(self.hidden(tokens_BS), self.head.weight, self.head.bias)


def base_hidden(
    base: nn.Module, contexts: Contexts | None, documents_BL: torch.Tensor | None, **inputs: torch.Tensor
) -> torch.Tensor:
    """Return the last hidden state of a base model, ``[B, S, H]``.

    With ``contexts`` the layers attend through :mod:`partool_runtime.hf.attention`, and every token gets a position;
    positions start anew in each document.
    """
    if contexts is None:
        return cast(torch.Tensor, base(**inputs, use_cache=False, return_dict=True)[0])
    (x,) = inputs.values()
    tokens = contexts.tokens(x.shape[1], x.device, documents_BL)
    at = positions(x, tokens)
    with holding(tokens):
        out = base(**inputs, position_ids=at if at.dim() == 2 else at[None], use_cache=False, return_dict=True)
    return cast(torch.Tensor, out[0])


def graph_hidden(
    base: nn.Module, contexts: Contexts, tokens_BS: torch.Tensor, documents_BL: torch.Tensor | None
) -> torch.Tensor:
    """Return the last hidden state ``[B, S, H]`` of a rank's tokens, by the graph of a base model."""
    if documents_BL is None:
        return cast(torch.Tensor, base(tokens_BS, None, None))
    tokens = contexts.tokens(tokens_BS.shape[1], tokens_BS.device, documents_BL)
    at_BL = positions(tokens_BS, Tokens(tokens.length, None, tokens.documents_BL))
    return cast(torch.Tensor, base(tokens_BS, at_BL, documents_BL))


def head_loss(hidden_BSH: torch.Tensor, head: nn.Linear, labels_BS: torch.Tensor, **how: Any) -> torch.Tensor:
    """Return the sum of token losses; ``how`` is passed to :func:`partool_runtime.model.loss.loss` as keywords."""
    return loss(hidden_BSH, head.weight, labels_BS, bias_V=head.bias, **how)


def tie(module: nn.Module, names: Mapping[str, str]) -> None:
    """Tie parameters; ``names`` maps each further name of a tied parameter to the parameter's first name."""
    for name, original in names.items():
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner).register_parameter(attribute, module.get_parameter(original))


def has_parameters(module: nn.Module) -> bool:
    """Return True if a module holds a parameter."""
    return next(module.parameters(), None) is not None


def constants(causal: nn.Module) -> dict[str, float]:
    """Return the vectors that the model's own code fills with one number, as a mapping from name to number."""
    values = {}
    for prefix, module in causal.named_modules():
        vectors = {name: p for name, p in module._parameters.items() if p is not None and p.dim() == 1}
        if not vectors:
            continue
        probe = copy.copy(module)
        made = {name: nn.Parameter(torch.full(tuple(p.shape), torch.nan)) for name, p in vectors.items()}
        probe.__dict__["_parameters"] = dict(module._parameters) | made
        cast(Any, causal)._init_weights(probe)
        for name, parameter in made.items():
            first = float(parameter.detach()[0]) if parameter.numel() else 0.0
            if bool((parameter == first).all()):
                values[f"{prefix}.{name}" if prefix else name] = first
    return values
