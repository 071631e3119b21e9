"""The pipeline's engine against one process in float64: every schedule, on 2 to 4 gloo ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_ranks

SCRIPT = Path(__file__).with_name("_pipeline_worker.py")


@pytest.mark.timeout(170)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_schedule_has_the_gradients_of_one_process(ranks: int) -> None:
    run_ranks(SCRIPT, ranks, "parity")
