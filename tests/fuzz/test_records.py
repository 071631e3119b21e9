"""Attack ``records``: edited files of runs, shown by every command about runs. Nothing but a finding may end one."""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from _attack import Attack
from _limits import bounded
from _mutations import NUMBERS, SEEDS, TEXTS, copy_elsewhere, delete, places, retype, text_of
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from _executed import write_run
from _telemetry import prediction

from partool.plan.event_log import event_log
from partool.plan.run import RunStatus, rank_log, write_status
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.report.timeline import predicted_times
from partool.spec import load_text
from partool_runtime.agent.error_files import ErrorRecord, put_record
from partool_runtime.telemetry.summary import Measures, row_json, rows

CPU_S = 20.0
MEMORY_GIB = 1.0
COMMANDS = (
    ("report",), ("report", "--output", "json"), ("report", "--html", "page.html"), ("status",),
    ("status", "--output", "json"), ("list",), ("logs",), ("logs", "--errors"), ("top", "--once"),
)  # fmt: skip
SUBMISSIONS: dict[str, dict[str, str]] = {
    "slurm": {"job_id": "7"},
    "k8s": {"kind": "jobset", "namespace": "team", "name": "a-run", "uid": "1", "context": "none", "nodes": "2"},
}
Files = dict[str, list[Any]]
"""Name of a file → the JSON values that it holds, one a line for a log."""


@cache
def plan() -> Plan:
    """Return the plan of a pipeline of two ranks."""
    spec = load_text(text_of(SEEDS["pipeline"] | {"hardware": {"accelerator": "a100-40", "per_node": 2}})).spec
    assert spec is not None
    made = make_plan(spec, base_dir=Path("/base"), default_name="attacked").plan
    assert made is not None
    return made


