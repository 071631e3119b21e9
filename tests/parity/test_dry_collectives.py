"""Dry runs against real ones: each rank issues the same collectives in the same order, and holds as much memory."""

from __future__ import annotations

import subprocess
from pathlib import Path

import _dry_worker as worker
import pytest
import torch
from _ranks import Pools
from often import often

ALLOCATOR = Path(__file__).with_name("_counting_allocator.cpp")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Compile the allocator that counts; return the path of its library."""
    made, folder = tmp_path_factory.mktemp("allocator") / "counting.so", Path(torch.__file__).parent
    command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{folder / 'include'}", str(ALLOCATOR)]
    subprocess.run([*command, f"-L{folder / 'lib'}", "-lc10", "-o", str(made)], check=True, timeout=100)
    return str(made)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", often(worker.CASES, worker.OFTEN))
def test_a_dry_run_does_and_holds_as_much_as_a_real_one(pools: Pools, name: str, library: str) -> None:
    pools.run(4, worker.check_case, name, library)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("schedule", "data"), [("weipipe", 1), *(pytest.param(*each, marks=pytest.mark.long) for each in worker.RINGS)]
)
def test_a_ring_sends_the_weights_and_gradients_of_a_real_one(pools: Pools, schedule: str, data: int) -> None:
    pools.run(4, worker.check_ring, schedule, data)
