"""Models that transformers builds: alone, over tensor ranks and with ZeRO they train as transformers' own code does."""

from __future__ import annotations

from pathlib import Path

import pytest
from _ranks import run_ranks

WORKER = Path(__file__).parent / "_hf_worker.py"


@pytest.mark.timeout(300)
def test_models_equal_those_of_transformers(tmp_path: Path) -> None:
    run_ranks(WORKER, 1, str(tmp_path), "llama,mixtral,phi", timeout_s=280)


@pytest.mark.timeout(400)
def test_two_tensor_ranks_equal_transformers(tmp_path: Path) -> None:
    run_ranks(WORKER, 2, str(tmp_path), timeout_s=380)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_three_tensor_ranks_equal_transformers(tmp_path: Path) -> None:
    run_ranks(WORKER, 3, str(tmp_path), timeout_s=580)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_tensor_ranks_with_zero_equal_transformers(tmp_path: Path) -> None:
    run_ranks(WORKER, 4, str(tmp_path), timeout_s=880)


@pytest.mark.timeout(300)
def test_pipelines_equal_transformers(tmp_path: Path) -> None:
    run_ranks(WORKER, 2, str(tmp_path), "pipelines", timeout_s=280)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_pipelines_of_tensor_ranks_equal_transformers(tmp_path: Path) -> None:
    run_ranks(WORKER, 4, str(tmp_path), "pipelines", timeout_s=580)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_recomputation_and_overlap_change_nothing(tmp_path: Path) -> None:
    run_ranks(WORKER, 2, str(tmp_path), "layouts", timeout_s=580)


@pytest.mark.timeout(200)
def test_loading_takes_a_ranks_part_and_one_tensor(tmp_path: Path) -> None:
    run_ranks(WORKER.with_name("_hf_memory_worker.py"), 2, str(tmp_path), timeout_s=180)
