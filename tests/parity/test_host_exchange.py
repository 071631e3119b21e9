"""Gradients and parameters that CPU ranks exchange, and the times at which the results are complete."""

from __future__ import annotations

import _host_exchange_worker as worker
import pytest
from _ranks import Pools


@pytest.mark.timeout(120)
def test_three_ranks_send_every_part_once_and_wait_as_late_as_they_may(pools: Pools) -> None:
    pools.run(3, worker.main)
