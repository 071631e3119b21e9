"""Attack: ``partool import`` of mutated files of other training systems, and of files that stand for far more.

A spec that loads, or an error with a code: never a traceback, more than 10 s of processor time or 1 GiB.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from _attack import SECONDS, Attack
from _configurations import bombs
from _importer import case_of
from often import often

EACH_TIME = [
    "variable", "quoted array", "sources itself", "device", "link", "pipe", "digits", "digits of JSON", "then",
    "arguments", "aliases", "nested JSON", "dotted TOML", "functions", "large",
]  # fmt: skip
"""Bombs that take a tenth of a second each."""
PATIENCE_S = 120.0
"""How long a case may take on a busy machine; one that takes longer waits for something."""


class Importer:
    """The process that imports, started anew where a case has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def attempt(self, name: str, case: str) -> str:
        """Return what is wrong with a case, or nothing."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([name, case]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        line = process.stdout.readline() if ready else ""
        if line:
            return str(json.loads(line))
        self.end()
        return "the process ended" if ready else f"no answer within {PATIENCE_S:g} s"

    def _start(self) -> subprocess.Popen[str]:
        here = Path(__file__).parent
        self._process = subprocess.Popen(
            [sys.executable, str(here / "_importer.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)])},
        )  # fmt: skip
        return self._process

    def end(self) -> None:
        """End the process, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def importer() -> Iterator[Importer]:
    process = Importer()
    yield process
    process.end()


@pytest.mark.timeout(1200)
def test_mutated_configurations_become_specs_or_errors(importer: Importer) -> None:
    # 2,000 cases in the long run; each takes some ten milliseconds.
    attack = Attack("imports", least=30 if SECONDS < 60 else 2000, most=60, seconds=min(SECONDS, 300.0))
    for number, _ in attack.cases():
        with attack.case(number, lambda number=number: str(case_of("imports", str(number)))):
            wrong = importer.attempt("imports", str(number))
            assert not wrong, wrong
    attack.judge()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bomb", often(bombs(), EACH_TIME))
def test_small_files_that_stand_for_much_end_soon(bomb: str, importer: Importer) -> None:
    assert not importer.attempt("bombs", bomb)
