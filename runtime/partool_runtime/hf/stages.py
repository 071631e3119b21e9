"""The pipeline stages of a transformers model that one rank holds; stages run the model's own forward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from partool.plan.types import HfModel, Plan
from partool.spec.adapter import LowRank
from partool.spec.model import ModelConfig
from partool_runtime.building import frozen_names
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.adapters import add_to_transformers
from partool_runtime.hf.building import base_name, blocks_name, build_causal, draws_random
from partool_runtime.hf.cutting import cut_base, returns_tuples
from partool_runtime.hf.experts import plain_experts
from partool_runtime.hf.model import (
    HfPart,
    LossOfHead,
    base_hidden,
    has_parameters,
    head_loss,
    tie,
)
from partool_runtime.hf.numerics import stay_wide
from partool_runtime.model.decoder import Contexts

Span = tuple[int, int]
"""Range of layers: the number of the first layer, and the number after the last layer."""


class HfTied(nn.Module):
    """Embedding and output matrix with one weight, used by two stages of a rank; both stages call this module."""

    def __init__(self, embed: nn.Embedding, head: nn.Linear) -> None:
        super().__init__()
        self.embed, self.head = embed, head
        self.loss: LossOfHead = head_loss

    def forward(self, x: torch.Tensor, labels_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Return embeddings ``[B, S, H]`` of tokens ``x``; with labels, the sum of the token losses of states ``x``."""
        return cast(torch.Tensor, self.embed(x)) if labels_BS is None else self.loss(x, self.head, labels_BS)

    def to_empty(self, *, device: Any, recurse: bool = True) -> HfTied:
        """Allocate the parameter like ``nn.Module.to_empty``; the parameter stays tied."""
        super().to_empty(device=device, recurse=recurse)
        tie(self, {"head.weight": "embed.weight"})
        return self


