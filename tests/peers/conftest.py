"""Judges and folders of the tests with other systems."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path += [str(Path(__file__).parents[1] / "unit"), str(Path(__file__).parents[1] / "unit" / "engines")]

from _peers import Judge, needed


class Judges:
    """Processes of systems, started when they are first needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, Judge] = {}
        self._stack = ExitStack()

    def __getitem__(self, system: str) -> Judge:
        needed(system)
        if system not in self._found:
            self._found[system] = self._stack.enter_context(Judge(system, self.folder / f"{system}.log"))
        return self._found[system]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def judges(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judges]:
    """Other systems' classes."""
    found = Judges(tmp_path_factory.mktemp("judges"))
    yield found
    found.close()
