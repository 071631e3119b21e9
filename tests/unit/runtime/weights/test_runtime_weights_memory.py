"""Filling a tensor rank's part of a model takes little memory besides the part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import _fill_memory as script
import pytest


def start(source: str, folder: Path) -> None:
    subprocess.run([sys.executable, script.__file__, source, str(folder)], check=True)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
@pytest.mark.parametrize("source", ["init", "checkpoint"])
def test_a_part_and_the_largest_tensor_bound_the_peak(tmp_path: Path, source: str) -> None:
    if source == "checkpoint":
        start(source, tmp_path)  # saves in another process, whose peak does not count
    start(source, tmp_path)
    used = json.loads((tmp_path / f"{source}.json").read_text())
    assert used["part"] < 0.27 * 4 * 50_000_000
    assert used["part"] < used["used"] <= 1.2 * used["part"] + used["largest"], used
