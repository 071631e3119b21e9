"""Ulysses, alone and inside of a ring (USP), against attention in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_ranks

WORKER = Path(__file__).parent / "_sequence_ulysses_worker.py"


@pytest.mark.timeout(180)
def test_attention_on_shares_equals_one_process() -> None:
    run_ranks(WORKER, 1)
