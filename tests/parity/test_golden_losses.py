"""Training under awkward layouts gives the bits that it gave before the code was moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from _golden_losses import RECORD, STEPS, losses, where
from _ranks import Pools


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_losses_are_bit_identical(pools: Pools, tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    if recorded["where"] != where():
        pytest.skip(f"recorded on {recorded['where']}, and the bits depend on that")
    found = losses(tmp_path, pools)
    assert len(found) >= 30
    assert all(len(steps) == STEPS for steps in found.values())
    assert found == recorded["losses"]
