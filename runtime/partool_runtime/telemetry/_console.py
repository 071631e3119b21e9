"""Rank 0's console: one line per log step, or a live panel on a terminal."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from partool.plan.terminal import open_console, visible
from partool_runtime.telemetry._figures import TrainingFigures, duration, line, pairs

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
_MIN_REFRESH_S = 0.25
_FILE_WIDTH = 100
_WIDEST = 120
_MOST_POINTS = 1024


class Display(Protocol):
    """Interface of a console, to which the recorder sends its messages."""

    def log(self, figures: TrainingFigures) -> None:
        """Show a log step."""

    def tick(self, figures: TrainingFigures) -> None:
        """Show progress between log steps."""

    def validation(self, step: int, loss: float) -> None:
        """Show a validation's loss."""

    def expect(self, steps: int) -> None:
        """Set the number of the run's steps."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def close(self, tail: Sequence[RenderableType]) -> None:
        """Restore the terminal and print ``tail``."""


def open_display(name: str, total_steps: int, console: Console | None = None) -> Display:
    """Return a :class:`LivePanel` if standard output is a terminal that can draw it, else :class:`ConsoleLines`."""
    console = console or open_console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    elif not console.is_dumb_terminal:
        return LivePanel(name, total_steps, console)
    return ConsoleLines(total_steps, console)


class ConsoleLines:
    """Prints one line per log step and validation, without colour."""

    def __init__(self, total_steps: int, console: Console) -> None:
        self._total_steps = total_steps
        self._console = console

    def log(self, figures: TrainingFigures) -> None:
        """Print the figures."""
        self.message(line(figures))

    def tick(self, figures: TrainingFigures) -> None:
        """Print nothing."""

    def validation(self, step: int, loss: float) -> None:
        """Print the loss."""
        width = len(str(self._total_steps))
        self.message(f"step {step:>{width}}/{self._total_steps}  validation loss {loss:.4f}")

    def expect(self, steps: int) -> None:
        """Set the number of the run's steps."""
        self._total_steps = steps

    def message(self, text: str) -> None:
        """Print a line, of any length."""
        self._console.file.write((visible(text) if self._console.is_terminal else text) + "\n")
        self._console.file.flush()

    def close(self, tail: Sequence[RenderableType]) -> None:
        """Print ``tail``."""
        for part in tail:
            self._console.print(part)


class LivePanel:
    """A panel that is redrawn in place: progress, time left, latest figures, validation loss, the loss as a curve."""

    def __init__(
        self, name: str, total_steps: int, console: Console, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._total_steps = total_steps
        self._now = now
        self._begin = now()
        self._refreshed = -1.0
        self._figures = TrainingFigures(0, total_steps)
        self._curve = Curve()
        self._validation: tuple[int, float] | None = None
        self._console = console
        self._live = Live(self, console=console, auto_refresh=False, redirect_stderr=False)
        self._live.start(refresh=True)

    def log(self, figures: TrainingFigures) -> None:
        """Store the figures and redraw."""
        self._take(figures)
        self._refresh()

    def tick(self, figures: TrainingFigures) -> None:
        """Store the figures, or only the progress if the figures were not read, and redraw if some time has passed."""
        self._take(figures if figures.loss is not None else _progress(self._figures, figures))
        if self._now() - self._refreshed >= _MIN_REFRESH_S:
            self._refresh()

    def validation(self, step: int, loss: float) -> None:
        """Store the loss and redraw."""
        self._validation = step, loss
        self._refresh()

    def expect(self, steps: int) -> None:
        """Set the number of the run's steps."""
        self._total_steps = steps

    def message(self, text: str) -> None:
        """Print a line above the panel."""
        self._console.print(text, markup=False, highlight=False)

    def close(self, tail: Sequence[RenderableType]) -> None:
        """Leave the panel's last state on the screen, show the cursor again, and print ``tail`` below the panel."""
        self._live.update(self, refresh=True)
        self._live.stop()
        for part in tail:
            self._console.print(part)

    def __rich__(self) -> RenderableType:
        figures = self._figures
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_column(no_wrap=True, justify="right")
        elapsed = duration(self._now() - self._begin)
        remaining = "" if figures.eta_s is None else f", {duration(figures.eta_s)} left"
        head.add_row(
            f"step {figures.step}/{self._total_steps}" if figures.step else "loading",
            ProgressBar(total=max(1, self._total_steps), completed=figures.step),
            elapsed + remaining,
        )
        body: list[RenderableType] = [head, self._facts()]
        if len(self._curve.points) > 1:
            body.append(Text.assemble(("loss ", "dim"), self._bars()))
        if figures.skipped:
            body.append(Text("step skipped: gradient not finite", style="yellow"))
        width = min(self._console.width, _WIDEST) - len("^C ")  # room for ^C, which terminals echo behind the panel
        return Panel(Group(*body), title=Text(self._name), border_style="dim", width=width)

    def _facts(self) -> Columns:
        facts = [pair for pair in pairs(self._figures) if pair[0] != "ETA"]
        if self._validation is not None:
            step, loss = self._validation
            facts.append(("validation loss", f"{loss:.4f} (step {step})"))
        texts = [Text.assemble((name + " ", "dim"), (value, "bold"), no_wrap=True) for name, value in facts]
        return Columns(texts, padding=(0, 2))

    def _bars(self) -> str:
        encoding = (self._console.encoding or "").lower()
        bars = _BARS if encoding.startswith("utf") else _ASCII_BARS
        return sparkline(self._curve.points, max(8, min(self._console.width - 12, 72)), bars)

    def _take(self, figures: TrainingFigures) -> None:
        if figures.loss is not None and figures.step > self._figures.step:
            self._curve.add(figures.loss)
        self._figures = figures

    def _refresh(self) -> None:
        self._refreshed = self._now()
        self._live.refresh()


class Curve:
    """Stores a value over all steps as a bounded number of points, each a mean over equally many neighbouring steps."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._next: list[float] = []
        self._steps_per_point = 1

    def add(self, value: float) -> None:
        """Add the next step's value."""
        self._next.append(value)
        if len(self._next) < self._steps_per_point:
            return
        self.points.append(statistics.fmean(self._next))
        self._next.clear()
        if len(self.points) == _MOST_POINTS:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self._steps_per_point *= 2


def _progress(old: TrainingFigures, new: TrainingFigures) -> TrainingFigures:
    return replace(old, step=new.step, eta_s=new.eta_s)


def sparkline(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """Return the values as a row of at most ``width`` bars; averages neighbours and leaves out non-finite values."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    columns = min(width, len(finite))
    edges = [index * len(finite) // columns for index in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)
