"""Rings, halos and gathered keys over 2 to 8 ranks against one process in float64, and what each rank sends.

Heads and tokens that do not divide, ranks without tokens, packed documents, windows within a share and across several,
both orders of tokens, masks in pieces; in bfloat16, what travels narrow and what wide.
"""

from __future__ import annotations

import _sequence_ring_worker as worker
import pytest
from _ranks import Pools, named

CASES = named(worker.CASES)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", list(CASES))
def test_attention_equals_one_process(pools: Pools, name: str) -> None:
    pools.run(worker.WORLD, worker.check_case, CASES[name], list(CASES).index(name))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("method", ["ring", "gather"])
def test_the_backward_pass_sends_again_only_what_it_has_to(pools: Pools, method: str) -> None:
    pools.run(worker.WORLD, worker.check_sent_again, worker.LAYERS._replace(method=method))
