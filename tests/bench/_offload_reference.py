"""A hand-written training loop around the host's pass: it updates after all gradients, one parameter at a time.

Engines that update early, in buckets, on other threads must agree with it to the bit. The model's weights are whole,
in the type of computation; masters and moments are plain tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool_kernels.host import Part, UpdatePass, accumulate, sums, update
from partool_kernels.reductions import total
from partool_runtime.data.batches import MicroBatch
from partool_runtime.jobs.process import configure_process
from partool_runtime.model import Decoder
from partool_runtime.optim.grad_norm import clip_factor
from partool_runtime.optim.groups import grouped
from partool_runtime.parallel.recompute import recompute
from partool_runtime.precision import COMPUTE_DTYPE, MASTER_DTYPE
from partool_runtime.weights import build, fill


def device_of(plan: Plan) -> torch.device:
    """Return the first device that the plan asks for."""
    return torch.device("cpu" if plan.devices.backend == "cpu" else "cuda")


def whole_model(plan: Plan, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Return the plan's whole model on a device, initialised, with layers recomputed as the plan says."""
    model = build(plan.model).to(dtype)
    recompute(model.layers, plan.layout.recompute, tiled=False)
    model.to_empty(device=device)
    fill(model, plan.weights, seed=plan.training.seed)
    return model


def loss_sum(model: torch.nn.Module, micro: MicroBatch, device: torch.device) -> torch.Tensor:
    """Return the sum of the losses of a micro-batch's tokens."""
    found: torch.Tensor = model(micro.tokens_BS.to(device), micro.labels_BS.to(device))
    return found


class Reference:
    """See the module; a ``Side``."""

    def __init__(self, plan: Plan) -> None:
        configure_process(plan)
        self._plan, self.device = plan, device_of(plan)
        master = MASTER_DTYPE[plan.training.precision]
        filled = whole_model(plan, master, self.device)
        self._masters = {name: p.detach().cpu().clone().view(-1) for name, p in filled.named_parameters()}
        self._model = filled.to(COMPUTE_DTYPE[plan.training.precision])
        self._groups = grouped(plan.optimizer, {name: p.ndim for name, p in self._model.named_parameters()})
        self._moments = {
            name: tuple(torch.zeros_like(tensor) for _ in self._groups.moments)
            for name, tensor in self._masters.items()
        }
        self._updates = 0

    def step(self, number: int, batch: Sequence[MicroBatch], clip: float) -> tuple[float, float]:
        """See ``Side``."""
        tokens = sum(micro.labels_BS.numel() for micro in batch)
        weight = torch.full((), 1.0, dtype=torch.float64, device=self.device) / tokens
        totals: dict[str, torch.Tensor] = {}
        whole = torch.zeros((), dtype=torch.float64, device=self.device)
        for index, micro in enumerate(batch):
            loss = loss_sum(self._model, micro, self.device)
            whole += loss.detach()
            (loss * weight.to(loss.dtype)).backward()
            self._collect(totals, first=index == 0, alone=len(batch) == 1)
        found = sums(list(totals.values()))
        norm = math.sqrt(total([block for part in found.squares for block in part]))
        lr = self._plan.optimizer.lr * lr_factor(self._plan.optimizer.schedule, number, self._plan.training.steps)
        self._updates += 1
        rules = self._groups.rules(lr, self._updates, clip_factor(norm, clip))
        for name, gradient in totals.items():
            part = Part(self._masters[name], self._moments[name], self._groups.of[name])
            update([part], step=UpdatePass([gradient], rules))
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(self._masters[name].view_as(parameter))
        return float(whole) / tokens, norm

    def _collect(self, totals: dict[str, torch.Tensor], *, first: bool, alone: bool) -> None:
        """Accumulate a micro-batch's gradients in the masters' type; a single micro-batch's are kept unconverted."""
        for name, parameter in self._model.named_parameters():
            assert parameter.grad is not None
            gradient = parameter.grad.detach().cpu().reshape(-1)
            parameter.grad = None
            if alone:
                totals[name] = gradient
                continue
            into = totals.setdefault(name, torch.empty_like(self._masters[name]))
            accumulate([into], [gradient], first=first)

    def state(self) -> dict[str, torch.Tensor]:
        """See ``Side``."""
        found = {f"weight.{name}": p.detach() for name, p in self._model.named_parameters()}
        found |= {f"master.{name}": tensor for name, tensor in self._masters.items()}
        kinds = enumerate(self._groups.moments)
        return found | {f"{kind}.{name}": moments[i] for i, kind in kinds for name, moments in self._moments.items()}

    def figures(self) -> dict[str, Any]:
        """See ``Side``."""
        return {}

    def held_bytes(self) -> dict[str, int]:
        """See ``Side``."""
        return {}
