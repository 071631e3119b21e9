"""The result of an evaluation, a file in the folder of its run."""

from __future__ import annotations

import math
from pathlib import Path

from partool.plan.record import Count, DamagedRecordError, Noted, Number, damage, parse_json
from partool.plan.task_results import TaskResult, tasks_as_text

EVALUATION_FILE = "evaluation.json"
_LARGEST = math.log(1e30)


def perplexity_of(loss: float) -> float | None:
    """Return the exponential of a mean loss in nats; None if it is not finite, or beyond 1e30."""
    return math.exp(loss) if math.isfinite(loss) and loss <= _LARGEST else None


class SetResult(Noted):
    """Mean loss over some data."""

    tokens: Count
    loss: Number | None
    """Nats per token; None if it is not finite."""
    perplexity: Number | None
    """Exponential of the loss; None if it is not finite, or beyond 1e30."""

    @classmethod
    def of(cls, tokens: int, loss: float) -> SetResult:
        """Return the result for a mean loss, which may be infinite or NaN."""
        return cls(tokens=tokens, loss=loss if math.isfinite(loss) else None, perplexity=perplexity_of(loss))

    def __str__(self) -> str:
        """Return the result as a sentence without an end."""
        figures = (
            "the loss is not finite"
            if self.loss is None
            else f"loss {self.loss:.6f} nats per token, perplexity "
            + ("above 1e30" if self.perplexity is None else f"{self.perplexity:,.4f}")
        )
        return f"{figures}, over {self.tokens:,} tokens"


class EvaluationResult(SetResult):
    """Mean loss over the data of a finished evaluation, or the results of its tasks.

    The figures are those of the data without a name; where only named sets are evaluated, of all of them together.
    """

    steps: Count
    sets: dict[str, SetResult] = {}
    """Figures of each named set."""
    tasks: dict[str, TaskResult] = {}
    """Results of tasks, of which there are some if no loss was computed; of a training, the latest ones."""

    @classmethod
    def of_tasks(cls, steps: int, tasks: dict[str, TaskResult]) -> EvaluationResult:
        """Return the results of tasks after ``steps`` steps of a training, or 0."""
        return cls(steps=steps, tokens=0, loss=None, perplexity=None, tasks=tasks)

    def __str__(self) -> str:
        """Return the result as a sentence without an end."""
        if self.tasks:
            return tasks_as_text(self.tasks) + (f" (after step {self.steps:,})" if self.steps else "")
        return super().__str__()

    def lines(self) -> list[str]:
        """Return the result as lines, those of named sets last."""
        return [str(self), *(f"{name}: {each}" for name, each in self.sets.items())]


def read_result(run_dir: Path) -> EvaluationResult | None:
    """Return the result in a run's folder; None without one. Raises :class:`DamagedRecordError` for another content."""
    file = run_dir / EVALUATION_FILE
    try:
        return EvaluationResult.model_validate(parse_json(file.read_bytes()))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedRecordError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise DamagedRecordError(f"{file}: {damage(error)}") from None
