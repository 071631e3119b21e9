"""The pipeline's engine against one process in float64: every schedule, on 2 to 4 gloo ranks."""

from __future__ import annotations

import _pipeline_worker as worker
import pytest
from _ranks import Pools
from often import often


@pytest.mark.timeout(260)
@pytest.mark.parametrize("ranks", often([2, 3, 4], [3]))
def test_every_schedule_has_the_gradients_of_one_process(pools: Pools, ranks: int) -> None:
    pools.run(4, worker.parity, ranks, timeout_s=250)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["hang", "die"])
def test_a_hung_or_dead_peer_ends_in_an_error_that_says_where(pools: Pools, kind: str) -> None:
    pools.run(3, worker.fault, kind, timeout_s=60, lost=[1] if kind == "die" else [])
    pools.close(3)
