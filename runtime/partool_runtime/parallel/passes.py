"""Forward and backward passes over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from partool_runtime.data.batches import MicroBatch, on_device
from partool_runtime.model.multi_token import Ahead
from partool_runtime.parallel.grad_sync import GradSync
from partool_runtime.parallel.tensor.sync import TensorGradients

Timer = Callable[[str], AbstractContextManager[object]]
"""Returns a context manager that adds its time to a term of :data:`partool.plan.terms.TIME_TERMS`."""


LossOf = Callable[[MicroBatch], torch.Tensor]
"""Function that runs a forward pass over a micro-batch and returns the sum of its token losses."""
BeforePass = Callable[[MicroBatch], None]
"""Function that learns which micro-batch's loss is computed next."""
Perturb = Callable[[MicroBatch, LossOf, torch.Tensor, Timer], None]
"""Function that finds what to add to a micro-batch's embeddings in its next forward pass; its last arguments are those
of :meth:`Passes.step`."""


class Passes(Protocol):
    """Forward and backward passes over a step's micro-batches, for any distribution of the work over ranks and time."""

    def step(self, batch: Sequence[MicroBatch], weight: torch.Tensor, timer: Timer) -> torch.Tensor:
        """Set every trained parameter's ``grad`` to the gradient of ``weight`` (a scalar) times the token losses' sum.

        Return the sum of this rank's token losses, a float64 scalar. Each token of the step is counted either on one
        rank only or on all ranks of one tensor-parallel group. ``batch`` holds all micro-batches of this rank's
        data-parallel position.
        """

    def evaluate(self, batches: Iterable[MicroBatch], stopping: Callable[[], bool]) -> torch.Tensor | None:
        """Return this rank's sum of token losses without computing gradients; None once ``stopping`` returns True.

        ``stopping`` is called before each micro-batch and returns the same value on all ranks.
        """

    def close(self) -> None:
        """End helper threads and processes; the passes must not be used afterwards."""


class PlainPasses:
    """Passes that send one micro-batch after the other through a whole model.

    ``model(tokens_BS, labels_BS)`` must return the sum of the token losses. If a micro-batch numbers its documents, the
    call is ``model(tokens_BS, labels_BS, documents_BL)``. If tensor ranks hold only parts of some gradients,
    ``tensor`` sums these parts. ``perturb`` is called before the passes of each micro-batch, ``before`` before each
    forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: GradSync,
        device: torch.device,
        tensor: TensorGradients | None = None,
        perturb: Perturb | None = None,
        *,
        before: BeforePass | None = None,
    ) -> None:
        self._model, self._sync, self._device, self._tensor = model, sync, device, tensor
        self._perturb, self._before = perturb, before

    def step(self, batch: Sequence[MicroBatch], weight: torch.Tensor, timer: Timer) -> torch.Tensor:
        """See :class:`Passes`."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        for index, micro in enumerate(batch):
            if self._perturb is not None:
                self._perturb(micro, self.forward, weight, timer)
            self._sync.before_micro_batch(last=index == len(batch) - 1)
            with timer("forward"):
                loss = self.forward(micro)
                loss_sum += loss.detach()
            with timer("backward"):
                torch.autograd.backward(loss * weight.to(loss.dtype))
                self._sync.after_micro_batch()
        if self._tensor is not None:
            with timer("tensor_parallel"):
                self._tensor.add_up()
        return loss_sum

    def forward(self, micro: MicroBatch) -> torch.Tensor:
        """Return the sum of a micro-batch's token losses; the caller decides about gradients and releases."""
        if self._before is not None:
            self._before(micro)
        if (contexts := getattr(self._model, "contexts", None)) is not None:
            contexts.first_sequence = micro.first
        tokens_BS = micro.tokens_BS.to(self._device, non_blocking=True)
        labels_BS = micro.labels_BS.to(self._device, non_blocking=True)
        how = {}
        if micro.ahead is not None and torch.is_grad_enabled():
            how = {"ahead": Ahead(*(each.to(self._device, non_blocking=True) for each in micro.ahead))}
        loss: torch.Tensor = self._model(tokens_BS, labels_BS, *on_device(micro.documents_BL, self._device), **how)
        return loss

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch], stopping: Callable[[], bool]) -> torch.Tensor | None:
        """See :class:`Passes`."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        self._sync.release()  # including parameters that stay gathered between steps: the last step changed them
        for micro in batches:
            if stopping():
                self._sync.release()
                return None
            total += self.forward(micro).double()
        self._sync.release()
        return total

    def close(self) -> None:
        """See :class:`Passes`."""
