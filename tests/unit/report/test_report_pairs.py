"""The report of pairs of answers, from the events of a run's first rank."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from planned import plan_of
from rich.console import Console
from test_report_experts import SPEC

from partool.plan.record import DamagedRecordError
from partool.report.curves import history_of
from partool.report.headline import headline
from partool.report.html_run import render_run_html
from partool.report.pairs import pair_reports, render_pairs

MEANS: dict[str, Any] = {
    "chosen": 0.25, "rejected": -0.5, "margin": 0.75, "accuracy": 0.875, "logps_chosen": -31.5, "logps_rejected": -40.0,
    "pairs": 16.0,
}  # fmt: skip


def write(folder: Path, kind: str, step: int, **figures: Any) -> None:
    event = {"v": 1, "kind": kind, "t": 0.0, "rank": 0, "data": {"step": step, "loss": 0.5} | figures}
    (folder / "events").mkdir(exist_ok=True)
    with (folder / "events" / "rank-0.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_the_latest_figures_of_training_and_validation_are_shown(tmp_path: Path) -> None:
    write(tmp_path, "step", 5, preferences=MEANS | {"accuracy": 0.5, "kl": 0.0})
    write(tmp_path, "step", 10, preferences=MEANS | {"kl": -0.0123})
    write(tmp_path, "step", 11)
    write(tmp_path, "validation", 10, preferences=MEANS | {"margin": None, "kl": 0.5})
    reports = pair_reports(tmp_path)
    text = StringIO()
    render_pairs(reports, Console(file=text, width=100))
    rows = {line[:28].strip(): line[28:].split() for line in text.getvalue().splitlines()[1:] if line.strip()}
    assert text.getvalue().splitlines()[0].split("  ")[-1].strip() == "validation, step 10"
    assert rows["accuracy"] == ["87.5%", "87.5%"]
    assert rows["margin"] == ["0.7500", "–"]
    assert rows["log-probability of rejected"] == ["-40.0000", "-40.0000"]
    assert rows["KL per token"] == ["-0.0123", "0.5000"]
    assert "log odds" not in rows
    plan = plan_of(SPEC)
    head = headline(plan, history_of(()), None)
    page = render_run_html(plan, "run", None, None, "no pipeline", head=head, pairs=reports)
    assert '<th scope="row">KL per token</th><td class="n">-0.0123</td>' in page


def test_a_run_without_pairs_has_no_table_and_damage_is_named(tmp_path: Path) -> None:
    assert pair_reports(tmp_path) == []
    write(tmp_path, "step", 5)
    assert pair_reports(tmp_path) == []
    plan = plan_of(SPEC)
    head = headline(plan, history_of(()), None)
    assert "Pairs of answers" not in render_run_html(plan, "run", None, None, "no pipeline", head=head)
    write(tmp_path, "step", 6, preferences={"kl": "large"})
    with pytest.raises(DamagedRecordError, match="kl"):
        pair_reports(tmp_path)
