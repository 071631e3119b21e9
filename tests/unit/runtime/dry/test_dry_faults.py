"""Faults of the code that a dry run executes are found; the code as it is has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _dry_faults as faults
import pytest

HERE = Path(__file__).parents[2]


def found(names: Sequence[str]) -> dict[str, list[Any]]:
    """Return the findings of each fault or base, all executed by one process."""
    paths = os.pathsep.join((str(HERE), str(HERE.parent)))
    done = subprocess.run(
        [sys.executable, faults.__file__, str(Path(os.environ["PARTOOL_HOME"]) / "dry"), *names],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True))


def check(names: Sequence[str]) -> None:
    """Compare what is found with what was planted."""
    bases = list(dict.fromkeys(faults.FAULTS[name].base for name in names))
    told = found([*bases, *names])
    assert {base: told[base] for base in bases} == {base: [] for base in bases}
    for name in names:
        fault = faults.FAULTS[name]
        about = [
            text
            for code, text, places, ranks in told[name]
            if code == fault.code and fault.text in text and fault.place in places and set(ranks) & set(fault.ranks)
        ]
        assert any(f"rank {rank} " in text for text in about for rank in fault.ranks), (name, told[name])


@pytest.mark.timeout(300)
def test_faults_of_the_code_are_found() -> None:
    assert len(faults.OFTEN) >= 7
    assert len(faults.FAULTS) >= 27
    check(list(faults.OFTEN))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_more_faults_of_the_code_are_found() -> None:
    check(list(faults.LONGER))
