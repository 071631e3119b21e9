"""Ctrl-C during a search gives the best layout so far; a terminal shows what is searched."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from partool.cli._watch import line, watched
from partool.cli.main import run
from partool.planner import make_plan
from partool.planner.problem import SearchBudget, Stopped
from partool.planner.search.branch_and_bound import Search
from partool.spec import load_text

SPEC = """\
model: llama3-8b
hardware: {accelerator: h100-sxm, nodes: 4}
data: python-stdlib
training: {sequence_length: 8192, global_batch: 128, steps: 100}
"""
ENDED = "partool: interrupted: this is the best of the layouts that were searched so far\n"


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Take interrupts as on a terminal: processes in the background ignore them, and their children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_before_a_layout_is_found_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt), watched(SearchBudget()):
        interrupt()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_first_interrupt_stops_the_search_and_the_second_is_raised() -> None:
    budget = SearchBudget(has_best=True)
    with watched(budget):
        interrupt()
        assert budget.stopped
        assert budget.limit_rows == 0
        with pytest.raises(KeyboardInterrupt):
            interrupt()


def test_a_stopped_search_without_a_layout_raises_an_exception_of_the_library() -> None:
    budget = SearchBudget()
    budget.stop()
    with pytest.raises(Stopped):
        make_plan(load_text(SPEC).spec, base_dir=Path(), default_name="stopped", budget=budget)
    with pytest.raises(KeyboardInterrupt), watched(SearchBudget(has_best=True)):
        raise Stopped


def test_ignored_interrupts_stay_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with watched(budget := SearchBudget(has_best=True)):
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not budget.stopped


def test_an_interrupted_search_gives_its_best_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[float] = []
    settle = Search._settle

    def settled(self: Search, key: Any) -> None:
        settle(self, key)
        if self.result.best is not None and not found:
            found.append(self.result.best.step_time_s)
            interrupt()

    monkeypatch.setattr(Search, "_settle", settled)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC, encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        run(["plan", str(spec), "--output", "json"])
    shown = capsys.readouterr()
    assert end.value.code == 0
    assert len(found) == 1
    assert f'"step_time_s": {found[0]!r}' in shown.out
    assert "before its limit of work" in shown.out
    assert shown.err.endswith(ENDED)


def test_a_search_without_a_price_takes_a_layout_of_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expand = Search._expand

    def expanded(self: Search, groups: Any) -> None:
        expand(self, groups)
        if not self.problem.budget.stopped:
            assert self.problem.budget.has_fitting
            assert not self.problem.budget.has_best
            interrupt()

    monkeypatch.setattr(Search, "_expand", expanded)
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC, encoding="utf-8")
    with pytest.raises(SystemExit) as end:
        run(["plan", str(spec), "--output", "json"])
    shown = capsys.readouterr()
    assert end.value.code == 0
    assert "before its limit of work" in shown.out
    assert shown.err.endswith(ENDED)


def test_a_terminal_is_told_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with watched(SearchBudget(rows=1234, subject="layouts on 8 devices"), after_s=0.0):
        deadline = time.monotonic() + 30.0
        while not terminal.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    shown = terminal.getvalue()
    assert shown.startswith("\rpartool: 0 s, searching layouts on 8 devices: 1,234 prices\x1b[K")
    assert shown.endswith("\r\x1b[K")


def test_a_quick_search_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with watched(SearchBudget(), after_s=30.0):
        pass
    assert not terminal.getvalue()


def test_a_pipe_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", pipe := io.StringIO())
    with watched(SearchBudget(), after_s=0.0):
        time.sleep(0.05)
    assert not pipe.getvalue()


def test_the_line_names_the_best_step() -> None:
    assert line(SearchBudget(rows=5, has_best=True, best_s=1.25), 2.0) == (
        "partool: 2 s, searching layouts: 5 prices; best 1.25 s per step, Ctrl-C takes it"
    )
