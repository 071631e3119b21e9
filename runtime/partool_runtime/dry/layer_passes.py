"""Passes of layers: executed and recorded, or repeated from another layer's record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from partool_runtime.dry.kinds import description
from partool_runtime.dry.layer_log import Begin, Freed, LayerLog, Recorded, UnequalLayers
from partool_runtime.torch_internals.tensors import is_plain

INPUT, GRADIENT = Freed("input", 0), Freed("gradient", 0)
_DEPTH = 4
"""Most levels of objects within a layer's arguments that are compared."""


class Like(NamedTuple):
    """A tensor's description."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        """Describe a tensor; raises :class:`UnequalLayers` for one of a subclass."""
        if not is_plain(tensor):
            raise UnequalLayers(f"a layer's tensor is a {type(tensor).__name__}")
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def made(self) -> torch.Tensor:
        """Return a new tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Forward:
    """A layer's forward pass."""

    recorded: Recorded
    given: Like
    others: object
    """Description of the other arguments."""
    returned: Like
    ordinal: int
    """Number of the allocation of what is returned."""

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the arguments are like those of this pass."""
        return Like.of(args[0]) == self.given and described(args, kwargs) == self.others


@dataclass(frozen=True)
class Backward:
    """A layer's backward pass."""

    recorded: Recorded
    returned: Like
    ordinal: int
    """Number of the allocation of the input's gradient; -1 if it is the output's gradient itself."""
    gradients: tuple[tuple[int, Like] | bool, ...]
    """Of each parameter: allocation and description of its new gradient, or whether it had one before."""


@dataclass
class LayersPass:
    """One pass of a stage through the layers of a kind, forward and backward."""

    forward: Forward | None = None
    """What the second layer did; None if its pass cannot be repeated."""
    input_place: int = -1
    """Place of the second layer's input."""
    backward: Backward | None = None
    """What the last layer but one did."""


