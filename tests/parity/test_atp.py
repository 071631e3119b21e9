"""Two-dimensional tensor parallelism (ATP) against one process in float64, and its traffic against the planner's."""

from __future__ import annotations

from pathlib import Path

import _atp_worker as worker
import pytest
from _ranks import run_ranks

SCRIPT = Path(worker.__file__)
"""Starts as many ranks as it is told, each a copy of one process: most of the time would go into loading torch."""


@pytest.mark.timeout(170)
def test_four_ranks_in_every_shape_arrangement_and_combination() -> None:
    run_ranks(SCRIPT, 1, "4")


@pytest.mark.timeout(170)
def test_eight_ranks_in_every_shape() -> None:
    run_ranks(SCRIPT, 1, "8")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_compiled_layers_with_what_they_exchange() -> None:
    run_ranks(SCRIPT, 1, "4", "compiled", timeout_s=580)
