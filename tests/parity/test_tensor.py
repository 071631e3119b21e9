"""Tensor parallelism of the decoder against one process in float64, over 2, 3 and 4 tensor ranks.

Forward and backward passes with the bytes that are sent, and training, under every combination of overlap, shares of
the sequence and sums in pieces; heads, widths, tokens and lengths that do not divide, with ranks that hold none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _tensor_worker as worker
import pytest
from _ranks import Pools, named
from _tensor_worker import CONFIGS, LAYOUTS, QUICK, Case

OVERLAPPED = LAYOUTS["shares overlap"]


def passes(world: int, every: bool) -> list[Case]:
    """Return forward and backward passes of a world size; on four ranks those of two tensor ranks too."""
    if world != 4:
        return worker.passes(world, every)
    return [*worker.passes(2, every), *worker.passes(4, every), *worker.more_passes(4, every)]


def trainings(world: int, every: bool) -> list[Case]:
    """Return training runs of a world size."""
    if world == 4:
        return worker.trainings(every)
    return [Case(name, world, layout=OVERLAPPED) for name in (CONFIGS if every else ["shared"])]


def both(cases: Callable[[int, bool], list[Case]]) -> list[Any]:
    """Return world sizes with cases: some of three and four ranks, and the long remainder."""
    quick = {(world, name): case for world in (4, 3) for name, case in named(cases(world, False)).items()}
    every = {(world, name): case for world in (2, 3, 4) for name, case in named(cases(world, True)).items()}
    found = [pytest.param(world, case, id=f"{world} {name}") for (world, name), case in quick.items()]
    return found + [
        pytest.param(world, case, id=f"{world} {name} long", marks=pytest.mark.long)
        for (world, name), case in every.items()
        if (world, name) not in quick
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "case"), both(passes))
def test_passes_equal_one_process(pools: Pools, world: int, case: Case) -> None:
    pools.run(world, worker.run_pass, case)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "case"), both(trainings))
def test_training_equals_one_process(pools: Pools, world: int, case: Case) -> None:
    pools.run(world, worker.run_training, case)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(QUICK))
def test_stages_of_a_pipeline_equal_one_process(pools: Pools, name: str) -> None:
    pools.run(4, worker.run_stages, name, QUICK[name])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long)])
def test_fused_products_equal_plain_ones(pools: Pools, ranks: int) -> None:
    pools.run(ranks, worker.run_fused)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", ["overlap", "shares"])
def test_compiled_layers_equal_one_process(pools: Pools, policy: str, layout: str) -> None:
    case = Case("mha", 2, layout=(*LAYOUTS[layout], ("recompute", (policy,) * 2)), compiled=True)
    pools.run(2, worker.run_pass, case, timeout_s=880)
