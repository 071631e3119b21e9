"""What the spec's patterns, presets and plans of models say is what runs: it trains as transformers' own code does."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_ranks


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 3])
def test_other_cuts_equal_transformers(tmp_path: Path, ranks: int) -> None:
    run_ranks(Path(__file__).parent / "_hf_patterns_worker.py", ranks, str(tmp_path), timeout_s=580)
