"""What the model adds to prompts at validations, as lines for the terminal, rows of the page, and data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from partool.plan.event_data import SampleText
from partool.plan.terminal import visible
from partool.report.history import History

_LONGEST = 400
"""Most characters of a prompt or a text that the terminal shows."""


def render_samples(history: History, console: Console) -> None:
    """Print the prompts and texts of the last validation that has some; nothing without."""
    if not history.samples:
        return
    step = max(history.samples)
    console.print(Text(f"prompts continued at step {step:,}", "bold"))
    for sample in history.samples[step]:
        console.print(Text.assemble("  ", (_short(sample.prompt), "dim"), " ", _short(sample.text), _end(sample)))
    console.print()


def sample_rows(history: History) -> list[tuple[int, Sequence[SampleText]]]:
    """Return the step and the prompts of each validation, the last first."""
    return [(step, history.samples[step]) for step in sorted(history.samples, reverse=True)]


def sample_data(history: History) -> list[dict[str, Any]]:
    """Return the prompts of all validations as data."""
    return [{"step": step, **each.model_dump()} for step, samples in history.samples.items() for each in samples]


def _short(text: str) -> str:
    """Return a text in one line: what a model writes may hold any character, also those that steer a terminal."""
    text = visible(text.replace("\n", "\\n"))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _end(sample: SampleText) -> str:
    return " (ended)" if sample.ended else " …"
