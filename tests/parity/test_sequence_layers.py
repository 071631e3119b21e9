"""Decoders whose ranks share sequences, method by method, against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_ranks

WORKER = Path(__file__).parent / "_sequence_layers_worker.py"


@pytest.mark.timeout(180)
def test_layers_on_shares_equal_one_process() -> None:
    run_ranks(WORKER, 1, "some")


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["every", "compiled"])
def test_layers_on_shares_with_every_policy_equal_one_process(what: str) -> None:
    run_ranks(WORKER, 1, what, timeout_s=800)
