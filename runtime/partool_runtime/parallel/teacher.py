"""A frozen teacher that goes over each micro-batch before its student (``training.distill``; docs/guide/experts.md).

The teacher keeps its last hidden state, not its logits: the student's loss computes the logits of both models for a few
positions at a time. Until then the teacher's output matrix stays gathered.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from partool.spec.distill import DistillSpec
from partool_runtime.data.batches import IGNORED_LABEL, MicroBatch
from partool_runtime.losses import put_around_loss
from partool_runtime.mesh import Ranks
from partool_runtime.model import AnyDecoder
from partool_runtime.model.distillation import Teaching
from partool_runtime.parallel.comm import sum_over
from partool_runtime.parallel.grad_sync import GradSync
from partool_runtime.parallel.passes import PlainPasses
from partool_runtime.torch_internals.fsdp import gathered_bytes


class Teacher:
    """The forward passes of a teacher, what they give the student's loss, and the divergence of both models.

    ``model`` is a rank's part of the teacher, frozen and with memory; ``sync`` gathers its parameters. The first
    ``steps`` optimizer steps, counted from 0, have the teacher. Passes without gradients, such as those of
    validations, never have one.
    """

    def __init__(self, spec: DistillSpec, model: AnyDecoder, sync: GradSync, ranks: Ranks, *, steps: int) -> None:
        self._spec, self._ranks, self.steps = spec, ranks, steps
        self._model: AnyDecoder | None = model
        self._sync: GradSync | None = sync
        self._passes: PlainPasses | None = PlainPasses(model, sync, ranks.device)
        self._vocabulary = model.config.vocab
        self._teaching: Teaching | None = None
        self._sums = self._zeros()
        """Sum of the divergences of labelled positions since they were last read, and the number of positions."""
        put_around_loss(model, lambda before: self._take)

    @property
    def model(self) -> AnyDecoder | None:
        """The teacher; None once it has been dropped."""
        return self._model

    def gathered_bytes(self) -> int:
        """Return the bytes of the teacher's parameters that are gathered."""
        return 0 if self._model is None else sum(map(gathered_bytes, self._model.roots()))

    def at(self, step: int) -> None:
        """Drop the teacher, and free its memory, if optimizer step ``step``, counted from 0, has none any more."""
        if self._model is None or step < self.steps:
            return
        self._model = self._sync = self._passes = None
        gc.collect()  # modules and their hooks refer to each other

    def begin(self, micro: MicroBatch) -> None:
        """Let the teacher go over the micro-batch whose forward pass is next, if that pass has gradients."""
        self._teaching = None
        if self._passes is None or not torch.is_grad_enabled():
            return
        with torch.no_grad():
            self._passes.forward(micro)

    def around(self, before: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the student's loss: ``before``, where the teacher went over the micro-batch with the divergence."""

        def loss(hidden: torch.Tensor, weight_VH: torch.Tensor, labels_BS: torch.Tensor, **how: Any) -> torch.Tensor:
            teaching, self._teaching = self._teaching, None
            if teaching is None:
                return before(hidden, weight_VH, labels_BS, **how)
            total = before(hidden, weight_VH, labels_BS, **how, teaching=teaching)
            assert teaching.kl is not None, "the loss has computed it"
            self._sums += torch.stack([teaching.kl.detach().double(), (labels_BS != IGNORED_LABEL).sum().double()])
            if self._sync is not None:
                self._sync.release()
            return total

        loss.__wrapped__ = before  # type: ignore[attr-defined]
        return loss

    def figures(self) -> dict[str, float]:
        """Return the mean divergence of all ranks' labelled positions since the last call; a collective of all ranks.

        Empty if the teacher has gone over none.
        """
        sums, self._sums = self._sums, self._zeros()
        if self._ranks.tp.place:  # tensor ranks have the same sums, which one of them counts
            sums.zero_()
        kl, positions = sum_over(sums, self._ranks.world).tolist()
        return {"kl": kl / positions} if positions else {}

    def _take(self, hidden: torch.Tensor, weight_VH: torch.Tensor, labels_BS: torch.Tensor, **how: Any) -> torch.Tensor:
        """Keep what the student's loss needs, in the place of the teacher's loss."""
        del labels_BS
        spec = self._spec
        self._teaching = Teaching(spec.weight, spec.temperature, self._vocabulary, hidden, weight_VH, how.get("bias_V"))
        return hidden.new_zeros(())

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(2, dtype=torch.float64, device=self._ranks.device)
