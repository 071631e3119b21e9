"""The order in which gradients are expected, and the cores that training and the host's optimizer get."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch

from partool_runtime.data.batches import MicroBatch
from partool_runtime.mesh import Ranks, close_ranks, open_ranks
from partool_runtime.offload.install import expected, split_cores
from partool_runtime.parallel.zero import trained_parameters
from partool_runtime.preparation import prepare
from partool_runtime.weights import fill

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from _plans import small_plan

MACHINE = list(range(16))


@pytest.mark.parametrize(
    ("allowed", "per_node", "rank", "threads", "training", "optimizer"),
    [
        (MACHINE, 1, 0, 10, list(range(6)), list(range(6, 16))),
        (MACHINE, 2, 1, 6, [8, 9], list(range(10, 16))),
        (MACHINE[:8], 4, 1, 3, [4], [5, 6, 7]),  # bound to one of two memory nodes, with one other rank
        (MACHINE[8:], 4, 3, 3, [12], [13, 14, 15]),
        (MACHINE, 3, 2, 1, [10, 11, 12, 13], [14]),
        (MACHINE, 16, 3, 1, [], []),
        (MACHINE, 2, 0, 8, [], []),
    ],
)
def test_cores_are_shared_out(
    allowed: list[int], per_node: int, rank: int, threads: int, training: list[int], optimizer: list[int]
) -> None:
    assert split_cores(allowed, per_node, rank, threads, machine=16) == (training, optimizer)


@pytest.mark.parametrize("per_node", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_no_core_is_given_twice(per_node: int, threads: int) -> None:
    given = [
        core for rank in range(per_node) for part in split_cores(MACHINE, per_node, rank, threads, 16) for core in part
    ]
    assert len(given) == len(set(given))


@pytest.fixture
def ranks() -> Iterator[partial[Ranks]]:
    yield partial(open_ranks)
    close_ranks()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_come_in_the_order_that_is_expected(ranks: partial[Ranks], tied: bool, tmp_path: Path) -> None:
    plan = small_plan(tmp_path, ranks=1, zero=3, accumulation=1, model={"tied_embeddings": tied})
    prepared = prepare(plan, ranks(plan), lambda done, sent: None)
    model, came = prepared.model, []
    fill(model, plan.weights, seed=1)
    trained = trained_parameters(model)
    for name, parameter in trained.items():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    tokens = torch.arange(32).view(2, 16)
    prepared.passes.step([MicroBatch(tokens, tokens)], torch.ones(()), lambda term: nullcontext())
    assert came == expected(model, trained, ())  # type: ignore[arg-type]
    late = {came[0], came[-1]}
    assert expected(model, trained, late) == [n for n in came if n not in late] + [n for n in trained if n in late]  # type: ignore[arg-type]
