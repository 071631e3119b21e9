"""Fixtures of the launch tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "slurm"))
from agent_server import SERVER
from launch_helpers import COPIES
from processes import has_failed
from slurm_cluster import Cluster, unavailable


@pytest.fixture(scope="session", autouse=True)
def agent_server() -> Iterator[None]:
    """End the process that agents are copies of."""
    yield
    SERVER.close()


@pytest.fixture(autouse=True)
def no_agents_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the agents that a failed test has started; their ranks end with them."""
    yield
    for agent in COPIES:
        if has_failed(request):
            agent.kill()
            with suppress(ValueError):  # its output was read
                agent.communicate(timeout=30)
    COPIES.clear()


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """A Slurm cluster of three nodes, started for the first test that uses it."""
    if reason := unavailable():
        pytest.skip(reason)
    with Cluster() as cluster:
        yield cluster
