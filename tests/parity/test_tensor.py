"""Tensor parallelism of the decoder against one process in float64, over 2, 3 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import _tensor_worker as worker
import pytest
from _ranks import run_ranks

SCRIPT = Path(worker.__file__)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_passes_and_training_equal_one_process(ranks: int) -> None:
    run_ranks(SCRIPT, ranks, timeout_s=280)
