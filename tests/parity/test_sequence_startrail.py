"""StarTrail: teams and rings of any sizes attend as one process does, and send what the planner says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "_sequence_startrail_worker.py"


def check(ranks: int, timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), str(ranks)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.timeout(200)
def test_teams_and_rings_equal_one_process_and_send_what_is_planned() -> None:
    check(12, 180)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_sixteen_ranks() -> None:
    check(16, 380)
