"""Curves from a run's event log: repeated steps, attempts, gaps and damage; drawn on terminals and pages."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _histories import BEGAN, end, parsed, run_folder, start, steps, validation, write_log
from _telemetry import small_plan
from planned import plan_of
from rich.console import Console
from test_report_html import Page

from partool.cli.main import run
from partool.plan.record import DamagedRecordError
from partool.plan.run import RunStatus
from partool.report.charts import charts_of
from partool.report.curves import history_of, read_history
from partool.report.headline import _losses, headline
from partool.report.history import thin
from partool.report.html_run import render_run_html
from partool.report.samples import render_samples, sample_data, sample_rows
from partool.report.terminal_curves import NO_PLOTEXT

SPEC = """\
model: {layers: 1, hidden: 16, heads: 2, kv_heads: 2, ffn_hidden: 32, vocab: 256, max_position: 16}
hardware: {accelerator: cpu, per_node: 1}
training: {sequence_length: 16, global_batch: 4, steps: 12, precision: fp32}
data: {source: python-stdlib}
"""
STEERING = re.compile(r"\x1b\[[0-9;]*m")


def resumed() -> list:
    """Three attempts: 10 steps and a crash, a kill in step 9 after a resume at 5, and one on four ranks to the end."""
    return [
        start(),
        *steps(1, 10),
        ("checkpoint", BEGAN + 10, {"step": 5}),
        ("warning", BEGAN + 20, {"message": "slow"}),
        ("error", BEGAN + 20, {"type": "RuntimeError", "message": "boom"}),
        end(10, BEGAN + 20, 1, "RuntimeError: boom"),
        ("warning", BEGAN + 900, {"message": "loading"}),
        start(2, 5, BEGAN + 1000),
        *steps(6, 8, at=BEGAN + 1000, loss=7.0),
        start(3, 5, BEGAN + 2000, ranks=4),
        *steps(6, 7, at=BEGAN + 2000, loss=9.0),
    ]


def test_the_later_value_of_a_repeated_step_wins_and_time_between_attempts_does_not_count() -> None:
    history = history_of(parsed(resumed()))
    loss = history.curves["loss"]
    assert loss.steps.tolist() == list(range(1, 11))
    expected = [5 - 0.01 * s for s in range(1, 6)] + [9 - 0.06, 9 - 0.07, 7 - 0.08] + [5 - 0.09, 5 - 0.1]
    assert loss.values == pytest.approx(expected, abs=1e-12)
    assert [attempt.wall_s for attempt in history.attempts] == [20.0, 6.0, 4.0]
    assert (history.wall_s, history.device_hours) == (30.0, pytest.approx((2 * 26 + 4 * 4) / 3600))
    assert (history.step, history.last("loss")) == (7, (7, pytest.approx(8.93)))
    assert history.tokens == 7 * 64
    assert loss.tokens.tolist() == [64.0 * step for step in range(1, 11)]
    assert loss.time_s.tolist() == [2, 4, 6, 8, 10, 28, 30, 26, 18, 20]
    x, y = loss.over("time")
    assert x.tolist() == sorted(loss.time_s)
    assert y[-1] == pytest.approx(8.93)
    assert [(mark.kind, mark.step) for mark in history.marks] == [
        ("start", 0), ("checkpoint", 5), ("warning", 10), ("error", 10), ("warning", 10), ("start", 5), ("start", 5),
    ]  # fmt: skip
    assert history.marks[4].time_s == 20.0  # the warning before the second start


def test_values_that_are_not_finite_or_not_logged_leave_gaps() -> None:
    rows = [start(), *steps(1, 3), *steps(4, 4, loss=0.0), *steps(6, 6)]
    rows[4][2].update(loss=None, grad_norm=None)
    del rows[5][2]["memory_bytes"]
    history = history_of(parsed([*rows, validation(6, None, BEGAN + 12), validation(6, 4.5, BEGAN + 13)]))
    assert history.curves["loss"].steps.tolist() == [1, 2, 3, 6]
    assert history.curves["memory_bytes"].steps.tolist() == [1, 2, 3, 4]
    assert (history.not_finite, history.tokens) == (1, 6 * 64)  # step 5 was not logged, but done
    assert history.least("validation_loss") == (6, 4.5)
    again = history_of(parsed([*rows, start(2, 3, BEGAN + 50), *steps(4, 4, at=BEGAN + 50)]))
    assert again.not_finite == 0
    summary = history.curves["loss"].summary()
    assert summary["count"] == 4
    assert summary["least"] == {"step": 6, "value": pytest.approx(4.94)}


def test_torn_lines_are_left_out_and_damaged_ones_named(tmp_path: Path) -> None:
    path = write_log(tmp_path, [start(), *steps(1, 4)])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], lines[2][:40] + "\n", *lines[3:], lines[4][:30]]))
    assert read_history(tmp_path).curves["loss"].steps.tolist() == [1, 3, 4]
    path.write_text("".join([*lines[:2], lines[2].replace('"step": 2', '"step": "two"'), *lines[3:]]))
    with pytest.raises(DamagedRecordError, match=r"line 3: `data\.step`"):
        read_history(tmp_path)
    assert read_history(tmp_path, strict=False).curves["loss"].steps.tolist() == [1, 3, 4]
    assert read_history(tmp_path / "nothing").curves == {}


def test_thinning_keeps_spikes_and_ends() -> None:
    values = np.sin(np.arange(10_007) / 500)
    values[1234], values[7777] = 9.0, -9.0
    places = thin(values, 101)
    assert len(places) <= 101
    assert {0, 1234, 7777, 10_006} <= set(places.tolist())
    assert (np.diff(places) > 0).all()
    assert thin(values[:101], 101).tolist() == list(range(101))


def test_named_sets_have_curves_and_rows_of_their_own() -> None:
    rows = [start(), *steps(1, 4)]
    for step, loss in ((2, 3.0), (4, 2.5)):
        kind, at, data = validation(step, 9.0, BEGAN + 2 * step)
        code = {"loss": loss, "perplexity": 20.0, "tokens": 5}
        rows.append(
            (kind, at, data | {"sets": {"code": code, "pairs": {"loss": None, "preferences": {"accuracy": 0.5}}}})
        )
    history = history_of(parsed(rows))
    assert history.curves["validation_code/loss"].values.tolist() == [3.0, 2.5]
    assert history.last("validation_pairs/accuracy") == (4, 0.5)
    assert history.sets == ["code"], "a loss that was never finite is not shown"
    first, second, *_ = charts_of(history)
    assert (first.name, second.curves) == ("loss", (("validation_code/loss", "code"),))
    assert dict(_losses(history))["- code"] == "2.5000 at step 4, perplexity 20, the best"


def test_of_a_repeated_validation_the_later_samples_count() -> None:
    def row(step: int, at: float, *texts: str) -> Any:
        kind, at, data = validation(step, 1.0, at)
        samples = [{"prompt": "p", "text": text, "tokens": 2, "ended": False} for text in texts]
        return kind, at, data | ({"samples": samples} if samples else {})

    rows = [
        start(),
        row(2, BEGAN + 1, "a", "b"),
        row(4, BEGAN + 2, "c"),
        start(2, 2, BEGAN + 9),
        row(4, BEGAN + 9, "d\n\x1b[31m"),
    ]
    history = history_of(parsed(rows))
    assert [(one["step"], one["text"]) for one in sample_data(history)] == [(2, "a"), (2, "b"), (4, "d\n\x1b[31m")]
    assert [step for step, _ in sample_rows(history)] == [4, 2]
    console = Console(record=True, width=80)
    render_samples(history, console)
    assert console.export_text() == "prompts continued at step 4\n  p d\\n�[31m …\n\n"


def test_figures_of_pairs_become_curves() -> None:
    pairs = {"chosen": 0.5, "rejected": -0.5, "margin": 1.0, "accuracy": 0.75, "kl": None}
    history = history_of(parsed([start(), *steps(1, 3, preferences=pairs)]))
    assert history.curves["accuracy"].values.tolist() == [0.75] * 3
    assert "kl" not in history.curves
    assert [chart.name for chart in charts_of(history)][-3:] == ["accuracy", "margin", "rewards"]


def words_of(rows: list, status: RunStatus | None) -> dict[str, str]:
    return dict(headline(small_plan(), history_of(parsed(rows)), status).rows)


def status_of(state: str, **more: object) -> RunStatus:
    return RunStatus.model_validate({"state": state, "created": BEGAN, "attempt": 1} | more)


def test_the_begin_says_how_far_a_run_came_and_how_it_ended() -> None:
    rows = [start(), *steps(1, 12), validation(6, 3.5, BEGAN + 12), validation(12, 4.0, BEGAN + 24)]
    words = words_of([*rows, end(12, BEGAN + 25)], status_of("done", ended=BEGAN + 30))
    assert words["Steps"] == "12 of 12 steps, 768 tokens, 25 s in 1 attempt, 0.0139 device-hours"
    assert words["Loss"] == "4.8800 at step 12"
    assert words["Validation"] == "4.0000 at step 12, best 3.5000 at step 6"
    assert words["State"] == "done (all steps done), 2023-11-14 22:13:50 UTC"
    assert words["Machines"] == "1 node × 1 rank on the CPU"
    assert "parameters" in words["Model"]
    assert words["Layout"].startswith("one rank; ZeRO-0; micro-batch 2 × 1")

    crashed = words_of(resumed(), status_of("failed", reason="rank 0 was killed"))
    assert crashed["State"] == "failed (rank 0 was killed)"
    assert crashed["Steps"].startswith("7 of 12 steps, 448 tokens, 30 s in 3 attempts")
    assert crashed["Steps"].endswith("; an earlier attempt had reached step 10")
    assert words_of(rows, status_of("running"))["State"] == "running, attempt 1"
    assert words_of([], status_of("queued"))["Steps"] == "0 of 12 steps"
    assert words_of(rows, None)["State"].startswith("unknown here")
    assert words_of([*rows, end(3, BEGAN + 25, 75, "preempted")], None)["State"] == "preempted"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        run([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), STEERING.sub("", out), err


def test_the_report_fits_80_columns_and_draws_all_curves(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*resumed(), validation(7, 6.0, BEGAN + 2004)]
    run_folder(home, "small-20260101-000000-aaaa", rows, plan_of(SPEC).to_json(), state="failed", reason="x" * 200)
    code, out, err = shown(capsys, "report", "small")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    titles = ("loss: ⠒ training, o validation", "gradient norm", "learning rate", "tokens/s", "peak memory of rank 0")
    assert [title in out for title in titles] == [True] * 5
    assert "^ checkpoint  | start of an attempt  ! warning  x error" in out
    assert out.index("Model") < out.index("⠒ training") < out.index("No terms")
    data = json.loads(shown(capsys, "report", "small", "--output", "json")[1])
    assert data["training"]["curves"]["loss"]["count"] == 10
    assert data["training"]["attempts"][2] == {"number": 3, "after_step": 5, "ranks": 4, "wall_s": 4.0}
    monkeypatch.setitem(sys.modules, "plotext", None)
    code, out, _ = shown(capsys, "report", "small")
    assert (code, NO_PLOTEXT in " ".join(out.split()), "Loss" in out) == (0, True, True)


def test_the_page_is_whole_without_points_and_names_are_escaped(tmp_path: Path) -> None:
    plan = small_plan()
    for rows in ([], [start(), *steps(1, 1)], resumed()):
        name = "run-<script>alert(1)</script>"
        head = headline(plan, history_of(parsed([*rows, ("warning", BEGAN, {"message": name})])), None)
        source = render_run_html(plan, name, None, None, "no pipeline", head=head)
        page = Page(source)
        assert [attributes for tag, attributes in page.elements if "src" in attributes] == []
        assert all((a.get("href") or "data:")[:5] == "data:" for _, a in page.elements)
        assert set(re.findall(r"url\((.)", source)) <= {"#"}
        assert "<script>alert" not in source
        assert len(page.of("script")) == 1
        assert len([svg for svg in page.of("svg") if svg.get("class") == "curves"]) == (5 if rows else 0)
        assert ("No curves" in source) == (not rows)
    assert 'class="mark error"' in source
    assert 'data-y="4.99 4.98 4.97' in source
