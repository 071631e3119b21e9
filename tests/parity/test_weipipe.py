"""WeiPipe in float64 against one process: each variant, uneven and frozen stages, replicas, lost peers."""

from __future__ import annotations

from collections.abc import Callable

import _weipipe_worker as worker
import pytest
from _ranks import Pools
from often import often


@pytest.mark.timeout(180)
@pytest.mark.parametrize("ranks", often([4, 2, 3], [3]))
def test_every_variant_has_the_gradients_of_one_process(pools: Pools, ranks: int) -> None:
    """On four processes: a ring of all four, two rings of two, and a ring of three beside a ring of one."""
    pools.run(4, worker.parity, ranks, timeout_s=170)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", [worker.check_frozen, worker.check_narrow, worker.check_replicas])
def test_frozen_stages_narrow_weights_and_replicas(pools: Pools, check: Callable[[], None]) -> None:
    pools.run(4, check)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("gone", [False, True])
def test_a_lost_peer_ends_in_an_error_that_says_where(pools: Pools, gone: bool) -> None:
    pools.close(4)
    pools.run(4, worker.check_lost_peer, gone, lost=range(4) if gone else [])
    pools.close(4)
