"""Models that transformers builds train on shares of sequences as its own code does on whole ones."""

from __future__ import annotations

import _sequence_hf_worker as worker
import pytest
from _ranks import Pools, named
from often import beginning

CHOSEN: tuple[tuple[int, str], ...] = ((4, ""), (1, ""), (3, ""), (2, "all"), (4, "all"))
"""World sizes with what is chosen."""
OFTEN = ("4  qwen3_deep steps", "4  gpt2", "4  deepseek_v2", "4  llama cp=2 tp=2", "1  ")
"""First words of the cases that run each time."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, id=f"{world} {chosen} {name}", marks=beginning(f"{world} {chosen} {name}", OFTEN))
        for world, chosen in CHOSEN
        for name, case in named(worker.cases(world, chosen)).items()
    ],
)
def test_models_on_shares_equal_one_process(pools: Pools, world: int, case: worker.Case) -> None:
    pools.run(1, worker.written, case.model)
    pools.run(world, worker.check_case, case, timeout_s=280)


@pytest.mark.timeout(200)
def test_a_dropped_window_is_found(pools: Pools) -> None:
    pools.run(1, worker.written, "mistral")
    pools.run(1, worker.a_dropped_window_is_found)


@pytest.mark.timeout(200)
def test_dropped_weights_are_those_of_one_process(pools: Pools) -> None:
    pools.run(1, worker.written, "llama")
    pools.run(4, worker.dropped_weights_are_those_of_one_process)
