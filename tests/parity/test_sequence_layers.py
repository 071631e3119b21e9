"""Decoders whose ranks share sequences, method by method, against one process."""

from __future__ import annotations

from collections.abc import Callable

import _sequence_layers_worker as worker
import pytest
from _ranks import Pools, named
from _sequence_plans import MODELS

SOME, EVERY = named(worker.cases(every=False)), named(worker.cases(every=True))
COMPILED = named(
    worker.Case("grouped", method, fields, policy, documents=True, compiled=True)
    for method, fields in worker.METHODS.items()
    for policy in ("none", "selective", "keep_attention", "full")
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", list(SOME))
def test_layers_on_shares_equal_one_process(pools: Pools, name: str) -> None:
    pools.run(worker.WORLD, worker.check, SOME[name])


@pytest.mark.timeout(180)
@pytest.mark.parametrize("check", [worker.check_two_at_once, worker.check_lost_window, worker.check_refusals])
def test_models_keep_apart_and_faults_are_found(pools: Pools, check: Callable[[], None]) -> None:
    pools.run(worker.WORLD, check)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in EVERY if name not in SOME])
def test_layers_on_shares_with_every_policy_equal_one_process(pools: Pools, name: str) -> None:
    pools.run(worker.WORLD, worker.check, EVERY[name])


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(COMPILED))
def test_compiled_layers_on_shares_equal_one_process(pools: Pools, name: str) -> None:
    pools.run(worker.WORLD, worker.check, COMPILED[name], timeout_s=280)


def test_every_model_has_a_case() -> None:
    assert set(MODELS) > {case.model for case in EVERY.values()} - {"five"}
