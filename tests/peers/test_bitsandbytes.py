"""The recorded hashes of quantised matrices are those that bitsandbytes gives on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from _peers import environment, needed

pytestmark = pytest.mark.long
_JUDGE = Path(__file__).with_name("_judge_bitsandbytes.py")
_RECORDED = Path(__file__).parents[1] / "data/quantised/bitsandbytes.json"


@pytest.mark.timeout(200)
def test_recorded_hashes_are_those_of_bitsandbytes() -> None:
    needed("bitsandbytes")
    ended = subprocess.run(
        [sys.executable, "-P", str(_JUDGE)], capture_output=True, text=True, check=True, env=environment(), timeout=180
    )
    assert json.loads(ended.stdout) == json.loads(_RECORDED.read_text())
