"""Checkpoints over several ranks: any layout loads what any other saved, bit by bit; errors reach every rank."""

from __future__ import annotations

import json
from pathlib import Path

import _checkpoint_worker as worker
import pytest
import torch
from _ranks import run_ranks

from partool_runtime.checkpoint import load_folder, step_folder, tensor_shapes

SCRIPT = Path(worker.__file__)


def launch(folder: Path, world_size: int, loads: list, saves: list, extra: str = "") -> None:
    run_ranks(SCRIPT, world_size, str(folder), json.dumps(loads), json.dumps(saves), extra, timeout_s=100)


@pytest.mark.timeout(170)
def test_any_layout_loads_what_any_other_saved(tmp_path):
    folder = tmp_path / "checkpoints"
    layouts = ["plain", "shard", "mixed", "hybrid"]
    from_two = [[layout, step] for step, layout in enumerate(layouts, start=1)]
    launch(folder, 2, [], from_two, "errors")
    crossed = [[layout, step] for layout in layouts for _, step in from_two]
    from_four = [[layout, step] for step, layout in enumerate(layouts, start=11)]  # 7 and 3 rows: uneven, and empty
    launch(folder, 4, crossed, from_four)
    for _, step in from_two + from_four:  # and one process, without a process group
        state = {name: torch.full_like(value, 99) for name, value in worker.whole(step).items()}
        assert load_folder(step_folder(folder, step), state) == {"step": step}
        for name, value in state.items():
            assert torch.equal(value, worker.whole(step)[name])
        assert {name: shape for name, (shape, _) in tensor_shapes(step_folder(folder, step)).items()} == worker.SHAPES
        assert stored_values(step_folder(folder, step)) == sum(value.numel() for value in worker.whole(step).values())


def stored_values(path: Path) -> int:
    """Return how many values the files hold: replicated ones count once if they were saved once."""
    from torch.distributed.checkpoint import FileSystemReader

    metadata = FileSystemReader(path).read_metadata()
    return sum(
        metadata.state_dict_metadata[index.fqn].chunks[index.index].sizes.numel() for index in metadata.storage_data
    )
