"""One rank of the checkpoint tests: saves, or loads and compares, states of given layouts."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from _ranks import joined
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from partool_runtime.checkpoint import Checkpointer, CheckpointError, load_newest, step_folder
from partool_runtime.checkpoint._files import Files
from partool_runtime.errors import ConfigurationError
from partool_runtime.pieces import Placed
from partool_runtime.placement import Placement

SHAPES = {"model.w": (7, 5), "model.one_row": (1, 4), "model.none": (0, 3), "exp_avg.w": (7, 5), "exp_avg.bias": (3,)}
DTYPES = {"model.one_row": torch.bfloat16, "exp_avg.w": torch.float32}


def whole(step: int) -> dict[str, torch.Tensor]:
    """Return the values of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(DTYPES.get(name, torch.float64))
        for name, shape in SHAPES.items()
    }


def laid_out(layout: str, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values as ``plain`` tensors, or DTensors: ``shard`` (dim 0 over all ranks), ``hybrid`` (two copies).

    ``mixed`` shards the moments only, as an optimizer that is sharded by itself does.
    """
    world_size = dist.get_world_size()
    if layout == "plain":
        return dict(values)
    if layout == "hybrid":
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("copy", "shard"))
        return {name: distribute_tensor(value, mesh, [Replicate(), Shard(0)]) for name, value in values.items()}
    mesh = init_device_mesh("cpu", (world_size,))
    return {
        name: value if layout == "mixed" and name.startswith("model.") else distribute_tensor(value, mesh, [Shard(0)])
        for name, value in values.items()
    }


def full(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def assert_loads(checkpointer: Checkpointer, layout: str, step: int) -> None:
    state = laid_out(layout, {name: torch.full_like(value, 99) for name, value in whole(step).items()})
    assert checkpointer.load(step, state) == {"step": step}
    for name, value in full(state).items():
        expected = whole(step)[name]
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected), (layout, step, name)


class FailingOn(Files):
    """A disk that is full, or broken, on one rank when armed."""

    def __init__(self, rank: int) -> None:
        self.mine = dist.get_rank() == rank
        self.armed = 0

    def write(self, stream, data):
        if self.mine and self.armed:
            raise OSError(self.armed, os.strerror(self.armed))
        super().write(stream, data)


def open_folder(folder: Path, mode: str = "async", files: Files | None = None) -> Checkpointer:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return Checkpointer(folder, keep=10, mode=mode, rank=rank, world_size=world_size, timeout_s=60, files=files)


def save(checkpointer: Checkpointer, layout: str, step: int) -> None:
    state = laid_out(layout, whole(step))
    checkpointer.save(step, state, {"step": step})
    for value in state.values():
        (value.to_local() if isinstance(value, DTensor) else value).add_(1)  # training goes on


def check_error_on_one_rank(folder: Path, failing_rank: int) -> None:
    joined()
    files = FailingOn(failing_rank)
    checkpointer = open_folder(folder, files=files)
    save(checkpointer, "shard", 1)
    checkpointer.wait()
    for number, kind in ((errno.ENOSPC, ConfigurationError), (errno.EIO, CheckpointError)):
        files.armed = number
        save(checkpointer, "shard", 2)
        with pytest.raises(kind, match=os.strerror(number)):
            checkpointer.wait()
        dist.barrier()
        assert not [entry for entry in folder.iterdir() if "step-00000002" in entry.name]
    files.armed = 0
    assert_loads(checkpointer, "shard", 1)
    save(checkpointer, "shard", 2)
    assert_loads(checkpointer, "shard", 2)
    checkpointer.close()


def check_parts_that_are_no_whole(folder: Path) -> None:
    """Nothing is saved where tensor ranks' parts leave a column out, or where two ranks stand for the same one."""
    joined()
    checkpointer, rank, size = open_folder(folder, mode="sync"), dist.get_rank(), dist.get_world_size()

    def part(columns: int, start: int, stop: int) -> dict[str, Placed]:
        return {"model.w": Placed(torch.zeros(3, stop - start), Placement((3, columns), (((0, 3),), ((start, stop),))))}

    for wrong in (part(2 * size + 1, 2 * rank, 2 * rank + 2), part(2 * size, 2 * rank, 2 * rank + 2 + (rank == 0))):
        with pytest.raises(CheckpointError, match="Failed to validate"):
            checkpointer.save(1, wrong, {})
    assert checkpointer.steps() == []
    checkpointer.save(1, part(2 * size, 2 * rank, 2 * rank + 2), {})
    assert checkpointer.steps()[0] == 1
    checkpointer.close()


def check_damage_reaches_all(folder: Path) -> None:
    joined()
    checkpointer = open_folder(folder, mode="sync")
    save(checkpointer, "shard", 1)
    save(checkpointer, "shard", 2)
    file = step_folder(folder, 2) / f"__{dist.get_world_size() - 1}_0.distcp"
    if dist.get_rank() == 0:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    dist.barrier()
    assert checkpointer.steps()[0] == 2
    with pytest.raises(ConfigurationError) as caught:
        checkpointer.load(2, laid_out("shard", whole(2)))
    assert caught.value.code == "PT611"
    assert str(file) in caught.value.message
    assert "step 1 is intact" in caught.value.help
    state = laid_out("shard", whole(2))
    first = dist.get_rank() == 0  # what rank 0 says counts
    resumed = load_newest(checkpointer, lambda step, advise: _loads(checkpointer, step, state, advise), fallback=first)
    assert resumed.step == 1
    assert len(resumed.notes) == 1
    assert str(file) in resumed.notes[0]
    assert checkpointer.steps() == [1]
    checkpointer.close()


def _loads(checkpointer: Checkpointer, step: int, state: dict[str, torch.Tensor], advise: bool) -> None:
    checkpointer.load(step, state, advise=advise)


def cross(folder: Path, loads: list[tuple[str, int]], saves: list[tuple[str, int]]) -> None:
    """Load steps that others saved, save steps, and load these."""
    joined()
    checkpointer = open_folder(folder)
    for layout, step in loads:
        assert_loads(checkpointer, layout, step)
    for layout, step in saves:
        save(checkpointer, layout, step)
    assert checkpointer.steps()[0] == saves[-1][1]
    for layout, step in saves:
        assert_loads(checkpointer, layout, step)
    checkpointer.close()
