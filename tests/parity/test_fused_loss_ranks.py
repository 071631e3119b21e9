"""The loss by kernels, with its gradients early or late, and a z-loss with or without them, against one process."""

from __future__ import annotations

import _fused_loss_worker as worker
import pytest
from _ranks import Pools


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", list(worker.CASES))
def test_every_arrangement_of_four_ranks_equals_one_process(pools: Pools, name: str) -> None:
    pools.run(worker.RANKS, worker.check_case, name)
