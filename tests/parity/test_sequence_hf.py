"""Models that transformers builds train on shares of sequences as its own code does on whole ones."""

from __future__ import annotations

import _sequence_hf_worker as worker
import pytest
from _ranks import Pools, named

CHOSEN: tuple[tuple[int, str], ...] = ((4, ""), (1, ""), (3, ""), (2, "all"), (4, "all"))
"""World sizes with what is chosen; of the first two some cases are not long."""
OFTEN = ("qwen3_deep", "gpt2", "deepseek_v2", "llama cp=2 tp=2")
"""First words of the cases that run each time."""


def often(number: int, name: str) -> list[pytest.MarkDecorator]:
    """Return the marks of a case."""
    return [] if number < 2 and name.startswith(OFTEN) and " pp=" not in name else [pytest.mark.long]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, id=f"{world} {chosen} {name}", marks=often(number, name))
        for number, (world, chosen) in enumerate(CHOSEN)
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
