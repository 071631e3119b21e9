"""Traces of dry runs in which the passes of equal micro-batches run once equal those in which all passes run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import _dry_repeat
import pytest

OFTEN = ("1f1b, zero 1, pipeline rank 0",)
GPUS = tuple(name for name, (accelerator, *_) in _dry_repeat.CASES.items() if accelerator != "cpu")
CPUS = tuple(name for name in _dry_repeat.CASES if name not in GPUS)


def check(names: Sequence[str], folder: Path) -> None:
    """Compare the traces of cases in a process of its own."""
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(here), str(here.parent)))}
    command = [sys.executable, str(here / "_dry_repeat.py"), str(folder), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(names)


@pytest.mark.timeout(120)
def test_repeated_micro_batches_of_a_stage(tmp_path: Path) -> None:
    check(OFTEN, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [[each for each in GPUS if each not in OFTEN], CPUS], ids=["GPUs", "CPUs"])
def test_repeated_micro_batches_of_other_layouts(names: Sequence[str], tmp_path: Path) -> None:
    check(names, tmp_path)
