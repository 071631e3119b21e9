"""The decoder over three ranks: losses, gradients and first weights are those of one process."""

from __future__ import annotations

from pathlib import Path

import _decoder_worker as worker
import pytest
from _ranks import run_ranks

from partool_runtime.checkpoint import Checkpointer
from partool_runtime.hf import write_folder


@pytest.mark.timeout(120)
def test_sharded_decoder_is_the_whole_one(tmp_path):
    write_folder(worker.whole(worker.HF).state_dict(), worker.HF, tmp_path / "hf")
    state = {f"model.{name}": value for name, value in worker.whole(worker.CONFIGS["tied"]).state_dict().items()}
    writer = Checkpointer(tmp_path / "checkpoint", keep=1, mode="sync", rank=0, world_size=1)
    writer.save(3, state, {}, wait=True)
    writer.close()
    run_ranks(Path(worker.__file__), 3, str(tmp_path), timeout_s=100)
