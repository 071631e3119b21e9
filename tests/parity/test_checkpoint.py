"""Checkpoints over several ranks: any layout loads what any other saved, bit by bit; errors reach every rank."""

from __future__ import annotations

from pathlib import Path

import _checkpoint_worker as worker
import pytest
import torch

from partool_runtime.checkpoint import load_folder, step_folder, tensor_shapes


@pytest.mark.timeout(170)
def test_any_layout_loads_what_any_other_saved(pools, tmp_path):
    folder = tmp_path / "checkpoints"
    layouts = ["plain", "shard", "mixed", "hybrid"]
    from_two = [(layout, step) for step, layout in enumerate(layouts, start=1)]
    pools.run(2, worker.cross, folder, [], from_two)
    crossed = [(layout, step) for layout in layouts for _, step in from_two]
    from_four = [(layout, step) for step, layout in enumerate(layouts, start=11)]  # 7 and 3 rows: uneven, and empty
    pools.run(4, worker.cross, folder, crossed, from_four)
    for _, step in from_two + from_four:  # and one process, without a process group
        state = {name: torch.full_like(value, 99) for name, value in worker.whole(step).items()}
        assert load_folder(step_folder(folder, step), state) == {"step": step}
        for name, value in state.items():
            assert torch.equal(value, worker.whole(step)[name])
        assert {name: shape for name, (shape, _) in tensor_shapes(step_folder(folder, step)).items()} == worker.SHAPES
        assert stored_values(step_folder(folder, step)) == sum(value.numel() for value in worker.whole(step).values())


@pytest.mark.timeout(170)
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_an_error_on_one_rank_reaches_all(pools, tmp_path, failing_rank):
    pools.run(2, worker.check_error_on_one_rank, tmp_path / "failing", failing_rank)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("check", [worker.check_parts_that_are_no_whole, worker.check_damage_reaches_all])
def test_wrong_parts_and_damage_reach_all(pools, tmp_path, check):
    pools.run(2, check, tmp_path / "folder")


def stored_values(path: Path) -> int:
    """Return how many values the files hold: replicated ones count once if they were saved once."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(path).read_metadata()
    return sum(
        metadata.state_dict_metadata[index.fqn].chunks[index.index].sizes.numel() for index in metadata.storage_data
    )
