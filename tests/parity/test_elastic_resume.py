"""A run on two nodes that stops and goes on with one trains as the unbroken run does: same sequences, same losses."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import _trainer_data_worker as worker
import pytest
from _plans import small_plan, write_text
from _ranks import run_ranks

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.planner.elastic import resized

STEPS, STOP = 6, 3


def two_nodes(text: Path) -> Plan:
    """Return a plan for two nodes of two ranks each, in fp64."""
    plan = small_plan(text, ranks=4, zero=3, accumulation=1, precision="fp64", steps=STEPS, training={"log_every": 1})
    devices = plan.devices.model_copy(update={"nodes": 2, "per_node": 2})
    return plan.model_copy(update={"devices": devices})


def job(plan: Plan, run: str, *, resume: bool = False, stop_at: int = -1) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"plan": json.loads(plan.to_json()), "run": run, "resume": resume, "stop_at": stop_at, "port": port}


def run(folder: Path, ranks: int, **jobs: dict[str, Any]) -> list[str]:
    """Run jobs one after the other; returns how each ended on rank 0."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    run_ranks(Path(worker.__file__), ranks, str(folder / "jobs.json"))
    return [(folder / f"{name}.rank-0.txt").read_text() for name in jobs]


def losses(run_dir: Path) -> dict[int, float]:
    events = map(json.loads, (run_dir / "events" / "rank-0.jsonl").read_text().splitlines())
    return {event["data"]["step"]: event["data"]["loss"] for event in events if event["kind"] == "step"}


def seen(folder: Path, ranks: int) -> dict[int, list[tuple[int, ...]]]:
    """Return the sequences of every step over the ranks, sorted."""
    steps: dict[int, list[tuple[int, ...]]] = {}
    for rank in range(ranks):
        for line in (folder / f"seen-{ranks}.rank-{rank}.jsonl").read_text().splitlines():
            step, rows = json.loads(line)
            steps.setdefault(step, []).extend(map(tuple, rows))
    return {step: sorted(rows) for step, rows in steps.items()}


@pytest.mark.timeout(150)
@pytest.mark.long
def test_going_on_with_fewer_nodes_changes_nothing(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    four = two_nodes(tmp_path / "text")
    two = resized(four, 1)
    assert isinstance(two, Plan), two
    assert (two.layout.mesh, two.layout.micro_batch, two.layout.derived.accumulation) == (Mesh(dp_shard=2), 3, 2)

    whole, broken = job(four, "whole"), job(four, "broken", stop_at=STOP)
    done, stopped = run(tmp_path, 4, whole=whole, broken=broken)
    assert done == "done"
    assert "Preempted" in stopped
    assert run(tmp_path, 2, rest=job(two, "broken", resume=True)) == ["done"]

    expected, found = losses(tmp_path / "whole"), losses(tmp_path / "broken")
    assert sorted(expected) == sorted(found) == list(range(1, STEPS + 1))
    assert found == pytest.approx(expected, abs=1e-10)
    assert len(set(expected.values())) == STEPS, "losses that do not change would show nothing"

    unbroken, rest = seen(tmp_path, 4), seen(tmp_path, 2)
    assert sorted(rest) == list(range(STOP, STEPS))
    assert len({tuple(rows) for rows in rest.values()}) == STEPS - STOP
    for step, rows in rest.items():
        assert rows == unbroken[step], f"step {step} trained on other sequences"
