"""Dry runs against real ones: state in host memory, rings on CPUs, evaluations and checkpoints."""

from __future__ import annotations

from pathlib import Path

import _dry_host_worker as worker
import pytest
from _ranks import Pools
from planned import plan_of

from partool.verify.checkpoint import checkpoint_faults


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in worker.OFTEN else pytest.mark.long) for name in worker.CASES]
)
def test_a_dry_run_exchanges_evaluates_and_saves_as_a_real_one(pools: Pools, name: str, tmp_path: Path) -> None:
    traces = pools.run(4, worker.check_case, name, str(tmp_path))
    assert checkpoint_faults(worker.plan_for(name, str(tmp_path)), traces) == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("schedule", "data"), [("weipipe", 1), *(pytest.param(*each, marks=pytest.mark.long) for each in worker.RINGS)]
)
def test_a_ring_sends_the_weights_and_gradients_of_a_real_one(pools: Pools, schedule: str, data: int) -> None:
    traces = pools.run(4, worker.check_ring, schedule, data)
    assert checkpoint_faults(plan_of(worker.SPEC % ("", "tensor: 1, sequence: 1, pipeline: 1")), traces) == []
