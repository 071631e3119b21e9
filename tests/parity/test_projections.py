"""A module that wraps a projection, as adapters do, computes the same beneath tensor parallelism as in one process."""

from __future__ import annotations

import _projection_worker as worker
import pytest
from _ranks import Pools


@pytest.mark.timeout(170)
def test_wrapped_projections_multiply_beneath_every_kind_of_tensor_parallelism(pools: Pools) -> None:
    pools.run(4, worker.check_wrapped)


@pytest.mark.timeout(170)
def test_wrapped_projections_multiply_in_8_bits(pools: Pools) -> None:
    pools.run(4, worker.check_wrapped_fp8)
