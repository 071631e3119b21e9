"""A console that may go away without taking the training with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import RenderableType

from partool_runtime.telemetry._console import Display
from partool_runtime.telemetry._figures import TrainingFigures


class LastingDisplay:
    """Passes everything on until writing fails, because the terminal was closed, say; from then on it is silent."""

    def __init__(self, display: Display) -> None:
        self._display: Display | None = display

    def log(self, figures: TrainingFigures) -> None:
        """Show a log step."""
        self._try(lambda display: display.log(figures))

    def tick(self, figures: TrainingFigures) -> None:
        """Show progress between log steps."""
        self._try(lambda display: display.tick(figures))

    def validation(self, step: int, loss: float) -> None:
        """Show a validation's loss."""
        self._try(lambda display: display.validation(step, loss))

    def message(self, text: str) -> None:
        """Show a line of text."""
        self._try(lambda display: display.message(text))

    def close(self, tail: Sequence[RenderableType]) -> None:
        """Leave the terminal as it was found and print what comes last."""
        self._try(lambda display: display.close(tail))

    def _try(self, show: Callable[[Display], None]) -> None:
        if self._display is None:
            return
        try:
            show(self._display)
        except OSError:  # the log files go on; a run of days must not end with the terminal it was started from
            self._display = None
