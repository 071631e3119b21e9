"""A run on two nodes that stops and goes on with one trains as the unbroken run does: same sequences, same losses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from _jobs import Jobs
from _plans import small_plan, write_text
from _ranks import Pools
from _trainer_worker import train_and_note
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.planner.elastic import resized
from partool.spec.telemetry import TelemetrySpec, TrackerSpec

STEPS, STOP = 6, 3


def two_nodes(text: Path) -> Plan:
    """Return a plan for two nodes of two ranks each, in fp64."""
    plan = small_plan(text, ranks=4, zero=3, accumulation=1, precision="fp64", steps=STEPS, training={"log_every": 1})
    devices = plan.devices.model_copy(update={"nodes": 2, "per_node": 2})
    return plan.model_copy(update={"devices": devices})


def with_tracker(plan: Plan, tags: list[str]) -> Plan:
    telemetry = TelemetrySpec(trackers=[TrackerSpec(name="tensorboard")], tags=tags)
    return plan.model_copy(update={"telemetry": telemetry})


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
def test_going_on_with_fewer_nodes_changes_nothing(pools: Pools, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    four = two_nodes(tmp_path / "text")
    two = resized(four, 1)
    assert isinstance(two, Plan), two
    assert (two.layout.mesh, two.layout.micro_batch, two.layout.derived.accumulation) == (Mesh(dp_shard=2), 3, 2)

    jobs = Jobs(tmp_path, pools, train_and_note)
    jobs.train("whole", four, run="whole")
    jobs.train("broken", with_tracker(four, ["first"]), run="broken", stop_at=STOP)
    jobs.train("rest", with_tracker(two, ["other", "tags"]), run="broken", resume=True)
    assert jobs.ended("whole") == jobs.ended("rest") == "done"
    assert "Preempted" in jobs.ended("broken")

    expected, found = losses(tmp_path / "whole"), losses(tmp_path / "broken")
    assert sorted(expected) == sorted(found) == list(range(1, STEPS + 1))
    assert found == pytest.approx(expected, abs=1e-10)
    assert len(set(expected.values())) == STEPS, "losses that do not change would show nothing"

    events = EventAccumulator(str(tmp_path / "broken" / "tensorboard"))
    events.Reload()
    shown = {point.step: point.value for point in events.Scalars("train/loss")}
    assert shown == {step: float(np.float32(loss)) for step, loss in found.items()}

    unbroken, rest = seen(tmp_path, 4), seen(tmp_path, 2)
    assert sorted(rest) == list(range(STOP, STEPS))
    assert len({tuple(rows) for rows in rest.values()}) == STEPS - STOP
    for step, rows in rest.items():
        assert rows == unbroken[step], f"step {step} trained on other sequences"