def write_whole(folder: Path) -> None:
    """Write the files of a run of a pipeline, with every kind of event, as the runtime writes them."""
    (folder / "plan.json").write_text(plan().to_json(), encoding="utf-8")
    write_status(folder, RunStatus(state="failed", created=1e9, attempt=1, started=1e9, ended=1e9 + 60, exit_code=1))
    put_record(folder, ErrorRecord(1, 1, 1e9, "ValueError", "boom", "Traceback\nValueError: boom", 1))
    (folder / "logs" / "attempt-1").mkdir(parents=True)
    rank_log(folder, 1, 0, "stdout").write_text("step 1\n", encoding="utf-8")
    table = [row_json(row) for row in rows(prediction(), Measures())]
    summary = {"world_size": 2, "ranks": 2, "terms": table, "mfu": 0.4, "predicted_mfu": None, "slow": "the disk"}
    (folder / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    write_run(folder, plan(), lambda _: predicted_times(plan()), steps=range(1, 3))
    step = {"step": 2, "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "tokens": 512, "step_time_s": 0.1, "mfu": None}
    layer = {"layer": 1, "tokens": [5, 0, 3], "imbalance": 1.9, "dropped": 0.0, "entropy": 0.7, "bias": [-0.1, 0.1]}
    events = [
        ("start", {"attempt": 1, "world_size": 2, "plan_hash": plan().hash, "resumed_from": None}),
        ("step", step | {"tokens_per_s": 5120.0, "memory_bytes": 1 << 30, "skipped": False, "terms_s": {"data": 0.1}}),
        ("validation", {"step": 2, "loss": 2.4, "tokens": 64}),
        ("checkpoint", {"step": 2, "path": "x", "write_s": 0.1, "blocked_s": 0.0}),
        ("experts", {"step": 2, "layers": [layer]}),
        ("end", {"step": 2, "exit_code": 1, "reason": "boom"}),
    ]
    for rank in (0, 1):
        lines = [json.dumps({"v": 1, "kind": kind, "t": 1e9, "rank": rank, "data": data}) for kind, data in events]
        log = event_log(folder, rank)
        log.write_text("\n".join([lines[0], log.read_text(encoding="utf-8").rstrip(), *lines[1:]]) + "\n", "utf-8")


def submission(rng: random.Random) -> dict[str, Any]:
    target = rng.choice(list(SUBMISSIONS))
    return {"target": target, "submitted": 1e9, "main": "job.sbatch", "details": dict(SUBMISSIONS[target])}


def extreme(rng: random.Random, document: dict[str, Any]) -> None:
    """Set a number or a text to an extreme one, or to one of the other type."""
    at, key = rng.choice(list(places(document)))
    at[key] = rng.choice([*NUMBERS, 10**400, *TEXTS, "\ud800", True])


def action(rng: random.Random, document: dict[str, Any]) -> None:
    """Put another action, or another time, into an event of a pipeline; a plan that is not kept into other events."""
    event = document.get("")
    data = event.get("data") if isinstance(event, dict) else None
    if isinstance(data, dict) and isinstance(columns := data.get("actions"), list) and columns:
        at = rng.randrange(len(columns))
        stage, number = rng.choice([0, 1, 2, 7, 99, 10**9]), rng.choice([0, 1, 7, 99, 10**9])
        columns[at] = rng.choice([f"{stage}{kind}{number}" for kind in ("F", "B", "I", "W", "SEND_F", "RECV_F", "X")])
        if isinstance(times := data.get(rng.choice(["start_us", "stop_us", "waited_us"])), list) and times:
            times[at % len(times)] = rng.choice([0, -1, 10**6, 2**53, 10**15])
    elif isinstance(data, dict) and "plan_hash" in data:
        data |= {"plan_hash": "0" * 64, "world_size": rng.choice([1, 2, 3, 10**6])}


def nest(rng: random.Random, document: dict[str, Any]) -> None:
    """Put a value that is nested deeply in place of another; JSON is written by hand, which has no such limit."""
    at, key = rng.choice(list(places(document)))
    at[key] = f"NEST{rng.choice([10, 900, 20_000])}"


MUTATIONS = [extreme, extreme, extreme, action, action, retype, delete, copy_elsewhere, nest]


def as_json(value: Any) -> str:
    text = json.dumps(value)
    for depth in (10, 900, 20_000):
        text = text.replace(f'"NEST{depth}"', "[" * depth + "]" * depth)
    return text


def read_files(folder: Path) -> Files:
    found = {}
    for file in sorted([*folder.glob("*.json"), *folder.glob("events/*"), *folder.glob("errors/*")]):
        if file.name != "plan.json":
            text = file.read_text(encoding="utf-8")
            lines = text.splitlines() if file.suffix == ".jsonl" else [text]
            found[str(file.relative_to(folder))] = [json.loads(line) for line in lines]
    return found


def edited(rng: random.Random, whole: Files) -> tuple[str, str, str]:
    """Return the name of a file, its text after an edit, and the edited value."""
    name = rng.choice([*whole, *["submission.json"] * 2, "summary.json", "status.json"])
    values = copy.deepcopy(whole.get(name)) or [submission(rng)]
    at = rng.randrange(len(values))
    box: dict[str, Any] = {"": values[at]}
    for mutation in rng.choices(MUTATIONS, k=rng.choice([1, 1, 1, 2])):
        if box:
            mutation(rng, box)
    values[at] = box.get("", {})
    lines = [as_json(value) for value in values]
    text = lines[at] if rng.random() < 0.95 else lines[at][: rng.randrange(1, len(lines[at]) + 1)]
    return name, "\n".join([*lines[:at], text, *lines[at + 1 :]]) + "\n", text[:1500]


@pytest.mark.timeout(1200)
def test_edited_records_are_shown_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARTOOL_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))  # without Slurm's commands
    monkeypatch.setenv("KUBECONFIG", os.devnull)
    folder = tmp_path / "runs" / "attacked-20261129-000000-0000"
    folder.mkdir(parents=True)
    write_whole(folder)
    whole = read_files(folder)
    commands = {name[0]: typer.Typer(add_completion=False, pretty_exceptions_enable=False) for name in COMMANDS}
    for name, app in commands.items():
        app.command()(importlib.import_module(f"partool.cli.{name}").command)
    assert CliRunner().invoke(commands["report"], ["attacked"]).exit_code == 0
    attack = Attack("records", least=30)
    for number, rng in attack.cases():
        name, text, shown = edited(rng, whole)
        chosen = rng.sample(COMMANDS, 3)
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        with attack.case(number, lambda chosen=chosen, name=name, shown=shown: f"{chosen} {name}: {shown}"):
            (folder / name).write_text(text, encoding="utf-8")
            for command, *options in chosen:
                with bounded(CPU_S, MEMORY_GIB):
                    words = [*options] if command == "list" else ["attacked", *options]
                    result = CliRunner().invoke(commands[command], words, catch_exceptions=False)
                said = f"{command}: exit code {result.exit_code}: {result.output[-500:]}"
                assert result.exit_code in (0, 1, 3), said
                assert result.exit_code == 0 or "error[PT" in result.output, said
                if "json" in options and result.exit_code == 0:
                    json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        if before is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(before)
    attack.judge()
