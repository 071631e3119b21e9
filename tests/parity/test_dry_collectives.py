"""Dry runs against real ones: each rank issues the same collectives, with the same sizes, in the same order."""

from __future__ import annotations

import _dry_worker as worker
import pytest
from _ranks import Pools


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in worker.OFTEN else pytest.mark.long) for name in worker.CASES]
)
def test_a_dry_run_issues_the_collectives_of_a_real_one(pools: Pools, name: str) -> None:
    pools.run(4, worker.check_case, name)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("schedule", "data"), [("weipipe", 1), *(pytest.param(*each, marks=pytest.mark.long) for each in worker.RINGS)]
)
def test_a_ring_sends_the_weights_and_gradients_of_a_real_one(pools: Pools, schedule: str, data: int) -> None:
    pools.run(4, worker.check_ring, schedule, data)
