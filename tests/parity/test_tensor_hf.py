"""Models that transformers builds train as its own code does: over tensor ranks, with ZeRO and in pipelines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "_hf_worker.py"


def check(folder: Path, ranks: int, chosen: str = "", *, worker: Path = WORKER, timeout_s: float = 580) -> None:
    command = [sys.executable, "-W", "ignore", str(worker), str(folder), str(ranks), *([chosen] if chosen else [])]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error", "TQDM_DISABLE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]


@pytest.mark.timeout(600)
def test_models_equal_those_of_transformers(tmp_path: Path) -> None:
    check(tmp_path, 2)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_three_tensor_ranks_equal_transformers(tmp_path: Path) -> None:
    check(tmp_path, 3)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tensor_ranks_with_zero_equal_transformers(tmp_path: Path) -> None:
    check(tmp_path, 4, timeout_s=880)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_pipelines_of_tensor_ranks_equal_transformers(tmp_path: Path) -> None:
    check(tmp_path, 4, "pipelines")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_recomputation_overlap_and_dropout(tmp_path: Path) -> None:
    check(tmp_path, 2, "layouts")


@pytest.mark.timeout(200)
def test_loading_takes_a_ranks_part_and_one_tensor(tmp_path: Path) -> None:
    check(tmp_path, 2, worker=WORKER.with_name("_hf_memory_worker.py"), timeout_s=180)
