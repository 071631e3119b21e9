"""Models whose graph is sharded over their sequences train as their own code does on whole ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import _sequence_compiled_worker as worker
import pytest
import torch
from _jobs import Jobs
from _own_models import own_plan
from _plans import small_plan, write_text
from _ranks import Pools, named
from often import beginning

from partool.plan.layout import Mesh
from partool.plan.types import Plan

OFTEN = (
    "2 tied cp=1 dp=2 fields=zero-3", "2 tied compiled cp=2 fields=zero-3",
    "2 gpt_oss_wide compiled cp=2 steps=0",
)  # fmt: skip
"""First words of the cases that run each time; the last one has experts, and windows."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, id=f"{world} {name}", marks=beginning(f"{world} {name}", OFTEN))
        for world in (1, 2, 3, 4)
        for name, case in named(worker.cases(world)).items()
    ],
)
def test_models_on_shares_equal_one_process(pools: Pools, world: int, case: worker.Case) -> None:
    pools.run(1, worker.written, case.model)
    pools.run(world, worker.check_case, case, timeout_s=280)


STEPS, STOP = 3, 1


def of_bytes(text: Path, cp: int, dp: int = 1) -> Plan:
    """Return a plan that trains a model of the test's own on ``cp`` ranks per sequence."""
    plan = small_plan(text, ranks=cp * dp, precision="fp64", steps=STEPS, training={"log_every": 1, "global_batch": 4})
    return own_plan(plan, "bytes", Mesh(cp=cp, dp_shard=dp), sequence_method="compiled", zero=3)


def losses(run_dir: Path) -> dict[int, float]:
    events = map(json.loads, (run_dir / "events" / "rank-0.jsonl").read_text().splitlines())
    return {event["data"]["step"]: event["data"]["loss"] for event in events if event["kind"] == "step"}


@pytest.mark.timeout(300)
def test_stopped_runs_go_on_with_any_number_of_ranks(pools: Pools, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    jobs = Jobs(tmp_path, pools, timeout_s=100)
    jobs.train("whole", of_bytes(tmp_path / "text", 2), run="whole")
    assert jobs.ended("whole") == "done"
    expected, weights = losses(tmp_path / "whole"), jobs.state("whole", STEPS)
    assert len(set(expected.values())) == STEPS, "losses that do not change would show nothing"
    jobs.train("broken", of_bytes(tmp_path / "text", 2), run="broken", stop_at=STOP)
    assert "Preempted" in jobs.ended("broken")
    for cp, dp in ((2, 1), (1, 1), (2, 2)):
        name = f"{cp} {dp}"
        shutil.copytree(tmp_path / "broken", tmp_path / name)
        jobs.train(f"rest {name}", of_bytes(tmp_path / "text", cp, dp), run=name, resume=True)
        assert jobs.ended(f"rest {name}") == "done", name
        exact = (cp, dp) == (2, 1)
        assert losses(tmp_path / name) == (expected if exact else pytest.approx(expected, abs=1e-10))
        found = jobs.state(name, STEPS)
        assert found.keys() == weights.keys()
        for key, value in weights.items():
            bound = 0.0 if exact else 1e-10
            assert torch.allclose(found[key], value, rtol=0.0, atol=bound), (name, key)
