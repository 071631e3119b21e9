"""The decoder over three ranks: losses, gradients and first weights are those of one process."""

from __future__ import annotations

from pathlib import Path

import _decoder_worker as worker
import pytest
from _ranks import Pools

from partool_runtime.checkpoint import Checkpointer
from partool_runtime.hf import write_folder


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", list(worker.CONFIGS))
def test_sharded_decoder_trains_as_the_whole_one(pools: Pools, name: str) -> None:
    pools.run(3, worker.check_training, name)


@pytest.mark.timeout(120)
def test_sharded_decoder_in_bf16(pools: Pools) -> None:
    pools.run(3, worker.check_narrow)


@pytest.mark.timeout(120)
def test_sharded_decoder_has_the_weights_of_a_folder(pools: Pools, tmp_path: Path) -> None:
    write_folder(worker.whole(worker.HF).state_dict(), worker.HF, tmp_path / "hf")
    state = {f"model.{name}": value for name, value in worker.whole(worker.CONFIGS["tied"]).state_dict().items()}
    writer = Checkpointer(tmp_path / "checkpoint", keep=1, mode="sync", rank=0, world_size=1)
    writer.save(3, state, {}, wait=True)
    writer.close()
    pools.run(3, worker.check_folders, tmp_path)
