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
from partool_runtime.dry.kinds import kind_of
from partool_runtime.dry.layer_again import Again
from partool_runtime.dry.layer_log import LayerLog
from partool_runtime.dry.layer_passes import LayersPass, Sample, repeatable
from partool_runtime.dry.layer_steps import Run, StepPasses
from partool_runtime.model import AnyDecoder, StagedDecoder

_LEAST = 5
"""Least number of equal layers of which some are repeated."""
Role = Callable[..., Any]
"""Runs a layer, given its passes and its function."""


@dataclass
class EqualLayers:
    """The layers of one kind in a stage, in order."""

    log: LayerLog
    count: int
    """Number of micro-batches of a step; 0 if each of them runs."""
    now: LayersPass = field(default_factory=LayersPass)

    def put(self, blocks: Sequence[nn.Module]) -> None:
        """Make the layers repeat each other if there are enough, and the passes of each layer repeat each other."""
        roles: list[Role] = [self._alone] * len(blocks)
        if len(blocks) >= _LEAST:
            second, last_but_one = partial(self._sampled, first=True), partial(self._sampled, first=False)
            roles = [self._first, second, *[self._replayed] * (len(blocks) - 4), last_but_one, self._alone]
            self.log.repeated |= {id(block) for block in blocks[2:-2]}
        for block, role in zip(blocks, roles, strict=True):
            passes = StepPasses(self.log, block, self.count)
            self.log.checks.append(passes.check)
            forward: Run = partial(role, passes, block.forward)
            setattr(block, "forward", forward)  # noqa: B010 - mypy forbids assigning a method

    def _alone(self, passes: StepPasses, forward: Run, *args: Any, **kwargs: Any) -> Any:
        return passes.run(forward, args, kwargs)

    def _first(self, passes: StepPasses, forward: Run, *args: Any, **kwargs: Any) -> Any:
        self.now = LayersPass()
        return passes.run(forward, args, kwargs)

    def _sampled(self, passes: StepPasses, forward: Run, *args: Any, first: bool, **kwargs: Any) -> Any:
        if not self.log.active or not repeatable(args, kwargs) or (self.now.forward is None and not first):
            return passes.run(forward, args, kwargs)
        sample = Sample(self.log, self.now, passes.block, first=first)

        def sampled(*args: Any, **kwargs: Any) -> Any:
            return sample.forward(forward, args, kwargs)

        return passes.run(sampled, args, kwargs, self.now)

    def _replayed(self, passes: StepPasses, forward: Run, *args: Any, **kwargs: Any) -> Any:
        block, made = passes.block, self.now.forward if self.log.active else None
        with self.log.record.paused():
            alike = made is not None and repeatable(args, kwargs) and made.takes(args, kwargs)
        if made is None or not alike:
            self.now.forward = None
            if self.log.active:
                self.log.repeated.discard(id(block))
            return forward(*args, **kwargs)
        x = args[0]
        holds = torch.is_grad_enabled() and self.now.holds(self.log.memory)[0]
        with self.log.record.paused():
            kept_argument = x.detach() if holds else None
        return Again(self.log, self.now, block, made, kept_arguments=[kept_argument]).run(x)


def repeat_layers(plan: Plan, model: AnyDecoder, log: LayerLog, *, passes: bool = True) -> None:
    """Make equal layers repeat each other where a stage has at least five; none if layers or their weights move.

    With ``passes`` those of a layer for equal micro-batches repeat each other, too.
    """
    if plan.layout.offload.active or not isinstance(model, StagedDecoder):
        return
    # Perturbed embeddings are two passes for a micro-batch.
    passes = passes and not plan.training.adversarial.epsilon
    count = plan.layout.derived.accumulation if passes else 0
    for blocks in stages_of(plan, model):
        kinds: defaultdict[object, list[nn.Module]] = defaultdict(list)
        for block in blocks:
            if not any(isinstance(inner, FSDPModule) for inner in block.modules() if inner is not block):
                kinds[kind_of(block)].append(block)
        for equal in kinds.values():
            EqualLayers(log, count).put(equal)


def stages_of(plan: Plan, model: AnyDecoder) -> list[list[nn.Module]]:
    """Return the layers of each stage of a rank, in order."""
    blocks = dict(model.blocks()) if isinstance(model, StagedDecoder) else {}
    bounds = plan.layout.pipeline.bounds if plan.layout.mesh.pp > 1 else [(0, plan.model.layers)]
    return [[blocks[layer] for layer in range(*each) if layer in blocks] for each in bounds]
