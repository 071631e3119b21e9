"""Work of ranks for tests of one-bit exchanges and of the optimizer that makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from _ranks import joined
from _trainer_worker import train_plan
from torch import nn

from partool.layout.one_bit import ExchangeSchedule, buckets, one_bit_bytes
from partool.spec.training import OptimizerSpec
from partool_runtime.exchanges import Exchanges
from partool_runtime.jobs.train.stepping import Stepper, StepResult
from partool_runtime.optim.one_bit import OneBitOptimizer
from partool_runtime.optim.one_bit_mean import OneBitMean
from partool_runtime.parallel.comm import CommCounter

SIZES = (5, 4099, 1, 2048, 130)
SHAPES = {"a": (41, 53), "b": (7,), "c": (3, 1000), "d": (5, 11)}
"""Of parameters; gradients of the last one's first row are always zero."""
ROUNDS = 7


def everything(spec: OptimizerSpec, schedule: ExchangeSchedule, steps: int) -> dict[str, Any]:
    """Return the results of all checks of this rank, so that ranks are asked once."""
    rank = joined()
    ranks = dist.get_world_size()
    return {"mean": telescopes(rank, ranks), "trained": trained(rank, ranks, spec, schedule, steps)}


def telescopes(rank: int, ranks: int) -> dict[str, Any]:
    """Return a rank's sums of what it gave, its errors, the sums of means, and the bytes that it sent."""
    group = dist.group.WORLD if ranks > 1 else None
    found = buckets(SIZES)
    mean = OneBitMean(found, group, device=torch.device("cpu"), dtype=torch.float64)
    random = torch.Generator().manual_seed(rank)
    given, got = torch.zeros(sum(SIZES)).double(), torch.zeros(sum(SIZES)).double()
    results = []
    with CommCounter() as counter:
        for _ in range(ROUNDS):
            flat = torch.zeros(mean.elements(found[0])).double()
            for at, size in found[0].places():
                flat[at : at + size] = torch.randn(size, generator=random).double()
            (result,) = mean.means([flat])
            given += _packed(found[0], flat)
            got += _packed(found[0], result)
            results.append(_packed(found[0], result))
    server = torch.zeros(mean.elements(found[0])).double()
    first = rank * found[0].share(ranks) * 2048
    server[first : first + len(mean.server_errors[0])] = mean.server_errors[0]
    return {
        "given": given,
        "got": got,
        "results": results,
        "worker": _packed(found[0], mean.worker_errors[0]),
        "server": _packed(found[0], server),
        "sent_bytes": sum(each.sent_bytes for each in counter.snapshot().values()),
        "planned_bytes": ROUNDS * one_bit_bytes(SIZES, ranks, 8),
    }


def _packed(bucket: Any, flat: torch.Tensor) -> torch.Tensor:
    return torch.cat([flat[at : at + size] for at, size in bucket.places()])


def gradients(rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return a rank's gradients of a step, which depend on nothing else."""
    random = torch.Generator().manual_seed(1000 * rank + step)
    found = {name: torch.randn(*shape, generator=random).double() for name, shape in SHAPES.items()}
    found["d"][0] = 0.0
    return found


def start() -> dict[str, torch.Tensor]:
    """Return the weights before the first step."""
    random = torch.Generator().manual_seed(7)
    return {name: torch.randn(*shape, generator=random).double() for name, shape in SHAPES.items()}


def opened(
    spec: OptimizerSpec, schedule: ExchangeSchedule, ranks: int
) -> tuple[dict[str, nn.Parameter], Exchanges, OneBitOptimizer]:
    """Return parameters, exchanges and the optimizer of this rank."""
    parameters = {name: nn.Parameter(value) for name, value in start().items()}
    exchanges = Exchanges(schedule)
    group = dist.group.WORLD if ranks > 1 else None
    return parameters, exchanges, OneBitOptimizer(
        parameters, spec, exchanges=exchanges, group=group, placements={}, kernels="auto"
    )  # fmt: skip


def trained(
    rank: int, ranks: int, spec: OptimizerSpec, schedule: ExchangeSchedule, steps: int
) -> list[dict[str, torch.Tensor]]:
    """Return this rank's weights and momenta after each step."""
    parameters, exchanges, optimizer = opened(spec, schedule, ranks)
    history = []
    for step in range(steps):
        exchanges.begin(step)
        own = gradients(rank, step)
        for name, parameter in parameters.items():
            parameter.grad = own[name] / ranks
            if exchanges.sums_gradients and ranks > 1:
                dist.all_reduce(parameter.grad)
        optimizer.step(spec.lr, 1.0)
        state = {f"exp_avg.{name}": optimizer.state()[f"exp_avg.{name}"].clone() for name in SHAPES}
        history.append({name: p.detach().clone() for name, p in parameters.items()} | state)
    return history


def sent_in_steps(plan_json: str, run_dir: Path) -> list[dict[str, tuple[int, int]]]:
    """Train as one rank; return the calls and sent bytes of each step, by kind of collective."""
    found = []
    inner = Stepper.step

    def step(self: Stepper, *arguments: Any, **named: Any) -> StepResult:
        with CommCounter() as counter:
            result = inner(self, *arguments, **named)
        found.append({kind: (each.calls, each.sent_bytes) for kind, each in counter.snapshot().items()})
        return result

    with patch.object(Stepper, "step", step):
        assert train_plan(plan_json, run_dir, False, -1) == "done"
    return found
