"""Shards that are not on the device: the same bits, no more of them there than are needed, nothing read too early."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import _offload_parameters_worker as worker
import pytest
import torch
import torch.distributed as dist
from _ranks import Pools
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from partool_runtime.errors import ConfigurationError
from partool_runtime.offload import parameters
from partool_runtime.offload.lanes import Mark, ThreadLanes
from partool_runtime.torch_internals.collectives import in_memory_store
from partool_runtime.torch_internals.tensors import local, placed_like
from partool_runtime.torch_internals.unit_shards import unit_shards


@pytest.fixture(scope="module")
def alone() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=in_memory_store(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Late(random.Random):
    """Lets each copy take 30 ms."""

    def random(self) -> float:
        return 30.0


def test_one_rank_gets_the_same_bits(alone: DeviceMesh, tmp_path: Path) -> None:
    worker.compared(alone)
    worker.compared(alone, apart=True)
    worker.compared(alone, folder=str(tmp_path))


@pytest.mark.timeout(150)
@pytest.mark.parametrize("how", [*worker.HOWS, "files", "replicas"])
def test_two_ranks_get_the_same_bits(pools: Pools, tmp_path: Path, how: str) -> None:
    pools.run(2, worker.check, how, str(tmp_path))


def test_comparison_can_fail(alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gather that does not wait for the copy reads stale data."""
    room = ThreadLanes.room
    monkeypatch.setattr(ThreadLanes, "room", lambda lanes, size_bytes: room(lanes, size_bytes).zero_())
    monkeypatch.setattr(parameters._Unit, "_ready", lambda unit: None)
    with pytest.raises(AssertionError):
        worker.compared(alone)


def test_the_device_holds_the_shards_of_two_units(alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is about to be used, and the next one."""
    bring, seen = parameters.HostParameters.bring, []

    def watched(shards: parameters.HostParameters, unit: int, size_bytes: int) -> tuple[torch.Tensor, Mark]:
        seen.append((sum(unit.size_bytes for unit in shards._units if unit.lent) + size_bytes, shards.held_bytes))
        return bring(shards, unit, size_bytes)

    monkeypatch.setattr(parameters.HostParameters, "bring", watched)
    shards = worker.compared(alone)
    layers = 6
    root_bytes = 8 * (worker.WIDTH + 1) * 3
    assert all(held == shards.held_bytes for _, held in seen)
    unit_bytes = (shards.held_bytes - root_bytes) / layers
    assert max(lent for lent, _ in seen) <= 2 * unit_bytes + 1024
    assert len(seen) == 3 * (2 * 2 * (layers + 1) + layers + 1) - 3 * 2  # the root stays between its passes


def test_shards_are_written_to_when_nothing_reads_them(alone: DeviceMesh) -> None:
    """A gather may have begun that nobody has waited for."""
    model = worker.sharded(alone)
    shards = worker.moved(model, delays=Late())
    model(torch.zeros(1, worker.WIDTH, dtype=torch.float64))
    model.reshard()  # type: ignore[operator]
    kept = [local(parameter).clone() for parameter in model[3].parameters()]
    handle = model[3].unshard(async_op=True)  # type: ignore[operator]
    shards.settle()
    for parameter in model.parameters():
        local(parameter).detach().zero_()
    handle.wait()
    assert all(torch.equal(found, wanted) for found, wanted in zip(model[3].parameters(), kept, strict=True))
    shards.close()


def test_a_file_that_changed_by_itself_ends_the_run(alone: DeviceMesh, tmp_path: Path) -> None:
    model = worker.sharded(alone)
    shards = worker.moved(model, str(tmp_path))
    x = torch.zeros(1, worker.WIDTH, dtype=torch.float64)
    model(x)
    model.reshard()  # type: ignore[operator]
    local(next(model[0].parameters())).detach().view(-1)[0] += 1
    with pytest.raises(ConfigurationError, match="PT673"):
        model(x)
    shards.close()


def test_shards_are_moved_but_their_parameters_stay(alone: DeviceMesh) -> None:
    """To all that looks at them they are the device's: here of one that has no memory, as a second one is missing."""
    device = torch.device("meta")
    model = worker.sharded(alone)
    wanted = [local(parameter).clone() for parameter in model.parameters()]
    for unit in unit_shards([model], device):
        unit.move([torch.empty(elements, dtype=dtype) for elements, dtype in unit.sizes])
    for parameter, before in zip(model.parameters(), wanted, strict=True):
        assert parameter.device == device
        shard = local(parameter).detach()
        assert torch.equal(shard, before)
        assert shard.data_ptr() == local(parameter).data_ptr()
        parameter.grad = placed_like(parameter, torch.zeros_like(before, device=device))
        with pytest.raises(RuntimeError, match="device"):
            parameter.grad = torch.zeros_like(before)
