"""Whether the test that runs may use what an earlier test has computed, and what it has used."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


@dataclass
class Sharing:
    """What the running test shares with others."""

    allowed: bool = False
    """False outside of tests, and in a test that replaces parts of the program, for which results are its own."""
    used: set[Hashable] = field(default_factory=set)
    """Keys of the results that the test has: where it asks again, it is to compare, and gets a new one."""


SHARING = Sharing()


def begin(item: pytest.Item) -> None:
    """Note that a test begins; those with ``monkeypatch`` share nothing."""
    SHARING.allowed = "monkeypatch" not in getattr(item, "fixturenames", ["monkeypatch"])
    SHARING.used.clear()
