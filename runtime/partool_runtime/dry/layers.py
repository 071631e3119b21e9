"""Executes four of a stage's equal layers in each pass, and repeats what one of them did for the layers between.

The first and the last layer of a kind run as they are, as their inputs and gradients may come from elsewhere. What the
second layer did in a forward pass is repeated for the layers after it, and what the last but one did in a backward pass
for the layers before it. Both are executed in both passes and compared. Only the layers' own code is repeated: hooks
that gather parameters and reduce gradients run for every layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import FSDPModule

from partool_runtime.deferral import is_splitting
from partool_runtime.dry.kinds import kind_of
from partool_runtime.dry.layer_log import Begin, Freed, LayerLog, Recorded, Unequal
from partool_runtime.torch_internals.tensors import is_plain

_INPUT, _GRADIENT = Freed("input", 0), Freed("gradient", 0)
_LEAST = 5
"""Least number of equal layers of which some are repeated."""


class Like(NamedTuple):
    """A tensor's description."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        """Describe a tensor; raises :class:`Unequal` for one of a subclass."""
        if not is_plain(tensor):
            raise Unequal(f"a layer's tensor is a {type(tensor).__name__}")
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    def made(self) -> torch.Tensor:
        """Return a new tensor."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Forward:
    """A layer's forward pass."""

    recorded: Recorded
    given: Like
    returned: Like
    ordinal: int
    """Number of the allocation of what is returned."""


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
class StagePass:
    """One pass of a stage through the layers of a kind, forward and backward."""

    forward: Forward | None = None
    """What the second layer did; None if its pass cannot be repeated."""
    input_place: int = -1
    """Place of the second layer's input."""
    backward: Backward | None = None
    """What the last layer but one did."""


