"""Passes of layers that are executed and recorded; :mod:`partool_runtime.dry.layer_again` repeats them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from partool_runtime.deferral import is_splitting
from partool_runtime.dry.kinds import description
from partool_runtime.dry.layer_log import Begin, Freed, LayerLog, Recorded, UnequalLayers
from partool_runtime.dry.memory import MemoryRecord
from partool_runtime.torch_internals.tensors import is_plain, tensors_in

GRADIENT = Freed("gradient", 0)
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
    by_function: bool
    """Whether it comes from a function of Python: torch makes one view more of a stage's result that does."""

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, object]) -> bool:
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
    """Passes that are alike: of a stage's layers of a kind, or of a layer's micro-batches."""

    forward: Forward | None = None
    """What the second layer did; None if its pass cannot be repeated."""
    given: tuple[int, ...] = ()
    """Places of the second layer's input and other arguments; -1 for those that are not recorded."""
    backward: Backward | None = None
    """What the last layer but one did."""
    kept_arguments: tuple[bool, ...] | None = None
    """Which of ``given`` last until the second layer's backward pass; None as long as nobody has asked."""

    def holds(self, memory: MemoryRecord) -> tuple[bool, ...]:
        """Return :attr:`held`; ask after the second layer has run, and no code of the pass holds its arguments."""
        if self.kept_arguments is None:
            self.kept_arguments = self._now(memory)
        return self.kept_arguments

    def backward_begins(self, memory: MemoryRecord) -> None:
        """Note what of the second layer's arguments lasts; raises :class:`UnequalLayers` if others know otherwise."""
        kept_now = self._now(memory)
        if self.kept_arguments not in (None, kept_now):
            raise UnequalLayers("the arguments of a layer are released by others")
        self.kept_arguments = kept_now

    def _now(self, memory: MemoryRecord) -> tuple[bool, ...]:
        return tuple(place >= 0 and memory.holds(place) for place in self.given)


def given_to(args: tuple[Any, ...], kwargs: dict[str, object]) -> list[torch.Tensor]:
    """Return a layer's input and the other tensors that it is given."""
    return [args[0], *(each for each in tensors_in((args[1:], kwargs)) if is_plain(each))]


def repeatable(args: tuple[Any, ...], kwargs: dict[str, object]) -> bool:
    """Return whether a layer with these arguments can be repeated: all gradients flow through the first of them."""
    if not args or not isinstance(args[0], torch.Tensor) or not is_plain(args[0]) or is_splitting():
        return False
    if any(each.requires_grad for each in tensors_in((args[1:], kwargs))):
        return False
    return args[0].requires_grad or not torch.is_grad_enabled()


def described(args: tuple[Any, ...], kwargs: dict[str, object]) -> object:
    """Describe the arguments of a layer after the first."""
    return description((args[1:], kwargs), _DEPTH)


class Sample:
    """Executes a layer, and records its passes."""

    def __init__(self, log: LayerLog, now: LayersPass, block: nn.Module, *, first: bool, must: bool = True) -> None:
        """Prepare the passes of ``block``; those of the ``first`` of two samples are kept.

        Unless it ``must``, a first sample that cannot be repeated is not kept, and arguments may end in its backward
        pass: all layers of a stage are given the same ones, so that those between two samples end none.
        """
        self._log, self._now, self._block, self._first, self._must = log, now, block, first, must
        self._unfreed: set[int] = set()
        self._given: dict[int, Freed] = {}
        self._begin = Begin(0, 0, 0)
        self._had: list[bool] = []
        self._gradient = -1

    def forward(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        """Run and record the forward pass; return what it returns."""
        begin = self._log.begin()
        y = forward(*args, **kwargs)
        try:
            self._record(begin, args, kwargs, y)
        except UnequalLayers:
            if self._must or not self._first:
                raise
        return y

    def _record(self, begin: Begin, args: tuple[Any, ...], kwargs: dict[str, object], y: Any) -> None:
        recorded, places = self._log.recorded(begin, {})
        with self._log.record.paused():
            if isinstance(y, torch.Tensor) and is_plain(y) and self._log.place(y) in places:
                ordinal = places.index(self._log.place(y))
                function = isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)
                made = Forward(recorded, Like.of(args[0]), described(args, kwargs), Like.of(y), ordinal, function)
                given = given_to(args, kwargs)
                self._keep(made, given[:1] if self._must else given, y, places)
            elif not self._first:
                raise UnequalLayers("a layer returns something else")

    def _keep(self, made: Forward, given: list[torch.Tensor], y: torch.Tensor, places: list[int]) -> None:
        """Keep the forward pass, or compare it with the one that is kept, and wait for the backward pass."""
        argument_places = [self._log.memory.place(each) for each in given]
        if self._first:
            self._now.forward, self._now.given = (
                made,
                tuple(-1 if place is None else place for place in argument_places),
            )
        elif made != self._now.forward:
            raise UnequalLayers("forward passes of layers")
        if y.grad_fn is not None:
            self._unfreed = set(range(len(places))) - made.recorded.frees("own") - {made.ordinal}
            self._given = {each: Freed("forward", at) for at, each in enumerate(places)}
            for at, place in enumerate(argument_places):
                if place is not None:
                    self._given.setdefault(place, Freed("given", at))
            y.grad_fn.register_prehook(partial(self.begins, y.output_nr))
            given[0].register_hook(self.ends)  # type: ignore[no-untyped-call]

    def begins(self, number: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Note the begin of the backward pass; ``gradients`` are those of the last operator's results."""
        gradient = gradients[number]
        if gradient is None:
            raise UnequalLayers("a layer whose result has no gradient")
        if self._first:
            self._now.backward_begins(self._log.memory)
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
        unfreed = set(range(len(places))) - recorded.frees("own")
        expected = {each[0] for each in gradients if isinstance(each, tuple)} | {ordinal} - {-1}
        if unfreed != expected or self._unfreed != recorded.frees("forward"):
            raise UnequalLayers("a layer keeps tensors beyond its backward pass")
        if self._now.backward is None:
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
