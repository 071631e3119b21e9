"""Exchanges of tokens at the edges: few tokens, none, all to one expert, experts without tokens, dropped choices."""

from __future__ import annotations

import _experts_worker as worker
import pytest
from _ranks import Pools


@pytest.mark.timeout(120)
def test_four_ranks_equal_one_with_any_numbers_of_tokens(pools: Pools) -> None:
    pools.run(4, worker.main)
