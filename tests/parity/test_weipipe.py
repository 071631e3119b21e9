"""WeiPipe in float64 against one process: each variant, uneven and frozen stages, replicas, lost peers."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_ranks


@pytest.mark.timeout(180)
def test_weipipe_has_the_gradients_of_one_process() -> None:
    """Four processes: a ring of them all, two rings of two, and one of three beside one of one."""
    run_ranks(Path(__file__).with_name("_weipipe_worker.py"), 4, timeout_s=170)
