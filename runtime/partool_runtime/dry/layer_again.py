"""Repeats passes of layers from the record of passes that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from partool_runtime.dry.layer_log import Freed, LayerLog, UnequalLayers
from partool_runtime.dry.layer_passes import GRADIENT, Forward, LayersPass


class Again:
    """Repeats the passes of a layer that is not executed."""

    def __init__(
        self,
        log: LayerLog,
        now: LayersPass,
        block: nn.Module,
        made: Forward,
        *,
        kept_arguments: Sequence[torch.Tensor | None],
        reported_to: LayersPass | None = None,
    ) -> None:
        """Prepare the passes of ``block``, which holds ``kept_arguments`` until its backward pass.

        ``reported_to`` is given the backward pass, too.
        """
        self.log, self._now, self._block, self._made = log, now, block, made
        self._kept_arguments, self._reported_to = kept_arguments, reported_to
        self._places: list[int] = []

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Repeat the forward pass on a layer's input; return what it returns."""
        with self.log.record.paused():
            y: torch.Tensor = Repeated.apply(x, self)  # type: ignore[no-untyped-call]
            if not self._made.by_function:
                # The result of a sum is of no function of Python, nor is it a view, which FSDP2 would warn of.
                y = y + 0
            self.log.memory.follow(y, self._places[self._made.ordinal])
        return y

    def forward(self) -> torch.Tensor:
        """Record the forward pass; return a tensor like that which it returns."""
        self._places = self.log.play(self._made.recorded, {})
        return self._made.returned.made()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Record the backward pass; return the gradient of the layer's input."""
        made, memory = self._now.backward, self.log.memory
        if made is None:
            raise UnequalLayers("the backward pass of a layer that was to be executed")
        if self._reported_to is not None:
            self._reported_to.backward = made
        given = {Freed("forward", at): place for at, place in enumerate(self._places)}
        ends = {Freed("given", at): self._kept_arguments[at] for at in made.recorded.frees("given")}
        if made.recorded.frees("gradient"):
            ends[GRADIENT] = gradient
        for what, tensor in ends.items():
            if tensor is None:
                raise UnequalLayers("an argument that a layer does not hold")
            given[what] = self.log.place(tensor)
            memory.forget(tensor)
        del ends
        self._kept_arguments = ()
        places = self.log.play(made.recorded, given)
        for parameter, recorded_gradient in zip(self._block.parameters(), made.gradients, strict=True):
            if (parameter.grad is not None) != (recorded_gradient is True):
                raise UnequalLayers("gradients of layers")
            if isinstance(recorded_gradient, tuple):
                parameter.grad = recorded_gradient[1].made()
                memory.follow(parameter.grad, places[recorded_gradient[0]])
        if made.ordinal < 0:
            return gradient
        returned = made.returned.made()
        memory.follow(returned, places[made.ordinal])
        return returned


class Repeated(torch.autograd.Function):
    """A layer that is not executed."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BSH: torch.Tensor, replay: Again) -> torch.Tensor:
        """Record the forward pass."""
        cast(Any, ctx).replay = replay
        return replay.forward()

    @staticmethod
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Record the backward pass."""
        with ctx.replay.log.record.paused():
            return ctx.replay.backward(grad_BSH), None
