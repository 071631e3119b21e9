"""A console whose failure does not end the training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import RenderableType

from partool_runtime.telemetry._console import Display
from partool_runtime.telemetry._figures import TrainingFigures


class LastingDisplay:
    """Forwards all calls to a console until writing fails, for instance on a closed terminal; ignores later calls."""

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

    def expect(self, steps: int) -> None:
        """Set the number of the run's steps."""
        self._try(lambda display: display.expect(steps))

    def message(self, text: str) -> None:
        """Show a line of text."""
        self._try(lambda display: display.message(text))

    def close(self, tail: Sequence[RenderableType]) -> None:
        """Restore the terminal and print ``tail``."""
        self._try(lambda display: display.close(tail))

    def _try(self, show: Callable[[Display], None]) -> None:
        if self._display is None:
            return
        try:
            show(self._display)
        except OSError:  # logs continue; a run of days must not end when its terminal closes
            self._display = None
