"""Interfaces that executors of schedules use: stages, their gradient exchange, and records of executed actions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from partool.schedule import Action
from partool_runtime.data.batches import MicroBatch
from partool_runtime.hf.patches import has_patched_forward
from partool_runtime.model.projection import as_linear


def split_linears(module: nn.Module) -> None:
    """Make every ``nn.Linear`` under a module defer its weight gradients; a second call changes nothing.

    Other modules with weights (norms, embeddings) compute their cheap gradients together with the input gradients. A
    module with deferred gradients cannot be compiled as a whole, because a compiled backward graph cannot be split in
    two.
    """
    for child in module.modules():
        if isinstance(child, nn.Linear) and type(child).forward is nn.Linear.forward and not has_patched_forward(child):
            as_linear(child)


class Stage(Protocol):
    """Consecutive layers of a model: the first stage takes tokens, the last one yields the sum of token losses."""

    @property
    def module(self) -> nn.Module:
        """Module that holds the parameters."""

    def __call__(self, x_BSH: torch.Tensor | None, micro: MicroBatch) -> torch.Tensor:
        """Return the hidden state ``[B, S, H]``, or on the last stage a scalar; the first stage gets no ``x_BSH``."""


class StageSync(Protocol):
    """Gathers and releases a stage's parameters, and reduces its gradients, before and after actions."""

    def before(self, action: Action) -> None:
        """Prepare a compute action."""

    def after(self, action: Action) -> None:
        """Follow up on a compute action: after a stage's last backward action, reduce its gradients."""

    def finish(self) -> None:
        """End a step or an evaluation: release all gathered parameters and wait for all reductions."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Shape ``[B, S, H]``, type and device of the tensors between stages; they are equal at all boundaries."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Done:
    """Times of one executed action, in seconds of the host's clock (``time.perf_counter``), also for work of a GPU."""

    action: Action
    start_s: float
    stop_s: float
    """When a compute action ended, the data of a receive arrived, or a send was handed to the backend."""
    waited_s: float = 0.0
    """Seconds that the rank was idle before a compute action, waiting for the action's input."""


Watch = Callable[[Done], None]
"""Function that is called with every action once its times are known."""
