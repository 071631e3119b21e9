"""DSP: grids of tokens whose sharded axis changes between layers, against one process and a mask of all tokens."""

from __future__ import annotations

from pathlib import Path

import _sequence_dsp_worker as worker
import pytest
from _ranks import run_ranks


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [3, pytest.param(2, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_layers_along_two_axes_equal_one_process(tmp_path: Path, ranks: int) -> None:
    """Loss, gradients and elements sent: odd grids, stages that end on rows, documents, recomputation, two models."""
    run_ranks(Path(worker.__file__), ranks, str(tmp_path), timeout_s=180)
    assert len(list(tmp_path.iterdir())) == ranks
