"""The loss by kernels, with its gradients early or late, and a z-loss with or without them, against one process."""

from __future__ import annotations

from pathlib import Path

import _fused_loss_worker as worker
import pytest
from _ranks import run_ranks

SCRIPT = Path(worker.__file__)
"""Starts its ranks itself, each a copy of one process: most of the time would go into loading torch."""


@pytest.mark.timeout(170)
def test_every_arrangement_of_four_ranks_equals_one_process() -> None:
    run_ranks(SCRIPT, 1)
