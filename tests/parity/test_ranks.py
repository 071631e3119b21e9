"""Pools of ranks: values come back, and a case that raises, hangs or dies fails by its own name."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from _ranks import Pools, RankError


def joined() -> int:
    """Return the sum of the ranks, over a group that the pool keeps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def raising() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("seven")


def hanging() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(60)


def dying() -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.timeout(120)
def test_cases_fail_alone(pools: Pools) -> None:
    assert pools.run(2, os.getenv, "RANK") == ["0", "1"]
    assert pools.run(3, joined) == [3] * 3
    first = pools.run(2, os.getpid)
    assert [pools.run(2, joined) for _ in range(2)] == [[1, 1]] * 2
    assert pools.run(2, os.getpid) == first, "ranks stay"
    for case, words in ((raising, "ValueError: seven"), (hanging, "in hanging"), (dying, "status -11")):
        with pytest.raises(RankError, match=words) as error:
            pools.run(2, case, timeout_s=2)
        assert "rank 0" not in str(error.value)
        assert pools.run(2, joined) == [1, 1]
        assert pools.run(2, os.getpid) != first, "ranks are new"
