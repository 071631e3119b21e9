"""Models whose graph is sharded over their sequences train as their own code does on whole ones."""

from __future__ import annotations

import _sequence_compiled_worker as worker
import pytest
from _ranks import Pools, named
from often import beginning

OFTEN = ("2 ", "3 llama", "4 ")
"""First words of the cases that run each time."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "case"),
    [
        pytest.param(world, case, id=f"{world} {name}", marks=beginning(f"{world} {name}", OFTEN))
        for world in (1, 2, 3, 4)
        for name, case in named(worker.cases(world)).items()
    ],
)
def test_models_on_shares_equal_one_process(pools: Pools, world: int, case: worker.Case) -> None:
    pools.run(1, worker.written, case.model)
    pools.run(world, worker.check_case, case, timeout_s=280)
