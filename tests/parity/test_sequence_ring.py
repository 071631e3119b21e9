"""Rings, halos and gathered keys over 2 to 8 ranks against one process in float64, and what each rank sends.

Heads and tokens that do not divide, ranks without tokens, packed documents, windows within a share and across several,
both orders of tokens, masks in pieces; in bfloat16, what travels narrow and what wide.
"""

from __future__ import annotations

from pathlib import Path

import _sequence_ring_worker as worker
import pytest
from _ranks import run_ranks

SCRIPT = Path(worker.__file__)


@pytest.mark.timeout(300)
def test_attention_equals_one_process() -> None:
    # The script starts its ranks itself, as copies of one process.
    run_ranks(SCRIPT, 1, timeout_s=280)
