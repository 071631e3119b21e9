"""Checkpoints that dry runs plan: those of real ranks, and without a fault."""

from __future__ import annotations

import _dry_checkpoint_worker as worker
import pytest
from _ranks import Pools
from often import often

from partool.verify.checkpoint import checkpoint_faults


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", often(worker.CASES, worker.OFTEN))
def test_ranks_plan_the_checkpoint_of_a_real_run(pools: Pools, name: str) -> None:
    traces = pools.run(4, worker.check_case, name)
    assert checkpoint_faults(worker.plan_for(name), traces) == []
    others = [trace for trace in traces if trace.rank != 1]
    assert checkpoint_faults(worker.plan_for(name), others) or name in worker.COPIED, "rank 1 holds a part"
