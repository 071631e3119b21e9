"""The pipeline's engine against one process in float64: every schedule, on 2 to 4 gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_ranks

SCRIPT = Path(__file__).with_name("_pipeline_worker.py")


@pytest.mark.timeout(260)
def test_every_schedule_has_the_gradients_of_one_process() -> None:
    run_ranks(SCRIPT, 4, "2,3,4", timeout_s=250)


@pytest.mark.timeout(120)
def test_a_hung_or_dead_peer_ends_in_an_error_that_says_where() -> None:
    run_ranks(SCRIPT, 3, "faults", timeout_s=110)
