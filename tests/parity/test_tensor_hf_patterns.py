"""Models cut by the spec's patterns, by presets and by their own plans train as transformers' own code does."""

from __future__ import annotations

import _hf_patterns_worker as worker
import pytest
from _hf_worker import Case
from _ranks import Pools, named

CASES = {f"{ranks} {name}": case for ranks in (2, 3) for name, case in named(worker.cases(ranks)).items()}


QUICK = next(name for name in CASES if name.startswith("3 phi3"))
"""A case of gathered columns whose widths are uneven; every run of the tests has it."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[] if name == QUICK else [pytest.mark.long]) for name, case in CASES.items()],
)
def test_other_cuts_equal_transformers(pools: Pools, case: Case) -> None:
    pools.run(1, worker.written, case.model)
    pools.run(case.tp, worker.check_cut, case, timeout_s=280)
