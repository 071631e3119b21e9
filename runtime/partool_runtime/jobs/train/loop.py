"""The loop of a training: steps, validations, checkpoints, and what ends it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from partool.plan.types import Plan
from partool_runtime.data import Batches
from partool_runtime.jobs.train.saving import Saver
from partool_runtime.jobs.train.stepping import Stepper, StepResult
from partool_runtime.jobs.train.validating import Validator
from partool_runtime.mesh import Ranks
from partool_runtime.parallel.expert.load import ExpertLoads
from partool_runtime.pulse import SILENT, Pulse
from partool_runtime.stop import STOP_SIGNALS, StopRequest
from partool_runtime.telemetry import Recorder
from partool_runtime.telemetry.profile import FLAGS, StepProfiler

_UNIFORM, _STILL = 0.005, 1e-6
"""A model ignores its input if its first loss divided by ln V differs from 1 by less than ``_UNIFORM`` and its gradient
norm is at most ``_STILL``. An untrained model's gradient norm is about 0.1 to 100."""


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """The steps of a training, with its validations and checkpoints."""

    plan: Plan
    stepper: Stepper
    data: Batches
    saver: Saver
    recorder: Recorder
    stop: StopRequest
    profiler: StepProfiler
    validator: Validator
    pulse: Pulse = SILENT
    reports_loads: bool = False
    """Whether this rank reports the load of experts, for all ranks of its pipeline stages."""

    def steps(self, first: int) -> tuple[int, str]:
        """Train from step ``first`` on and save the last state.

        Return the number of completed steps, and why the run ends before the last one; empty if it does not, or if a
        stop request ends it.
        """
        steps, recorder = self.plan.training.steps, self.recorder
        if first > 0 and self._validates(first):  # a stop may have come between the last step and its validation
            ended = self._validate(first)
            if ended != "":
                return first, ended or ""
        for step in range(first, steps):
            self.profiler.before(step + 1)
            with recorder.timer("data"), self.pulse.during("fetching"):
                batch = self.data.step(step)
            result = self.stepper.step(step, batch, recorder.timer, self._flags)
            steps_done = step + 1
            with recorder.timer("overhead"):
                stopping, due = self._agreed(result, steps_done)
                if stopping or steps_done == steps or due:
                    self._save(steps_done, wait=stopping)
            with self.pulse.during("logging"):
                self._record(steps_done, result)
                if (profiled := self.profiler.after(steps_done)) is not None:
                    recorder.event("profile", first=profiled[0], last=profiled[1])
            if stopping and steps_done < steps:
                recorder.event("signal", name=self.stop.reason)
                return steps_done, ""
            ended = self._validate(steps_done) if self._validates(steps_done) else ""
            if ended is None:
                self._save(steps_done, wait=True)
            if ended != "":
                return steps_done, ended or ""
        return steps, ""

    def _save(self, steps_done: int, *, wait: bool) -> None:
        with self.pulse.during("saving"):
            self.saver.save(steps_done, wait=wait)

    def _flags(self) -> list[float]:
        """Return what this rank adds to the sums of a step: requests to stop and to profile, a due checkpoint."""
        return [*self.stop.flags(), *self.profiler.flags(), *self.saver.flags()]

    def _agreed(self, result: StepResult, steps_done: int) -> tuple[bool, bool]:
        """Return on all ranks whether to stop, and whether a checkpoint is due.

        In a local step ranks agree on nothing: all requests wait for the next exchange.
        """
        if result.local:
            return False, False
        stops, rest = result.flags[: len(STOP_SIGNALS)], result.flags[len(STOP_SIGNALS) :]
        self.profiler.heard(rest[:FLAGS], steps_done)
        return self.stop.heard(stops, steps_done), self.saver.due(steps_done, rest[FLAGS:])

    def _validate(self, steps_done: int) -> str | None:
        """Report and judge a validation; a checkpoint follows one that is one of the best.

        Return why the run ends with it, empty if it goes on; None on all ranks if a stop request ended the validation.
        """
        with self.pulse.during("validating"):
            validated = self.validator.figures(steps_done)
        if validated is None:
            self.recorder.event("signal", name=self.stop.reason)
            return None
        total = validated.total
        self.recorder.validation(
            steps_done,
            total.loss,
            total.tokens,
            total.preferences,
            weights_loss=total.weights_loss,
            sets=validated.sets,
            samples=validated.samples,
        )
        verdict = self.saver.judge(steps_done, validated.judged())
        ended = verdict.ended if steps_done < self.plan.training.steps else ""
        if verdict.best or ended:
            self._save(steps_done, wait=bool(ended))
        if ended:
            self.recorder.early_stop(steps_done, ended)
        return ended

    def _record(self, steps_done: int, result: StepResult) -> None:
        recorder, preferences = self.recorder, self.stepper.preferences
        if preferences is not None and recorder.is_log_step(steps_done):
            recorder.note_preferences(preferences.figures(trains=True))
        if (teacher := self.stepper.teacher) is not None and recorder.is_log_step(steps_done):
            recorder.note_kl(teacher.figures().get("kl"))
        recorder.step(
            steps_done,
            result.loss,
            result.grad_norm,
            result.lr,
            result.tokens,
            result.skipped,
            multi_token_loss=result.multi_token_loss,
        )
        if result.skipped:
            recorder.event("nonfinite", step=steps_done, consecutive=self.stepper.nonfinite_in_row)
        if steps_done == 1 and (problem := first_step_problem(self.plan, result)):
            recorder.warning(problem)
        report_write(self.saver, recorder)
        if self.reports_loads and recorder.is_log_step(steps_done):
            _report_loads(steps_done, self.stepper.loads, recorder)

    def _validates(self, steps_done: int) -> bool:
        if not self.plan.data.validates:
            return False
        every = self.plan.training.validation.every
        return steps_done == self.plan.training.steps or (every > 0 and steps_done % every == 0)


def reports_loads(plan: Plan, ranks: Ranks) -> bool:
    """Return whether this rank is the first of those that hold the same stages."""
    return plan.model.moe is not None and ranks.dp.place == ranks.cp.place == ranks.tp.place == 0


def _report_loads(step: int, loads: ExpertLoads | None, recorder: Recorder) -> None:
    layers = [] if loads is None else [asdict(each) | {"imbalance": each.imbalance} for each in loads.reports()]
    if layers:
        recorder.event("experts", step=step, layers=layers)


def first_step_problem(plan: Plan, result: StepResult) -> str:
    """Return a text about a problem in the first step of a model that is trained from scratch; empty without a problem.

    The loss of an untrained model begins near ln V, the loss of a uniform guess, but the loss must depend on the input.
    """
    uniform = math.log(plan.model.vocab)
    if plan.weights.source not in ("init", "dummy") or result.skipped or uniform == 0.0:
        return ""
    ratio = result.loss / uniform
    if abs(ratio - 1.0) >= _UNIFORM or result.grad_norm > _STILL:
        return ""
    return (
        f"PT690: the first loss, {result.loss:.4f}, is {ratio:.2f} × ln {plan.model.vocab}, and all gradients are zero "
        f"(norm {result.grad_norm:.1e}): the model sees nothing of its input and will not learn. "
        "See partool explain PT690"
    )


def report_write(saver: Saver, recorder: Recorder) -> None:
    """Record the checkpoint that is complete since the last call, if any."""
    if stats := saver.finished_write():
        recorder.event("checkpoint", step=stats.step, path=stats.path, write_s=stats.write_s, blocked_s=stats.blocked_s)
