"""Two-dimensional tensor parallelism (ATP) against one process in float64, and its traffic against the planner's."""

from __future__ import annotations

import _atp_worker as worker
import pytest
from _ranks import Pools
from often import often


@pytest.mark.timeout(170)
@pytest.mark.parametrize(
    ("ranks", "name"),
    often(
        [(ranks, name) for ranks in (4, 8) for name in worker.cases(ranks)],
        [*((4, name) for name in worker.cases(4)), (8, "2x4 llama")],
    ),
)
def test_every_shape_arrangement_and_combination_equals_one_process(pools: Pools, ranks: int, name: str) -> None:
    pools.run(ranks, worker.check_case, name)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_compiled_layers_with_what_they_exchange(pools: Pools) -> None:
    pools.run(4, worker.check_compiled_layers, timeout_s=580)
