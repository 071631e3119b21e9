"""An optimizer step, which consists of passes over all micro-batches, gradient check, clipping and update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from partool.plan.learning_rate import lr_factor
from partool.spec.training import OptimizerSpec, TrainingSpec
from partool_runtime.data.batches import MicroBatch
from partool_runtime.errors import ConfigurationError
from partool_runtime.jobs.losses import counts_of, labels_of, loss_until, sharers
from partool_runtime.mesh import Ranks
from partool_runtime.model.multi_token import MultiTokenLosses
from partool_runtime.optim.agreement import Flags, agreement
from partool_runtime.optim.grad_norm import GradientCheck, Mode, clip_factor
from partool_runtime.optim.types import Optimizer
from partool_runtime.parallel.expert.load import ExpertLoads
from partool_runtime.parallel.passes import Passes, Timer
from partool_runtime.parallel.preferences import PreferenceLoss
from partool_runtime.parallel.teacher import Teacher
from partool_runtime.precision import LossScaler


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step, equal on all ranks."""

    loss: float
    """Mean loss over the step's tokens, or pairs of answers, in nats."""
    grad_norm: float
    """Gradient norm before clipping; NaN if a gradient was not finite."""
    lr: float
    tokens: int
    """Number of tokens with a label, over all ranks."""
    skipped: bool
    """True if the weights were not updated because a gradient was not finite."""
    flags: tuple[float, ...] = ()
    """Sums of the ranks' flags."""
    multi_token_loss: float | None = None
    """Mean loss of the predictions of further tokens, over the step's tokens and the modules, in nats; None without."""
    local: bool = False
    """True if data-parallel ranks exchanged nothing: loss, norm and tokens are those of this rank's copy of the model,
    and flags are those of nobody."""


class Stepper:
    """Runs optimizer steps.

    The loss is divided by the labels of the whole step, over all ranks and micro-batches; that of pairs of answers by
    the pairs.
    """

    def __init__(
        self,
        passes: Passes,
        optimizer: Optimizer,
        scaler: LossScaler,
        *,
        ranks: Ranks,
        training: TrainingSpec,
        spec: OptimizerSpec,
        kernels: Mode = "auto",
        loads: ExpertLoads | None = None,
        preferences: PreferenceLoss | None = None,
        teacher: Teacher | None = None,
        multi_token: MultiTokenLosses | None = None,
    ) -> None:
        self.teacher = teacher
        """The model whose predictions the trained one learns; None without one."""
        self._passes = passes
        self._multi_token = multi_token
        self.preferences = preferences
        """The objective of pairs of answers; None where each token counts by itself."""
        self.loads = loads
        """Loads of the experts; None for a dense model."""
        self.optimizer = optimizer
        self._scaler = scaler
        self._ranks = ranks
        self._training = training
        self._spec = spec
        self._kernels = kernels
        self._agreement = agreement(ranks)
        self.nonfinite_in_row = 0
        """Number of skipped steps since the last step that updated the weights."""

    def step(
        self, step: int, batch: Sequence[MicroBatch], timer: Timer, flags: Callable[[], Sequence[float]] = tuple
    ) -> StepResult:
        """Do step ``step``, counted from 0, with this rank's micro-batches.

        ``flags`` are read after the passes and summed over all ranks together with the gradients' norm.
        Raises ConfigurationError PT630 on all ranks if ``max_nonfinite_steps`` steps in a row had gradients that were
        not finite; a restart would only lead to the same state.
        """
        with timer("overhead"):
            if self.teacher is not None:
                self.teacher.at(step)
            self._agreement.begin(step)
            units, tokens = self._counted(batch)
            lr = self._spec.lr * lr_factor(self._spec.schedule, step, self._training.steps)
            self.optimizer.begin(lr, 1.0 / self._scaler.scale)
            if self.loads is not None:
                all_tokens = sum(micro.tokens_BS.numel() for micro in batch) * self._ranks.dp.size
                self.loads.begin(self._scaler.scale, all_tokens)
        loss_sum = self._passes.step(batch, self._scaler.scale / units.clamp(min=1), timer)
        scale = self._scaler.scale
        with timer(self.optimizer.term):
            sums = self.optimizer.sums(self._kernels)
        with timer("optimizer"):
            check = self._agreement.check(sums, loss_sum, self._with_multi_token(flags))
            # Read here, where the host waits anyway, and not after the update.
            count = int(tokens)
            unit_count = count if units is tokens else int(units)
        with timer(self.optimizer.term):
            self._end(check, lr, scale)
        self._count_nonfinite(step, check.finite)
        loss, norm = check.loss_sum / max(unit_count, 1), check.norm / scale
        flag_sums, further = self._without_multi_token(check.flags, unit_count)
        return StepResult(loss, norm, lr, count, not check.finite, flag_sums, further, local=self._agreement.local)

    def _with_multi_token(self, flags: Callable[[], Sequence[float]]) -> Flags:
        """Return flags whose last is the sum of this rank's losses of further tokens, if the model has any."""
        multi_token = self._multi_token
        return flags if multi_token is None else lambda: [*flags(), multi_token.take()]

    def _without_multi_token(self, flags: tuple[float, ...], units: int) -> tuple[tuple[float, ...], float | None]:
        """Return the sums of other flags, and the mean loss of further tokens over ``units`` tokens."""
        if self._multi_token is None:
            return flags, None
        return flags[:-1], flags[-1] / self._ranks.tp.size / max(units, 1)  # tensor ranks hold the same loss

    def _counted(self, batch: Sequence[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the losses of all ranks are divided by, and the number of their labels."""
        device, shared = self._ranks.device, sharers(self._ranks)
        if self.preferences is None:
            tokens = self._agreement.tokens(labels_of(batch, device)) / shared
            return tokens, tokens
        units, tokens = (self._agreement.tokens(counts_of(batch, device)) / shared).unbind()
        return units, tokens

    def _end(self, check: GradientCheck, lr: float, scale: float) -> None:
        """Apply the update, or skip it if gradients are not finite."""
        if check.finite:
            self.optimizer.step(lr, clip_factor(check.norm / scale, self._spec.clip) / scale)
        else:
            self.optimizer.skip()
        if self.loads is not None:
            self.loads.end(updated=check.finite)
        if not self._agreement.local:
            self._scaler.update(check.finite and not self._agreement.skipped)

    def validate(
        self,
        batches: Iterable[MicroBatch],
        stopping: Callable[[], bool] = lambda: False,
        *,
        averaged: bool = False,
    ) -> tuple[float, int] | None:
        """Return the mean loss over the held-out tokens, or pairs, of all ranks, and the number of labels.

        ``stopping`` is called before each micro-batch and must return the same value on all ranks; if it returns True,
        the result is None. With ``averaged`` the average of the weights takes the weights' place meanwhile.
        """
        average = self.optimizer.average
        with nullcontext() if average is None or not averaged else average.in_place():
            result = loss_until(self._passes, self._ranks, batches, stopping)
        return None if result is None else (result.loss_sum / max(result.units, 1), result.tokens)

    def _count_nonfinite(self, step: int, finite: bool) -> None:
        self.nonfinite_in_row = self._agreement.most(0 if finite else self.nonfinite_in_row + 1)
        if not self._agreement.local and self.nonfinite_in_row >= self._training.max_nonfinite_steps:
            raise ConfigurationError(
                "PT630",
                f"gradients were not finite in {self.nonfinite_in_row} steps in a row, the last is step {step}",
                "a lower learning rate, a longer warm-up, or bf16 instead of fp16",
            )
