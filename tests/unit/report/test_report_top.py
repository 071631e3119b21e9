"""The state of a run, reconstructed from its event logs."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from partool.report.top import RunView


def add(run_dir: Path, rank: int, kind: str, *, end: str = "\n", **data: Any) -> None:
    path = run_dir / "events" / f"rank-{rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"v": 1, "kind": kind, "t": 0.0, "rank": rank, "data": data}) + end)


def step(run_dir: Path, rank: int, number: int, loss: float | None, **changes: Any) -> None:
    figures = {"grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 1234.5, "step_time_s": 0.25, "mfu": None}
    add(run_dir, rank, "step", step=number, loss=loss, **{**figures, "memory_bytes": 3 << 29, **changes})


def picture(view: RunView) -> list[list[str]]:
    view.read()
    file = StringIO()
    Console(file=file, width=100).print(view.render("running"))
    return [line.split() for line in file.getvalue().splitlines()]


def test_the_head_says_how_long_ago_the_last_step_was(tmp_path: Path) -> None:
    file = StringIO()
    Console(file=file, width=100).print(RunView(tmp_path, "small").render("running", "last step 3 min 5 s ago"))
    assert file.getvalue().splitlines() == ["small  running, last step 3 min 5 s ago"]


def test_the_picture_follows_the_logs(tmp_path: Path) -> None:
    view = RunView(tmp_path, "small")
    assert picture(view) == [["small", "running"]]
    add(tmp_path, 0, "start", attempt=2, world_size=2, plan_hash="", resumed_from=8)
    step(tmp_path, 0, 9, 2.5)
    step(tmp_path, 1, 9, 2.5, step_time_s=0.75)
    add(tmp_path, 0, "step", end="", step=10, loss=1.0)
    first = picture(view)
    assert ["attempt", "2,", "2", "ranks,", "resumed", "after", "step", "8"] in first
    assert ["9", "2.5000", "0.500", "1.00e-03", "1,234", "0.250", "1.50", "–"] in first
    assert ["1", "9", "0.750", "1.50"] in first
    add(tmp_path, 0, "validation", end="", step=10, loss=2.0, tokens=5)  # the torn line makes this line unreadable
    add(tmp_path, 0, "checkpoint", end="\n\n", step=10, path="x", write_s=0.1, blocked_s=0.1)
    add(tmp_path, 0, "validation", step=20, loss=None, tokens=5)
    step(tmp_path, 0, 20, None)
    add(tmp_path, 0, "end", step=20, exit_code=0, reason="all steps done")
    second = picture(view)
    assert ["validation", "loss", "–", "at", "step", "20"] in second
    assert ["ended", "with", "exit", "code", "0:", "all", "steps", "done"] in second
    assert ["20", "–", "0.500", "1.00e-03", "1,234", "0.250", "1.50", "–"] in second
    assert ["9", "2.5000", "0.500", "1.00e-03", "1,234", "0.250", "1.50", "–"] in second
