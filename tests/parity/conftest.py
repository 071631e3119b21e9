"""Ranks for parity tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _ranks import Pools, Server


@pytest.fixture(scope="session")
def rank_server() -> Iterator[Server]:
    """The process that ranks are copies of."""
    with Server() as server:
        yield server


@pytest.fixture(scope="module")
def pools(rank_server: Server) -> Iterator[Pools]:
    """Ranks that live as long as the tests of one file."""
    with Pools(rank_server) as pools:
        yield pools
