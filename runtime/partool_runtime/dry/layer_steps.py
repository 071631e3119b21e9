"""Executes four of a layer's passes in a step, and repeats what one of them did for the micro-batches between.

The first and the last micro-batch of a step run as they are: gradients appear in the first, and are reduced after the
last. What a layer did for the second micro-batch is repeated for those after it; the last but one is executed and
compared. The layers around it, the pipeline's transfers and hooks of sharding run for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from partool_runtime.dry.layer_again import Again
from partool_runtime.dry.layer_log import LayerLog, UnequalLayers
from partool_runtime.dry.layer_passes import Forward, LayersPass, Sample, given_to, repeatable

_LEAST = 5
"""Least number of a step's micro-batches of which some are repeated."""
Run = Callable[..., Any]


@dataclass
class StepPasses:
    """The forward passes of one layer in a step, in order, and the backward passes that follow from them."""

    log: LayerLog
    block: nn.Module
    count: int
    """Number of micro-batches of a step."""
    step: int = -1
    number: int = 0
    """Number of forward passes of the step so far."""
    kept: LayersPass = field(default_factory=LayersPass)
    """The second one."""
    repeated: bool = False
    """Whether a pass of this step was repeated."""

    def run(self, forward: Run, args: tuple[Any, ...], kwargs: dict[str, object], now: LayersPass | None = None) -> Any:
        """Run or repeat a forward pass; ``now`` is the pass through the stage if others repeat what is done here."""
        if not self.log.active or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        self.log.of_passes += 1
        if self.count < _LEAST:
            return self._execute(forward, args, kwargs)
        number = self._next()
        if number == 1 and repeatable(args, kwargs):
            return self._sampled(forward, args, kwargs, first=True)
        if self.kept.forward is not None and 1 < number < self.count - 1:
            if not self._alike(self.kept.forward, args, kwargs):
                self._lose()
            elif number == self.count - 2:
                return self._sampled(forward, args, kwargs, first=False)
            else:
                return self._replayed(self.kept.forward, args, kwargs, now)
        return self._execute(forward, args, kwargs)

    def check(self) -> None:
        """Raise :class:`UnequalLayers` if passes of the step were repeated and none was compared with them."""
        if self.repeated and self.number != self.count:
            raise UnequalLayers(f"{self.number} passes of a layer for {self.count} micro-batches")

    def _next(self) -> int:
        """Return the number of the pass that begins."""
        if self.step != self.log.step:
            self.step, self.number, self.kept, self.repeated = self.log.step, 0, LayersPass(), False
        self.number += 1
        return self.number - 1

    def _execute(self, forward: Run, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        self.log.passes += 1
        return forward(*args, **kwargs)

    def _sampled(self, forward: Run, args: tuple[Any, ...], kwargs: dict[str, object], *, first: bool) -> Any:
        self.log.passes += 1
        return Sample(self.log, self.kept, self.block, first=first, must=False).forward(forward, args, kwargs)

    def _alike(self, made: Forward, args: tuple[Any, ...], kwargs: dict[str, object]) -> bool:
        with self.log.record.paused():
            return repeatable(args, kwargs) and made.takes(args, kwargs)

    def _lose(self) -> None:
        """Repeat no pass from now on; raises :class:`UnequalLayers` if one was repeated."""
        if self.repeated:
            raise UnequalLayers("arguments of a layer")
        self.kept.forward = None

    def _replayed(self, made: Forward, args: tuple[Any, ...], kwargs: dict[str, object], now: LayersPass | None) -> Any:
        self.repeated = True
        holds = self.kept.holds(self.log.memory)
        if now is not None:
            now.forward, now.kept_arguments = made, holds[:1]
        with self.log.record.paused():
            given = zip(given_to(args, kwargs), holds, strict=True)
            kept_arguments = [tensor.detach() if lasts else None for tensor, lasts in given]
        return Again(self.log, self.kept, self.block, made, kept_arguments=kept_arguments, reported_to=now).run(args[0])
