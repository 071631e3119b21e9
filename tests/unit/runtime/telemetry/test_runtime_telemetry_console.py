"""The live panel on a recorded terminal, and when it is used."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from partool_runtime.telemetry._console import ConsoleLines, LivePanel, open_display, sparkline
from partool_runtime.telemetry._figures import TrainingFigures
from partool_runtime.telemetry._lasting import LastingDisplay

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal(StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def console(file: StringIO, width: int = 80, **env: str) -> Console:
    return Console(file=file, width=width, height=40, _environ={"TERM": "xterm-256color", **env})


def text(raw: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw)


def figures(step: int, loss: float) -> TrainingFigures:
    return TrainingFigures(
        step,
        40,
        loss=loss,
        grad_norm=0.5,
        lr=1e-3,
        tokens_per_s=12345.6,
        step_time_s=0.25,
        memory_bytes=3 << 29,
        mfu=0.412,
        eta_s=125,
    )


def test_panel_shows_progress_figures_validation_and_curve_and_restores_the_cursor() -> None:
    file, now = Terminal(), [0.0]
    panel = LivePanel("quickstart", 40, console(file), now=lambda: now[0])
    assert HIDE_CURSOR in file.getvalue()
    for step, loss in ((10, 4.0), (20, 3.0), (30, 2.0)):
        now[0] += 10
        panel.log(figures(step, loss))
    panel.validation(30, 2.125)
    panel.message("checkpoint at [step] 30")
    panel.close(["the table"])
    raw = file.getvalue()
    assert raw.rindex(SHOW_CURSOR) > raw.rindex(HIDE_CURSOR)
    last = text(raw)[text(raw).rindex("╭") :]
    for part in (
        "quickstart",
        "step 30/40",
        "30s, 2m05s left",
        "loss 2.0000",
        "tokens/s 12,346",
        "memory 1.50 GiB",
        "MFU 41.2%",
        "validation loss 2.1250 (step 30)",
        "loss █▅▁",
        "the table",
    ):
        assert part in last, part
    assert "checkpoint at [step] 30" in text(raw)


def test_panel_keeps_every_fact_whole_on_a_narrow_terminal() -> None:
    file = Terminal()
    panel = LivePanel("x", 40, console(file, width=44))
    panel.log(figures(10, 4.0))
    panel.close([])
    for part in ("grad norm 0.500", "step time 250 ms", "memory 1.50 GiB"):
        assert part in text(file.getvalue())


def test_ticks_are_drawn_at_most_four_times_a_second() -> None:
    file, now = Terminal(), [0.0]
    panel = LivePanel("x", 40, console(file), now=lambda: now[0])
    panel.log(figures(1, 4.0))
    size = len(file.getvalue())
    now[0] += 0.2
    panel.tick(replace(figures(2, 0.0), loss=None))
    assert len(file.getvalue()) == size
    now[0] += 0.1
    panel.tick(replace(figures(3, 0.0), loss=None))
    assert "step 3/40" in text(file.getvalue()[size:])
    assert "loss 4.0000" in text(file.getvalue()[size:])
    now[0] += 0.3
    size = len(file.getvalue())
    panel.tick(figures(4, 3.5))
    assert "loss 3.5000" in text(file.getvalue()[size:])
    panel.close([])


def test_the_curve_spans_the_whole_run() -> None:
    file = Terminal()
    panel = LivePanel("x", 5000, console(file), now=lambda: 0.0)
    for step in range(1, 5001):
        panel.tick(figures(step, 9.0 if step < 600 else 1.0))
    panel.validation(5000, 1.0)
    panel.close([])
    curve = re.findall("[▁-█]+", text(file.getvalue()))[-1]
    assert curve[:5] == "█" * 5
    assert curve[-40:] == "▁" * 40


@pytest.mark.parametrize(
    ("file", "environment", "kind"),
    [(Terminal(), {}, LivePanel), (Terminal(), {"TERM": "dumb"}, ConsoleLines), (StringIO(), {}, ConsoleLines)],
)
def test_the_panel_is_for_terminals_that_can_draw(file: StringIO, environment: dict[str, str], kind: type) -> None:
    display = open_display("x", 3, console(file, **environment))
    display.close([])
    assert type(display) is kind


def test_no_color_is_honoured() -> None:
    file = Terminal()
    panel = LivePanel("x", 40, console(file, NO_COLOR="1"))
    panel.log(figures(10, 4.0))
    panel.close([])
    assert not re.search(r"\x1b\[[0-9;]*[34]8;5", file.getvalue())


def test_without_unicode_the_curve_is_ascii() -> None:
    class Ascii(Terminal):
        encoding = "ascii"

    file = Ascii()
    panel = LivePanel("x", 40, console(file))
    for step in (1, 2, 3):
        panel.log(figures(step, 4.0 - step))
    panel.close([])
    assert text(file.getvalue()).isascii()


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32)), st.integers(1, 30))
def test_sparklines_fit_and_reach_both_ends(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    finite = [value for value in values if math.isfinite(value)]
    assert len(line) == min(width, len(finite))
    if len(set(line)) > 1:
        assert {"▁", "█"} <= set(line)


def test_sparkline_averages_neighbours() -> None:
    assert sparkline([0, 0, 7, 7, 3, 4], 3) == "▁█▅"
    assert sparkline([2.0, 2.0], 5) == "▁▁"


def test_a_closed_terminal_does_not_end_the_run() -> None:
    class Gone:
        calls = 0

        def message(self, text: str) -> None:
            self.calls += 1
            raise OSError(5, "Input/output error")

    gone = Gone()
    display = LastingDisplay(gone)  # type: ignore[arg-type]
    display.message("one")
    display.message("two")
    display.close([])
    assert gone.calls == 1
