"""What the executors of schedules share with the rest: a stage, its gradient exchange, the log of actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn

from partool.schedule import Action
from partool_runtime import deferral
from partool_runtime.data.batches import MicroBatch


def split_linears(module: nn.Module) -> None:
    """Let every ``nn.Linear`` under a module put its gradients off; a second call changes nothing.

    What else has weights (norms, embeddings) has its gradients in the first half: they are cheap. Such a module cannot
    be compiled as a whole: a graph has no halves.
    """
    for child in module.modules():
        if (
            isinstance(child, nn.Linear)
            and type(child).forward is nn.Linear.forward
            and "forward" not in child.__dict__
        ):
            setattr(child, "forward", partial(_forward, child))  # noqa: B010 - mypy forbids assigning a method


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return deferral.linear(x, module.weight, module.bias)


class Stage(Protocol):
    """Consecutive layers of a model: the first stage takes tokens, the last one yields the sum of token losses."""

    @property
    def module(self) -> nn.Module:
        """Module that holds the parameters."""

    def __call__(self, x_BSH: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
        """Return the hidden state ``[B, S, H]``, or on the last stage a scalar; the first stage gets no ``x_BSH``."""


class StageSync(Protocol):
    """Gathers, reductions and releases of a stage's parameters and gradients around actions."""

    def before(self, action: Action) -> None:
        """Prepare a compute action."""

    def after(self, action: Action) -> None:
        """Follow up on a compute action: the last backward action of a stage is where gradients are reduced."""

    def finish(self) -> None:
        """End a step, or an evaluation: nothing stays gathered, all reductions are complete."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Tensor that passes between stages: shape ``[B, S, H]``, type and device, the same at each boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Done:
    """One executed action on the host's clock (``time.perf_counter``); on a GPU, of the device's work."""

    action: Action
    start_s: float
    stop_s: float
    """For compute, when it ended; for a receive, when its data were there; for a send, when it was handed over."""
    waited_s: float = 0.0
    """Before a compute action: how long the rank stood still for its input."""


Watch = Callable[[Done], None]
"""Told of every action once its times are known."""
