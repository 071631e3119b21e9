"""Executes four of a stage's equal layers in each pass, and repeats what one of them did for the layers between.

The first and the last layer of a kind run as they are, as their inputs and gradients may come from elsewhere. What the
second layer did in a forward pass is repeated for the layers after it, and what the last but one did in a backward pass
for the layers before it. Both are executed in both passes and compared. Only the layers' own code is repeated: hooks
that gather parameters and reduce gradients run for every layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from partool.plan.types import Plan
from partool_runtime.deferral import is_splitting
from partool_runtime.dry.kinds import kind_of
from partool_runtime.dry.layer_log import LayerLog
from partool_runtime.dry.layer_passes import Again, LayersPass, Repeated, Sample
from partool_runtime.model import AnyDecoder, StagedDecoder
from partool_runtime.torch_internals.tensors import is_plain, tensors_in

_LEAST = 5
"""Least number of equal layers of which some are repeated."""


@dataclass
class EqualLayers:
    """The layers of one kind in a stage, in order."""

    log: LayerLog
    now: LayersPass = field(default_factory=LayersPass)

    def put(self, blocks: Sequence[nn.Module]) -> None:
        """Make the layers repeat each other."""
        second, last_but_one = partial(self._sampled, first=True), partial(self._sampled, first=False)
        roles: list[Callable[..., Any]] = [self._first, second, *[self._again] * (len(blocks) - 4), last_but_one]
        self.log.repeated |= {id(block) for block in blocks[2:-2]}
        for block, role in zip(blocks, roles, strict=False):
            forward: Callable[..., Any] = partial(role, block, block.forward)
            setattr(block, "forward", forward)  # noqa: B010 - mypy forbids assigning a method

    def _first(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.now = LayersPass()
        return forward(*args, **kwargs)

    def _sampled(self, block: nn.Module, forward: Callable[..., Any], *args: Any, first: bool, **kwargs: Any) -> Any:
        if not self.log.active or not _repeatable(args, kwargs) or (self.now.forward is None and not first):
            return forward(*args, **kwargs)
        return Sample(self.log, self.now, block, first=first).forward(forward, args, kwargs)

    def _again(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = self.now.forward if self.log.active else None
        with self.log.record.paused():
            alike = made is not None and _repeatable(args, kwargs) and made.takes(args, kwargs)
        if made is None or not alike:
            self.now.forward = None
            if self.log.active:
                self.log.repeated.discard(id(block))
            return forward(*args, **kwargs)
        x = args[0]
        holds = self.log.memory.holds(self.now.input_place) and torch.is_grad_enabled()
        with self.log.record.paused():
            again = Again(self.log, self.now, block, made, x.detach() if holds else None)
            return Repeated.apply(x, again)  # type: ignore[no-untyped-call]


def _repeatable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a layer with these arguments can be repeated: all gradients flow through the first of them."""
    if not args or not isinstance(args[0], torch.Tensor) or not is_plain(args[0]) or is_splitting():
        return False
    if any(each.requires_grad for each in tensors_in((args[1:], kwargs))):
        return False
    return args[0].requires_grad or not torch.is_grad_enabled()


def repeat_layers(plan: Plan, model: AnyDecoder, log: LayerLog) -> None:
    """Make equal layers repeat each other where a stage has at least five; none if layers or their weights move."""
    if plan.layout.offload.active or not isinstance(model, StagedDecoder):
        return
    for blocks in stages_of(plan, model):
        kinds: defaultdict[object, list[nn.Module]] = defaultdict(list)
        for block in blocks:
            if not any(isinstance(inner, FSDPModule) for inner in block.modules() if inner is not block):
                kinds[kind_of(block)].append(block)
        for equal in kinds.values():
            if len(equal) >= _LEAST:
                EqualLayers(log).put(equal)


def stages_of(plan: Plan, model: AnyDecoder) -> list[list[nn.Module]]:
    """Return the layers of each stage of a rank, in order."""
    blocks = dict(model.blocks()) if isinstance(model, StagedDecoder) else {}
    bounds = plan.layout.pipeline.bounds if plan.layout.mesh.pp > 1 else [(0, plan.model.layers)]
    return [[blocks[layer] for layer in range(*each) if layer in blocks] for each in bounds]
