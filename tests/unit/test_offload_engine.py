"""The engine's steps are those of one process that updates when it knows everything, to the bit."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch

from partool_kernels.host import Part, Pass, Pool, Rule, sums, update
from partool_kernels.reductions import total
from partool_runtime.offload.buckets import fill_buckets, places
from partool_runtime.offload.engine import Buffers, Engine, Target
from partool_runtime.offload.lanes import ThreadLanes
from partool_runtime.offload.store import MemoryStore

SHARDS = {"a": 7, "b": 3 * 2**16 + 5, "c": 2**16, "d": 1, "e": 70001}
GROUPS = {"a": 1, "b": 0, "c": 0, "d": 1, "e": 0}


def rules(step: int, lr: float, scale: float) -> list[Rule]:
    return [Rule("adamw", lr, 0.9, 0.95, 1e-8, decay, step, scale) for decay in (0.1, 0.0)]


class Together:
    """Engine and reference, told the same."""

    def __init__(self, *, speculation: str, micro_batches: int, seed: int) -> None:
        self.draws = torch.Generator().manual_seed(seed)
        self.micro_batches = micro_batches
        buckets = fill_buckets(SHARDS.items(), 2**16 + 2**12)
        self.weights = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in SHARDS.items()}
        self.store = MemoryStore(buckets, (torch.float32,) * 3)
        self.engine = Engine(
            buckets,
            {name: Target(weights, GROUPS[name]) for name, weights in self.weights.items()},
            self.store,
            lanes=ThreadLanes(random.Random(seed)),
            pool=Pool(),
            buffers=Buffers(
                buckets,
                gradients=torch.bfloat16,
                weights=torch.bfloat16,
                totals=torch.float32 if micro_batches > 1 else None,
                pinned=False,
            ),
            speculation=speculation,  # type: ignore[arg-type]
        )
        starts = places(buckets)
        self.flat = {
            name: [flat[starts[name] : starts[name] + size] for flat in self.store.flat()]
            for name, size in SHARDS.items()
        }
        self.states = {name: torch.randn(3, size, generator=self.draws) for name, size in SHARDS.items()}
        for name, (master, first, second) in self.states.items():
            first.mul_(0.1)
            second.square_()
            for flat, value in zip(self.flat[name], (master, first, second), strict=True):
                flat.copy_(value)
        self.engine.rebuild()
        self.done = 0

    def step(self, lr: float, *, clip: float, poison: str = "", missing: str = "") -> None:
        grads = [
            {
                name: torch.randn(size, generator=self.draws).bfloat16()
                for name, size in SHARDS.items()
                if name != missing
            }
            for _ in range(self.micro_batches)
        ]
        if poison:
            grads[-1][poison][-1] = math.inf
        self.engine.begin(rules(self.done + 1, lr, 1.0))
        for index, micro in enumerate(grads):
            self.engine.micro_batch(last=index == len(grads) - 1)
            for name, gradient in micro.items():
                self.engine.arrive(name, gradient.clone())
        blocks, finite = self.engine.sums()
        whole = {
            name: sum((g[name].float() for g in grads), torch.zeros(SHARDS[name]))
            if name != missing
            else torch.zeros(SHARDS[name])
            for name in SHARDS
        }
        expected = sums(list(whole.values()))
        assert total(blocks) == total([b for part in expected.squares for b in part]) or poison
        assert finite == all(expected.finite)
        norm = math.sqrt(total(blocks)) if finite else math.nan
        scale = clip / norm if norm > clip else 1.0
        if not finite:
            self.engine.settle(None)
            return
        self.done += 1
        self.engine.settle(rules(self.done, lr, scale))
        for name, (master, first, second) in self.states.items():
            part = Part(master, (first, second), GROUPS[name])
            update([part], step=Pass([whole[name]], rules(self.done, lr, scale)))

    def compare(self, *, flushed: bool) -> None:
        for name, (master, first, second) in self.states.items():
            assert torch.equal(self.weights[name], master.bfloat16()), name
            if flushed:
                for mine, other in zip(self.flat[name], (master, first, second), strict=True):
                    assert torch.equal(mine, other), name


@pytest.fixture(params=list(itertools.product(("none", "deferred"), (1, 3))))
def together(request: pytest.FixtureRequest) -> Iterator[Together]:
    speculation, micro_batches = request.param
    one = Together(speculation=speculation, micro_batches=micro_batches, seed=5)
    yield one
    one.engine.close()


@pytest.mark.timeout(60)
def test_every_verdict_leaves_the_bits_of_the_reference(together: Together) -> None:
    cases = [
        {"lr": 1e-3, "clip": math.inf},
        {"lr": 2e-3, "clip": 1.0},
        {"lr": 1e-3, "clip": math.inf, "poison": "b"},
        {"lr": 1e-3, "clip": math.inf, "missing": "c"},
        {"lr": 5e-4, "clip": 0.5, "missing": "a"},
        {"lr": 1e-3, "clip": math.inf},
        {"lr": 1e-3, "clip": 1.0, "poison": "d"},
        {"lr": 1e-3, "clip": math.inf},
    ]
    for index, case in enumerate(cases):
        together.step(**case)  # type: ignore[arg-type]
        if index == 3:
            together.engine.flush()
        together.compare(flushed=index == 3)
    together.engine.flush()
    together.compare(flushed=True)
    assert together.done == 6