@dataclass
class EqualLayers:
    """The layers of one kind in a stage, in order."""

    log: LayerLog
    now: StagePass = field(default_factory=StagePass)

    def put(self, blocks: Sequence[nn.Module]) -> None:
        """Make the layers repeat each other."""
        second, last_but_one = partial(self._sampled, first=True), partial(self._sampled, first=False)
        roles = [self._first, second, *[self._again] * (len(blocks) - 4), last_but_one]
        for block, role in zip(blocks, roles, strict=False):
            forward = partial(role, block, block.forward)
            setattr(block, "forward", forward)  # noqa: B010 - mypy forbids assigning a method

    def _first(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.now = StagePass()
        return forward(*args, **kwargs)

    def _sampled(self, block: nn.Module, forward: Callable[..., Any], *args: Any, first: bool, **kwargs: Any) -> Any:
        now = self.now
        if not self.log.active or not _repeatable(args) or (now.forward is None and not first):
            return forward(*args, **kwargs)
        begin = self.log.begin()
        y = forward(*args, **kwargs)
        recorded, places = self.log.recorded(begin, {})
        with self.log.record.paused():
            self._compare(block, args[0], y, recorded, places, first=first)
        return y

    def _compare(
        self, block: nn.Module, x: torch.Tensor, y: Any, recorded: Recorded, places: list[int], *, first: bool
    ) -> None:
        now = self.now
        if not isinstance(y, torch.Tensor) or not is_plain(y) or self.log.place(y) not in places:
            if first:
                return
            raise Unequal("a layer returns something else")
        made = Forward(recorded, Like.of(x), Like.of(y), places.index(self.log.place(y)))
        if first:
            now.forward, now.input_place = made, self.log.place(x)
        elif made != now.forward:
            raise Unequal("forward passes of layers")
        if y.grad_fn is not None:
            sample = _Sample(self.log, now, block, made, places, self.log.place(x), first=first)
            y.grad_fn.register_prehook(partial(sample.begins, y.output_nr))
            x.register_hook(sample.ends)

    def _again(self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        made = self.now.forward if self.log.active else None
        with self.log.record.paused():
            alike = made is not None and _repeatable(args) and Like.of(args[0]) == made.given
        if made is None or not alike:
            self.now.forward = None
            return forward(*args, **kwargs)
        x = args[0]
        holds = self.log.memory.holds(self.now.input_place) and torch.is_grad_enabled()
        with self.log.record.paused():
            again = _Again(self.log, self.now, block, made, x.detach() if holds else None)
            return _Repeated.apply(x, again)  # type: ignore[no-untyped-call]


def _repeatable(args: tuple[Any, ...]) -> bool:
    """Return whether a layer with these arguments can be repeated: one tensor, through which all gradients flow."""
    if not args or not isinstance(args[0], torch.Tensor) or not is_plain(args[0]) or is_splitting():
        return False
    return args[0].requires_grad or not torch.is_grad_enabled()


class _Sample:
    """Records the backward pass of a layer that is executed."""

    def __init__(
        self, log: LayerLog, now: StagePass, block: nn.Module, made: Forward, places: list[int], x: int, *, first: bool
    ) -> None:
        self._log, self._now, self._block, self._first = log, now, block, first
        self._left = set(range(len(places))) - made.recorded.frees("own") - {made.ordinal}
        self._given = {place: Freed("forward", at) for at, place in enumerate(places)} | {x: _INPUT}
        self._begin = Begin(0, 0, 0)
        self._had: list[bool] = []
        self._gradient = -1

    def begins(self, number: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Note the begin of the backward pass; ``gradients`` are those of the last operator's results."""
        gradient = gradients[number]
        assert gradient is not None
        self._gradient = self._log.place(gradient)
        self._given[self._gradient] = _GRADIENT
        self._had = [parameter.grad is not None for parameter in self._block.parameters()]
        self._begin = self._log.begin()

    def ends(self, gradient: torch.Tensor) -> None:
        """Note the end; ``gradient`` is that of the layer's input."""
        recorded, places = self._log.recorded(self._begin, self._given)
        with self._log.record.paused():
            self._compare(gradient, recorded, places)

    def _compare(self, gradient: torch.Tensor, recorded: Recorded, places: list[int]) -> None:
        gradients = tuple(self._parameter(places, *each) for each in zip(self._block.parameters(), self._had, strict=True))
        place = self._log.place(gradient)
        ordinal = -1 if place == self._gradient else places.index(place)
        made = Backward(recorded, Like.of(gradient), ordinal, gradients)
        left = set(range(len(places))) - recorded.frees("own")
        expected = {each[0] for each in gradients if isinstance(each, tuple)} | {ordinal} - {-1}
        if left != expected or self._left != recorded.frees("forward"):
            raise Unequal("a layer keeps tensors beyond its backward pass")
        if not self._first:
            self._now.backward = made
        elif made != self._now.backward:
            raise Unequal("backward passes of layers")

    def _parameter(self, places: list[int], parameter: nn.Parameter, had: bool) -> tuple[int, Like] | bool:
        if had or parameter.grad is None:
            return had
        place = self._log.place(parameter.grad)
        if place not in places:
            raise Unequal("a gradient that a layer has not made")
        return places.index(place), Like.of(parameter.grad)


class _Again:
    """Repeats the passes of a layer that is not executed."""

    def __init__(
        self, log: LayerLog, now: StagePass, block: nn.Module, made: Forward, held: torch.Tensor | None
    ) -> None:
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
            raise Unequal("the backward pass of a layer that was to be executed")
        given = {Freed("forward", at): place for at, place in enumerate(self._places)}
        for what, tensor in ((_INPUT, self._held), (_GRADIENT, gradient)):
            if tensor is not None and made.recorded.frees(what.of):
                given[what] = self.log.place(tensor)
                memory.forget(tensor)
        self._held = None
        places = self.log.play(made.recorded, given)
        for parameter, found in zip(self._block.parameters(), made.gradients, strict=True):
            if (parameter.grad is not None) != (found is True):
                raise Unequal("gradients of layers")
            if isinstance(found, tuple):
                parameter.grad = found[1].made()
                memory.follow(parameter.grad, places[found[0]])
        if made.ordinal < 0:
            return gradient
        returned = made.returned.made()
        memory.follow(returned, places[made.ordinal])
        return returned


class _Repeated(torch.autograd.Function):
    """A layer that is not executed."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_BSH: torch.Tensor, again: _Again) -> torch.Tensor:
        cast(Any, ctx).again = again
        return again.forward()

    @staticmethod
    def backward(ctx: Any, grad_BSH: torch.Tensor) -> tuple[torch.Tensor, None]:
        with ctx.again.log.record.paused():
            return ctx.again.backward(grad_BSH), None


def repeat_layers(stages: Iterable[Sequence[nn.Module]], log: LayerLog) -> None:
    """Make the layers of each stage repeat each other, where a stage has at least five equal ones."""
    for blocks in stages:
        kinds: defaultdict[object, list[nn.Module]] = defaultdict(list)
        for block in blocks:
            if not any(isinstance(inner, FSDPModule) for inner in block.modules() if inner is not block):
                kinds[kind_of(block)].append(block)
        for equal in kinds.values():
            if len(equal) >= _LEAST:
                EqualLayers(log).put(equal)
