"""Traces of dry runs in which equal micro-batches and equal layers run once equal those in which everything runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import _dry_repeat
import pytest

OFTEN = ("layers: 1f1b, micro-batches",)
GPUS = [name for name, case in _dry_repeat.CASES.items() if case.accelerator != "cpu" and name not in OFTEN]
CPUS = [name for name, case in _dry_repeat.CASES.items() if case.accelerator == "cpu"]
PARTS = {"GPUs, 1": GPUS[::3], "GPUs, 2": GPUS[1::3], "GPUs, 3": [*GPUS[2::3], "mixed", "unequal passes"], "CPUs": CPUS}


def check(names: Sequence[str], folder: Path) -> None:
    """Compare the traces of cases in a process of its own."""
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(here), str(here.parent)))}
    command = [sys.executable, str(here / "_dry_repeat.py"), str(folder), *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(names)


@pytest.mark.timeout(300)
def test_repeated_micro_batches_and_layers(tmp_path: Path) -> None:
    """A stage of a pipeline, whose layers and micro-batches are equal."""
    check(OFTEN, tmp_path)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("names", PARTS.values(), ids=PARTS)
def test_repetition_in_other_layouts(names: Sequence[str], tmp_path: Path) -> None:
    check(names, tmp_path)
