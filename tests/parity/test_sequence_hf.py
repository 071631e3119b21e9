"""Models that transformers builds train on shares of sequences as its own code does on whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_tensor_hf import check as run

WORKER = Path(__file__).parent / "_sequence_hf_worker.py"


def check(folder: Path, ranks: int, chosen: str = "", *, timeout_s: float = 280) -> None:
    run(folder, ranks, chosen, worker=WORKER, timeout_s=timeout_s)


@pytest.mark.timeout(300)
def test_models_on_shares_equal_one_process(tmp_path: Path) -> None:
    check(tmp_path, 4)


@pytest.mark.timeout(200)
def test_documents_do_not_see_each_other_and_windows_stay(tmp_path: Path) -> None:
    check(tmp_path, 1)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_three_ranks(tmp_path: Path) -> None:
    check(tmp_path, 3)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_family_and_method(tmp_path: Path, ranks: int) -> None:
    check(tmp_path, ranks, "all", timeout_s=880)
