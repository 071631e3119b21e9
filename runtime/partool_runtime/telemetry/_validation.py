"""The figures of a validation, as its event holds them and as the console shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from partool.plan.evaluation_result import perplexity_of
from partool_runtime.telemetry._figures import preference_pairs


@dataclass(frozen=True, slots=True)
class SetFigures:
    """The figures of one set of data."""

    loss: float
    """Mean over its tokens, or its pairs of answers, in nats."""
    tokens: int
    """Number of labels."""
    preferences: Mapping[str, float] | None = None
    """Means over pairs of answers; None for other objectives."""
    weights_loss: float | None = None
    """Loss of the weights themselves, where ``loss`` is that of their average."""

    @property
    def perplexity(self) -> float | None:
        """Exponential of the loss; None for pairs of answers, whose loss is not that of tokens."""
        return None if self.preferences is not None else perplexity_of(self.loss)

    def event(self) -> dict[str, Any]:
        """Return the figures as an event holds them, without the perplexity, which only named sets have."""
        of_weights = {} if self.weights_loss is None else {"weights_loss": self.weights_loss}
        of_pairs = {} if self.preferences is None else {"preferences": dict(self.preferences)}
        return {"loss": self.loss, "tokens": self.tokens, **of_weights, **of_pairs}

    def judged(self) -> dict[str, float]:
        """Return the figures by which checkpoints are kept and runs ended (:mod:`partool.spec.judging`)."""
        of_weights = {} if self.weights_loss is None else {"weights_loss": self.weights_loss}
        return {"loss": self.loss, **of_weights, **(self.preferences or {})}


class ContinuedPrompt(NamedTuple):
    """A prompt, and what the model adds to it."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    """The tokens of ``text``."""
    ended: bool
    """Whether a token that ends a text or an answer came next."""

    def event(self) -> dict[str, Any]:
        """Return the sample as an event holds it."""
        return {"prompt": self.prompt, "text": self.text, "tokens": len(self.tokens), "ended": self.ended}


def named_events(sets: Mapping[str, SetFigures]) -> dict[str, dict[str, Any]]:
    """Return the figures of named sets as an event holds them."""
    return {
        name: each.event() | ({} if each.preferences is not None else {"perplexity": each.perplexity})
        for name, each in sets.items()
    }


def messages(total: SetFigures, sets: Mapping[str, SetFigures]) -> Iterator[str]:
    """Yield the lines about a validation that follow the one with its loss."""
    if total.weights_loss is not None:
        yield f"validation loss of the weights themselves {total.weights_loss:.4f}"
    if total.preferences is not None:
        yield f"validation {'  '.join(f'{name} {value}' for name, value in preference_pairs(total.preferences))}"
    if sets:
        yield f"validation loss of {', '.join(f'{name} {each.loss:.4f}' for name, each in sets.items())}"
