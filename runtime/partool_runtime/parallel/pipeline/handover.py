"""Moves a stage's parameters, gradients and unfinished passes to another rank between two actions of a step."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from partool.schedule import Action, Schedule
from partool_runtime import deferral
from partool_runtime.parallel.pipeline.wires import Wires
from partool_runtime.torch_internals.tensors import local

Key = tuple[int, int]
"""Pair of stage and micro-batch."""


@dataclass(slots=True)
class KeptPass:
    """Tensors kept from a forward pass for its backward pass; the output is freed once it is sent."""

    x_BSH: torch.Tensor | None  # noqa: N815
    """The stage's input; None on the first stage, or if it is not needed any more."""
    edge: GradientEdge | None
    """The output's node in autograd's graph; None once the gradient of the input is computed."""
    scale: torch.Tensor | None = None
    """On the last stage, the weight of the loss's gradient."""
    put_off: list[deferral.Work] = field(default_factory=list)
    """Deferred computations of weight gradients."""


@dataclass(slots=True)
class Kept:
    """Tensors that a rank keeps between actions."""

    ready: dict[tuple[Literal["F", "B"], int, int], torch.Tensor] = field(default_factory=dict)
    """Computed or received inputs of passes, by kind of pass (F, B), stage and micro-batch."""
    outbox: dict[Action, torch.Tensor] = field(default_factory=dict)
    """Tensors that are waiting to be sent; each key is the action that sends the tensor."""
    in_flight: dict[Key, KeptPass] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Micro-batches whose passes through one stage are unfinished; every tuple is in ascending order."""

    inputs: tuple[int, ...]
    """Micro-batches whose input is available and whose forward pass is not done."""
    gradients: tuple[int, ...]
    """Micro-batches whose output gradient is available and whose backward pass is not done."""
    in_flight: tuple[int, ...]
    """Micro-batches whose forward pass is done and whose input gradient is not computed yet."""
    halfway: tuple[int, ...]
    """Micro-batches whose input gradient is computed and whose weight gradients are not computed yet."""


def unfinished(schedule: Schedule, executed: Set[Action], stage: int) -> Unfinished:
    """Return which passes of a stage are unfinished once the compute actions ``executed`` of a schedule have run."""
    batches = range(schedule.micro_batches)

    def did(kinds: str, which: int, batch: int) -> bool:
        return any(Action(kind, which, batch) in executed for kind in kinds)  # type: ignore[arg-type]

    forward = {batch for batch in batches if did("F", stage, batch)}
    back = {batch for batch in batches if did("BI", stage, batch)}
    complete = {batch for batch in batches if did("BW", stage, batch)}
    return Unfinished(
        inputs=tuple(b for b in batches if stage and b not in forward and did("F", stage - 1, b)),
        gradients=tuple(b for b in batches if b not in back and did("BI", stage + 1, b)),
        in_flight=tuple(sorted(forward - back)) if stage >= schedule.trained_from else (),
        halfway=tuple(sorted(back - complete)),
    )


class Handover:
    """Moves stages between ranks: the sender calls ``give``, the receiver ``take``, in the same order of stages."""

    def __init__(self, kept: Kept, wires: Wires) -> None:
        self._kept, self._wires = kept, wires

    def give(self, to: int, stage: int, module: nn.Module, work: Unfinished) -> None:
        """Send a stage; before that, compute its deferred weight gradients, so that their inputs need not be sent."""
        kept, wires = self._kept, self._wires
        for batch in work.halfway:
            for put_off in kept.in_flight.pop((stage, batch)).put_off:
                put_off()
        tag = Action("SEND_F", stage, 0)
        for tensor in _state(module):
            wires.send(tensor, to, tag)
        parameters = list(module.parameters())
        wires.send(torch.tensor([p.grad is not None for p in parameters], device=wires.boundary.device), to, tag)
        for parameter in parameters:
            if parameter.grad is not None:
                wires.send(local(parameter.grad).contiguous(), to, tag)
        for batch in work.inputs:
            wires.send(kept.ready.pop(("F", stage, batch)), to, Action("SEND_F", stage, batch))
        for batch in work.gradients:
            wires.send(kept.ready.pop(("B", stage, batch)), to, Action("SEND_B", stage, batch))
        for batch in work.in_flight:
            x_BSH = kept.in_flight.pop((stage, batch)).x_BSH
            if x_BSH is not None:
                wires.send(x_BSH.detach(), to, Action("SEND_F", stage, batch))

    def take(self, sender: int, stage: int, module: nn.Module, work: Unfinished) -> None:
        """Receive a stage from another rank, and the inputs from which its forward passes are recomputed."""
        kept, wires = self._kept, self._wires
        tag = Action("RECV_F", stage, 0)
        for tensor in _state(module):
            wires.receive(tensor, sender, tag)
        parameters = list(module.parameters())
        has_gradient = torch.zeros(len(parameters), dtype=torch.bool, device=wires.boundary.device)
        wires.receive(has_gradient, sender, tag)
        for parameter, has in zip(parameters, has_gradient.tolist(), strict=True):
            parameter.grad = torch.empty_like(parameter) if has else None
            if parameter.grad is not None:
                wires.receive(local(parameter.grad), sender, tag)

        def message(kind: Literal["F", "B"], batch: int) -> torch.Tensor:
            x_BSH = torch.empty(wires.boundary.shape, dtype=wires.boundary.dtype, device=wires.boundary.device)
            wires.receive(x_BSH, sender, Action(f"RECV_{kind}", stage, batch))  # type: ignore[arg-type]
            return x_BSH

        kept.ready |= {("F", stage, batch): message("F", batch) for batch in work.inputs}
        kept.ready |= {("B", stage, batch): message("B", batch) for batch in work.gradients}
        for batch in work.in_flight:
            kept.in_flight[stage, batch] = KeptPass(message("F", batch) if stage else None, None)
        for batch in work.halfway:
            kept.in_flight[stage, batch] = KeptPass(None, None)


def _state(module: nn.Module) -> Iterable[torch.Tensor]:
    tensors = [*module.parameters(), *module.buffers()]
    return [local(tensor.detach()).contiguous() for tensor in tensors]
