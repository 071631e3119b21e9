"""Tensor parallelism of the decoder against one process in float64, over 2, 3 and 4 tensor ranks.

Forward and backward passes with the bytes that are sent, and training, under every combination of overlap, shares of
the sequence and sums in pieces; heads, widths, tokens and lengths that do not divide, with ranks that hold none.
"""

from __future__ import annotations

from pathlib import Path

import _tensor_worker as worker
import pytest
from _ranks import run_ranks

SCRIPT = Path(worker.__file__)


@pytest.mark.timeout(300)
def test_two_and_four_ranks_equal_one_process() -> None:
    run_ranks(SCRIPT, 4, timeout_s=280)


@pytest.mark.timeout(300)
def test_three_ranks_equal_one_process() -> None:
    run_ranks(SCRIPT, 3, timeout_s=280)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_combination_equals_one_process(ranks: int) -> None:
    run_ranks(SCRIPT, ranks, "every", timeout_s=880)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_layers_equal_one_process() -> None:
    run_ranks(SCRIPT, 2, "compiled", timeout_s=880)
