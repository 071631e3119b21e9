"""The validation of a training: the figures of each set of held-out data, those of all of them equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from partool.plan.types import Plan
from partool_runtime.data import Batches
from partool_runtime.jobs.train.sampling import PromptSampler
from partool_runtime.jobs.train.stepping import Stepper
from partool_runtime.jobs.train.tasks import TrainingTasks
from partool_runtime.pulse import Pulse
from partool_runtime.stop import StopRequest
from partool_runtime.telemetry import ContinuedPrompt, SetFigures


@dataclass(frozen=True, slots=True)
class ValidationFigures:
    """What a validation computes."""

    total: SetFigures
    """Figures of the data without a name; where there are only named sets, of all of them together."""
    sets: Mapping[str, SetFigures]
    """Figures of each named set."""
    samples: Sequence[ContinuedPrompt] = ()
    """Prompts with what the model adds to them."""
    tasks: Mapping[str, float] = field(default_factory=dict)
    """On rank 0, metrics of the tasks by TASK/METRIC, if they were due."""

    def judged(self) -> dict[str, float]:
        """Return all figures by name; those of a named set, or of a task, have its name before a slash."""
        figures = self.total.judged()
        for name, each in self.sets.items():
            of_set = each.judged() | ({} if each.perplexity is None else {"perplexity": each.perplexity})
            figures |= {f"{name}/{figure}": value for figure, value in of_set.items()}
        return figures | dict(self.tasks)


@dataclass(frozen=True, slots=True)
class Validator:
    """Computes the figures of all sets and tasks, with the weights, their average, or both (not of tasks)."""

    plan: Plan
    stepper: Stepper
    data: Batches
    stop: StopRequest
    pulse: Pulse
    sampler: PromptSampler | None = None
    tasks: TrainingTasks | None = None

    def figures(self, steps_done: int) -> ValidationFigures | None:
        """Return the figures after ``steps_done`` steps; None on all ranks if a stop request ended the validation."""
        shown = self.plan.training.ema.validation if self.plan.training.ema is not None else "weights"
        figures = self._of_each(steps_done, averaged=shown != "weights")
        if figures is not None and shown == "both":
            of_weights = self._of_each(steps_done, averaged=False)
            if of_weights is None:
                return None
            figures = {name: replace(each, weights_loss=of_weights[name].loss) for name, each in figures.items()}
        if figures is None:
            return None
        samples = self._samples(steps_done, averaged=shown != "weights")
        of_tasks = None if samples is None else self._of_tasks(steps_done, averaged=shown != "weights")
        if samples is None or of_tasks is None:
            return None
        unnamed = figures.pop("", None)
        return ValidationFigures(unnamed or together(list(figures.values())), figures, samples, of_tasks)

    def _of_tasks(self, steps_done: int, *, averaged: bool) -> dict[str, float] | None:
        """Return the figures of the tasks, if they are due; None if a stop request ended them."""
        if self.tasks is None:
            return {}
        optimizer = self.stepper.optimizer
        return self.tasks.figures(steps_done, optimizer, self._stopping(steps_done), averaged=averaged)

    def _samples(self, steps_done: int, *, averaged: bool) -> Sequence[ContinuedPrompt] | None:
        if self.sampler is None:
            return ()
        average = self.stepper.optimizer.average
        with nullcontext() if average is None or not averaged else average.in_place():
            return self.sampler.texts(self._stopping(steps_done))

    def _stopping(self, steps_done: int) -> Callable[[], bool]:
        """Return a function that shows the agent that the rank lives, and asks whether a stop request has come."""

        def stopping() -> bool:
            self.pulse.beat()
            return self.stop.agree(steps_done)

        return stopping

    def _of_each(self, steps_done: int, *, averaged: bool) -> dict[str, SetFigures] | None:
        """Return the figures of each set by its name, which is empty for the data without one."""
        figures = {}
        for name in (*([""] if self.plan.data.holds_out else []), *self.data.sets):
            of_set = self._of(name, steps_done, averaged=averaged)
            if of_set is None:
                return None
            figures[name] = of_set
        return figures

    def _of(self, name: str, steps_done: int, *, averaged: bool) -> SetFigures | None:
        stopping = self._stopping(steps_done)
        result = self.stepper.validate(self.data.validation(name), stopping, averaged=averaged)
        preferences = self.stepper.preferences
        pairs = None if preferences is None else preferences.figures(trains=False)
        return None if result is None else SetFigures(*result, pairs)


def together(sets: Sequence[SetFigures]) -> SetFigures:
    """Return the figures of several sets together: means over their tokens, or over their pairs of answers."""
    tokens = [float(each.tokens) for each in sets]
    pairs = [each.preferences for each in sets if each.preferences is not None]
    counts = [one["pairs"] for one in pairs] or tokens
    weights = [each.weights_loss for each in sets if each.weights_loss is not None]
    return SetFigures(
        loss=_mean([each.loss for each in sets], counts),
        tokens=sum(each.tokens for each in sets),
        preferences=_means_of_pairs(pairs, counts, tokens) if pairs else None,
        weights_loss=_mean(weights, counts) if weights else None,
    )


def _means_of_pairs(
    pairs: Sequence[Mapping[str, float]], counts: Sequence[float], tokens: Sequence[float]
) -> dict[str, float]:
    """Return the means over the pairs of all sets; the divergence from the reference, ``kl``, is one over tokens."""
    names = [name for name in pairs[0] if name != "pairs"]
    means = {name: _mean([one[name] for one in pairs], tokens if name == "kl" else counts) for name in names}
    return {**means, "pairs": sum(counts)}


def _mean(values: Sequence[float], counts: Sequence[float]) -> float:
    return sum(value * count for value, count in zip(values, counts, strict=True)) / max(sum(counts), 1.0)
