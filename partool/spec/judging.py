"""Figures of a validation by which runs are judged: which there are, and whether low or high ones are better."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from partool.spec._base import Section
from partool.spec.numbers import FactorOrNone, Steps, Times

Better = Literal["min", "max"]
Metric = Annotated[str, Field(min_length=1, max_length=200)]
BETTER: dict[str, Better] = {
    "loss": "min",
    "perplexity": "min",
    "weights_loss": "min",
    "chosen": "max",
    "rejected": "min",
    "margin": "max",
    "accuracy": "max",
    "log_odds": "max",
    "logps_chosen": "max",
    "logps_rejected": "min",
    "kl": "min",
}
"""Figure → whether its lowest or its highest value is the best. Figures after ``weights_loss`` are means over pairs of
answers; those of a named set have its name before a slash."""

_LOW = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter")
"""Metrics of tasks whose lowest value is the best; of all others it is the highest."""


class Judgement(Section):
    """The figure of a validation that counts, and which of its values are better."""

    metric: Metric = "loss"
    """Figure of a validation: ``loss``, or of pairs of answers also ``accuracy``, ``margin``, ``chosen``, ``rejected``,
    ``logps_chosen``, ``logps_rejected``, ``kl`` (dpo) and ``log_odds`` (orpo). ``NAME/loss`` and ``NAME/perplexity``
    are those of the set of that name in ``data.validation_sets``; with ``evaluation.tasks`` also TASK/METRIC, such as
    ``arc_easy/acc_norm``."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether low or high values are better; auto: by the figure, so that a loss is to be low and an accuracy high."""

    @property
    def better(self) -> Better:
        """Which values are better."""
        if self.mode != "auto":
            return self.mode
        _, of_other, name = self.metric.rpartition("/")
        of_others: Better = "max" if of_other and name not in _LOW else "min"
        return BETTER.get(name, of_others)


class BestSpec(Judgement):
    """Checkpoints of the best validations, which are kept beside the newest."""

    keep: Steps = 1
    """Checkpoints of the best validations that are kept, beside ``checkpoint.keep``."""


class EarlyStop(Judgement):
    """The end of a run whose validations do not improve any more."""

    patience: Times = 5
    """Validations in a row without an improvement after which the run ends."""
    min_delta: FactorOrNone = 0.0
    """Change of the figure that an improvement exceeds."""