class HfStage(nn.Module):
    """A pipeline stage of consecutive layers; the first also has the embedding, the last also norm, head and loss."""

    def __init__(self, base: nn.Module, head: nn.Linear | None, *, blocks: str, layers: range, first: bool) -> None:
        super().__init__()
        self.base = base
        self.head = head
        self.first = first
        self.last = False
        self.shared: tuple[HfTied, ...] = ()
        """The tied embedding and head, if another stage of this rank uses them, too; otherwise empty."""
        self.loss: LossOfHead = head_loss
        self.contexts: Contexts | None = None
        """See :class:`HfPart`."""
        self._blocks_name, self._layers = blocks, layers
        self._draws = draws_random(self)

    def forward(
        self, x: torch.Tensor, labels_BS: torch.Tensor | None = None, documents_BL: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map tokens ``[B, S]`` (first stage) or ``[B, S, H]`` to ``[B, S, H]``, or on the last stage to the loss.

        Only the last stage takes labels; ``documents_BL`` numbers the documents of the whole sequences.
        """
        if self._draws and self.training != torch.is_grad_enabled():
            self.train(torch.is_grad_enabled())  # an evaluation has no dropout
        if self.first and self.shared:
            x = self.shared[0](x)
        tokens = self.first and not self.shared
        inputs = {"input_ids" if tokens else "inputs_embeds": x}
        hidden_BSH = base_hidden(self.base, self.contexts, documents_BL, **inputs)
        if not self.last:
            return hidden_BSH
        assert labels_BS is not None
        if self.shared:
            return cast(torch.Tensor, self.shared[0](hidden_BSH, labels_BS))
        return self.loss(hidden_BSH, cast(nn.Linear, self.head), labels_BS)

    def groups(self) -> list[list[nn.Module]]:
        """Return the units of sharding and gathering in order of use, except the last unit of the last stage."""
        children = dict(self.base.named_children())
        names = list(children)
        before = [children[name] for name in names[: names.index(self._blocks_name)] if has_parameters(children[name])]
        layers = cast(nn.ModuleList, children[self._blocks_name])
        blocks: list[list[nn.Module]] = [[layers[number]] for number in self._layers]
        return [before, *blocks] if before else blocks


class HfParts(HfPart):
    """The stages of a model that one rank holds, behind the interface of ``DecoderParts``.

    Child modules form the model's own tree without modules of other ranks, so that names are equal to names in the
    whole model; the child modules are never called. With a tied embedding the rank of the first stage and the rank of
    the last stage both hold the weight, under the embedding's name. If one rank holds both stages, the weight is one
    parameter.
    """

    def __init__(
        self,
        hf: HfModel,
        config: ModelConfig,
        spans: Sequence[Span],
        mine: Sequence[int],
        *,
        wide: bool,
        adapter: LowRank | None = None,
    ) -> None:
        """``spans`` lists the layers of each stage, ``mine`` the numbers of this rank's stages; ``wide`` means float64.

        Raises ConfigurationError PT646 if the model cannot be cut into stages.
        """
        super().__init__()
        causal = build_causal(Path(hf.path), hf.code_hash)
        plain_experts(causal, wide)
        add_to_transformers(causal, adapter)
        self.config = config
        self._describe(causal, config.layers)
        tuples = returns_tuples(causal, config.layers)
        if isinstance(tuples, str):
            fix = "Plan it again with the transformers that is installed here, or use one stage."
            raise ConfigurationError("PT646", f"{type(causal).__name__} cannot be cut into stages: {tuples}", fix)
        base, last = causal.get_submodule(self.base_prefix), len(spans) - 1
        head = cast(nn.Linear, causal.get_submodule(self.head_name))
        embed = cast(nn.Embedding, cast(Any, base).get_input_embeddings())
        tied, first_here, last_here = head.weight is embed.weight, 0 in mine, last in mine
        shared = HfTied(embed, head) if tied and first_here and last_here and last > 0 else None
        self._stages = {
            stage: _stage(
                base, self._blocks, range(*spans[stage]), shared, head=head if stage == last else None, tuples=tuples
            )
            for stage in mine
        }
        local_layers = sorted(layer for stage in mine for layer in range(*spans[stage]))
        layers = cast(nn.ModuleList, base.get_submodule(self._blocks))
        self._numbered = {layer: layers[layer] for layer in local_layers}
        # In tuples, so that the modules are not registered.
        self._head = (head if last_here else None,)
        self._shared = (shared,)
        self._embed = (embed if first_here else head if tied and last_here else None,)
        self.add_module(self.base_prefix, self._tree(base, embed, first_here, last_here))
        if last_here and (first_here or not tied):
            self.add_module(self.head_name, head)
        self.copies = frozenset(self.aliases.values() if self._embed[0] is head else ())
        for module in (*(stage.base for stage in self.stages.values()), *self._numbered.values()):
            stay_wide(module)

    @property
    def stages(self) -> dict[int, HfStage]:
        """See :class:`partool_runtime.model.decoder.StagedDecoder`."""
        return self._stages

    @property
    def loss(self) -> LossOfHead:
        """Function that computes the loss; tensor parallelism replaces it."""
        return self._loss

    @loss.setter
    def loss(self, function: LossOfHead) -> None:
        self._loss = function
        for stage in self.stages.values():
            stage.loss = function
        if self.shared is not None:
            self.shared.loss = function

    @property
    def head_module(self) -> nn.Linear | None:
        """The output matrix, where this rank holds it."""
        return self._head[0]

    @property
    def embed(self) -> nn.Module | None:
        """The module of this rank that holds the embedding's weight."""
        return self._embed[0]

    @property
    def shared(self) -> HfTied | None:
        """The tied embedding, where two stages of this rank use it."""
        return self._shared[0]

    def blocks(self) -> Iterator[tuple[int, nn.Module]]:
        """Yield this rank's layers with their numbers."""
        return iter(self._numbered.items())

    def _tree(self, base: nn.Module, embed: nn.Module, first: bool, last: bool) -> nn.Module:
        """Return the modules of the base model that this rank holds, under their names in the base model."""
        tree, names = nn.Module(), list(base._modules)
        place = names.index(self._blocks)
        for number, (name, module) in enumerate(base.named_children()):
            if number == place:
                tree.add_module(name, nn.ModuleDict({str(layer): block for layer, block in self._numbered.items()}))
            elif module is embed:
                tree.add_module(name, self.embed)
            elif not has_parameters(module) or (first if number < place else last):
                tree.add_module(name, module)  # a module without parameters is kept so that its buffers are cast, too
        return tree


def _stage(
    base: nn.Module, blocks: str, layers: range, shared: HfTied | None, *, head: nn.Linear | None, tuples: bool
) -> HfStage:
    part = cut_base(base, blocks, layers, as_tuple=tuples)
    first, ends = layers.start == 0, head is not None
    if shared is not None and first:
        for name, module in base.named_children():
            if module is shared.embed:
                part._modules[name] = nn.Identity()
    stage = HfStage(part, None if shared is not None else head, blocks=blocks, layers=layers, first=first)
    stage.last = ends
    stage.shared = (shared,) if shared is not None and (first or ends) else ()
    return stage


def first_trained_stage(plan: Plan) -> int:
    """Return the number of the first stage that holds a trainable parameter."""
    if not plan.frozen or plan.hf is None:
        return 0
    causal = build_causal(Path(plan.hf.path), plan.hf.code_hash)
    add_to_transformers(causal, None if plan.adapter is None else plan.adapter.form)
    names = [name for name, _ in causal.named_parameters()]
    base = base_name(causal)
    children = [name for name, _ in causal.get_submodule(base).named_children()]
    blocks = blocks_name(causal.get_submodule(base), plan.model.layers)
    before = {f"{base}.{name}" for name in children[: children.index(blocks)]}
    frozen = frozen_names(names, plan.frozen)

    def stage_of(name: str) -> int:
        layer = re.match(rf"{re.escape(base)}\.{blocks}\.(\d+)\.", name)
        if layer is None:
            return 0 if any(name.startswith(f"{one}.") for one in before) else len(plan.layout.pipeline.bounds) - 1
        number = int(layer[1])
        return next(stage for stage, (first, stop) in enumerate(plan.layout.pipeline.bounds) if first <= number < stop)

    return min(stage_of(name) for name in names if name not in frozen)