def described(args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Describe the arguments of a layer after the first."""
    return description((args[1:], kwargs), _DEPTH)


class Sample:
    """Executes a layer, and records its passes."""

    def __init__(self, log: LayerLog, now: LayersPass, block: nn.Module, *, first: bool) -> None:
        """Prepare the passes of ``block``; those of the ``first`` of two samples of a pass through a stage are kept."""
        self._log, self._now, self._block, self._first = log, now, block, first
        self._left: set[int] = set()
        self._given: dict[int, Freed] = {}
        self._begin = Begin(0, 0, 0)
        self._had: list[bool] = []
        self._gradient = -1

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and record the forward pass; return what it returns."""
        begin = self._log.begin()
        y = forward(*args, **kwargs)
        recorded, places = self._log.recorded(begin, {})
        with self._log.record.paused():
            if isinstance(y, torch.Tensor) and is_plain(y) and self._log.place(y) in places:
                ordinal = places.index(self._log.place(y))
                made = Forward(recorded, Like.of(args[0]), described(args, kwargs), Like.of(y), ordinal)
                self._keep(made, args[0], y, places)
            elif not self._first:
                raise UnequalLayers("a layer returns something else")
        return y

    def _keep(self, made: Forward, x: torch.Tensor, y: torch.Tensor, places: list[int]) -> None:
        """Keep the forward pass, or compare it with the one that is kept, and wait for the backward pass."""
        place = self._log.place(x)
        if self._first:
            self._now.forward, self._now.input_place = made, place
        elif made != self._now.forward:
            raise UnequalLayers("forward passes of layers")
        if y.grad_fn is not None:
            self._left = set(range(len(places))) - made.recorded.frees("own") - {made.ordinal}
            self._given = {each: Freed("forward", at) for at, each in enumerate(places)} | {place: INPUT}
            y.grad_fn.register_prehook(partial(self.begins, y.output_nr))
            x.register_hook(self.ends)  # type: ignore[no-untyped-call]

    def begins(self, number: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Note the begin of the backward pass; ``gradients`` are those of the last operator's results."""
        gradient = gradients[number]
        if gradient is None:
            raise UnequalLayers("a layer whose result has no gradient")
        self._gradient = self._log.place(gradient)
        self._given[self._gradient] = GRADIENT
        self._had = [parameter.grad is not None for parameter in self._block.parameters()]
        self._begin = self._log.begin()

    def ends(self, gradient: torch.Tensor) -> None:
        """Note the end; ``gradient`` is that of the layer's input."""
        recorded, places = self._log.recorded(self._begin, self._given)
        with self._log.record.paused():
            self._compare(gradient, recorded, places)

    def _compare(self, gradient: torch.Tensor, recorded: Recorded, places: list[int]) -> None:
        gradients = tuple(
            self._parameter(places, *each) for each in zip(self._block.parameters(), self._had, strict=True)
        )
        place = self._log.place(gradient)
        ordinal = -1 if place == self._gradient else _number(place, places)
        made = Backward(recorded, Like.of(gradient), ordinal, gradients)
        left = set(range(len(places))) - recorded.frees("own")
        expected = {each[0] for each in gradients if isinstance(each, tuple)} | {ordinal} - {-1}
        if left != expected or self._left != recorded.frees("forward"):
            raise UnequalLayers("a layer keeps tensors beyond its backward pass")
        if not self._first:
            self._now.backward = made
        elif made != self._now.backward:
            raise UnequalLayers("backward passes of layers")

    def _parameter(self, places: list[int], parameter: nn.Parameter, had: bool) -> tuple[int, Like] | bool:
        if had or parameter.grad is None:
            return had
        return _number(self._log.place(parameter.grad), places), Like.of(parameter.grad)


def _number(place: int, places: list[int]) -> int:
    """Return the number of a gradient's allocation among those of its pass."""
    if place not in places:
        raise UnequalLayers("a gradient that a layer has not made")
    return places.index(place)


class Again:
    """Repeats the passes of a layer that is not executed."""

    def __init__(
        self, log: LayerLog, now: LayersPass, block: nn.Module, made: Forward, held: torch.Tensor | None
    ) -> None:
        """Prepare the passes of ``block``, which holds its input ``held`` until its backward pass."""
        self.log, self._now, self._block, self._made = log, now, block, made
        self._held = held
        self._places: list[int] = []

    def forward(self) -> torch.Tensor:
        """Record the forward pass; return what it returns."""
        self._places = self.log.play(self._made.recorded, {})
        y = self._made.returned.made()
        self.log.memory.follow(y, self._places[self._made.ordinal])
        return y

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Record the backward pass; return the gradient of the layer's input."""
        made, memory = self._now.backward, self.log.memory
        if made is None or made.recorded.frees("input") != ({0} if self._held is not None else set()):
            raise UnequalLayers("the backward pass of a layer that was to be executed")
        given = {Freed("forward", at): place for at, place in enumerate(self._places)}
        for what, tensor in ((INPUT, self._held), (GRADIENT, gradient)):
            if tensor is not None and made.recorded.frees(what.of):
                given[what] = self.log.place(tensor)
                memory.forget(tensor)
        self._held = None
        places = self.log.play(made.recorded, given)
        for parameter, found in zip(self._block.parameters(), made.gradients, strict=True):
            if (parameter.grad is not None) != (found is True):
                raise UnequalLayers("gradients of layers")
            if isinstance(found, tuple):
                parameter.grad = found[1].made()
                memory.follow(parameter.grad, places[found[0]])
        if made.ordinal < 0:
            return gradient
        returned = made.returned.made()
        memory.follow(returned, places[made.ordinal])
        return returned


class Repeated(torch.autograd.Function):
    """A layer that is not executed."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BSH: torch.Tensor, again: Again) -> torch.Tensor:
        """Record the forward pass."""
        cast(Any, ctx).again = again
        return again.forward()

    @staticmethod
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Record the backward pass."""
        with ctx.again.log.record.paused():
            return ctx.again.backward(grad_BSH), None
