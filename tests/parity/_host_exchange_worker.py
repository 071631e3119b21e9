"""One rank: reductions and gathers between CPUs, alone. Fails by an assertion."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from _ranks import joined
from torch.utils._python_dispatch import TorchDispatchMode

from partool_runtime.parallel.comm import CommCounter
from partool_runtime.parallel.host_exchange import AHEAD, ParameterGather, ReplicaSum, ScatterSum

SIZE = 7
UNITS = 4


class Operators(TorchDispatchMode):
    """Notes the names of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def drawn(rank: int, unit: int, ranks: int) -> torch.Tensor:
    return torch.randn(SIZE * ranks, generator=torch.Generator().manual_seed(100 * rank + unit), dtype=torch.float64)


def main() -> None:
    joined()
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    for overlap in (False, True):
        sums, outputs = ScatterSum(), []
        sums.overlap = overlap
        with CommCounter() as counter, Operators() as seen:
            for unit in range(UNITS):
                outputs.append(torch.full((SIZE,), torch.nan, dtype=torch.float64))
                sums(outputs[-1], drawn(rank, unit, ranks), group, dist.ReduceOp.SUM)
                assert len(sums._started) == (min(unit + 1, AHEAD) if overlap else 0)
                # What was left on its way is not there before somebody waits.
                assert bool(outputs[-1].isnan().all()) == overlap
            sums.finish()
        for unit, got in enumerate(outputs):
            want = sum(drawn(other, unit, ranks) for other in range(ranks))[SIZE * rank : SIZE * (rank + 1)]
            torch.testing.assert_close(got, want, rtol=1e-15, atol=1e-15)
        traffic = counter.snapshot()
        assert set(traffic) == {"reduce_scatter"}
        assert traffic["reduce_scatter"].calls == UNITS
        assert traffic["reduce_scatter"].sent_bytes == UNITS * 8 * SIZE * (ranks - 1)
        assert not any("reduce" in name for name in seen.names), f"gloo reduces by an all-reduce: {seen.names}"
    for overlap in (False, True):
        replicas, held = ReplicaSum(group), [drawn(rank, unit, 1) for unit in range(UNITS)]
        replicas.overlap = overlap
        with CommCounter() as counter:
            for unit, gradients in enumerate(held):
                replicas(gradients)
                assert len(replicas._started) == (min(unit + 1, AHEAD) if overlap else 0)
            replicas.finish()
        for unit, gradients in enumerate(held):
            want = sum(drawn(other, unit, 1) for other in range(ranks))
            torch.testing.assert_close(gradients, want, rtol=1e-15, atol=1e-15)
        assert counter.snapshot()["all_reduce"].calls == UNITS
    gather = ParameterGather()
    for background in (False, True):
        whole = torch.empty(SIZE * ranks, dtype=torch.float64)
        work = gather(whole, drawn(rank, 0, 1), group, async_op=background)
        assert (work is not None) == background
        if work is not None:
            work.wait()
        assert torch.equal(whole, torch.cat([drawn(other, 0, 1) for other in range(ranks)]))
