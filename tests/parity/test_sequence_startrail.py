"""StarTrail: teams and rings of any sizes attend as one process does, and send what the planner says."""

from __future__ import annotations

import _sequence_startrail_worker as worker
import pytest
from _ranks import Pools, named

CASES = named(worker.CASES)
SEEDS = {name: seed for seed, name in enumerate(CASES)}


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks <= 12])
def test_teams_and_rings_equal_one_process_and_send_what_is_planned(pools: Pools, name: str) -> None:
    pools.run(12, worker.check_case, CASES[name], SEEDS[name])


@pytest.mark.timeout(150)
def test_backward_passes_of_two_models_in_the_order_of_the_forward_passes(pools: Pools) -> None:
    pools.run(12, worker.two_at_once)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.ranks > 12])
def test_sixteen_ranks(pools: Pools, name: str) -> None:
    pools.run(16, worker.check_case, CASES[name], SEEDS[name], timeout_s=380)
