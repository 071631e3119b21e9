"""Who writes what, in DCP's terms: replicated values once, shards by one of the ranks that hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor

from partool_runtime.checkpoint._agreement import Ranks

State = Mapping[str, Tensor]
"""Names to tensors or DTensors."""


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What this rank writes, and what all write together."""

    items: SavePlan
    metadata: Metadata
    total_bytes: int
    """Over all ranks, without the files' overhead."""


class StagedPlanner(DefaultSavePlanner):
    """Resolves write items from this rank's local tensors by name: each rank holds at most one piece of each."""

    def __init__(self, local: dict[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._local = local

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the local piece of a tensor."""
        return self._local[index.fqn]


def local_tensor(value: Tensor) -> Tensor:
    """Return this rank's piece, detached."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def signature(state: State) -> tuple[object, ...]:
    """Return what a plan depends on: names, shapes, types and placements."""
    return tuple(
        (name, tuple(value.shape), value.dtype, value.placements if isinstance(value, DTensor) else None)
        for name, value in sorted(state.items())
    )


def make_plan(state: State, ranks: Ranks) -> WritePlan:
    """Agree on who writes what; a collective.

    Raises CheckpointError where the ranks' shards do not make up whole tensors.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(sorted(state.items())), is_coordinator=ranks.rank == 0)
    local = planner.create_local_plan()
    plans = ranks.gather(dataclasses.replace(local, items=[item for item in local.items if not _is_empty_shard(item)]))
    results: list[tuple[list[SavePlan], Metadata]] = []
    ranks.agree(lambda: results.append(planner.create_global_plan(plans)))  # the same everywhere: nothing to send
    everyone, metadata = results[0]
    own = FileSystemWriter("").prepare_global_plan(everyone)[ranks.rank]  # names the files after the ranks
    return WritePlan(own, metadata, sum(_item_bytes(item) for plan in everyone for item in plan.items))


def stage(state: State, plan: WritePlan, *, copy: bool) -> dict[str, Tensor]:
    """Return what this rank writes, on the CPU; with ``copy`` it shares nothing with ``state``."""
    names = {item.index.fqn for item in plan.items.items}
    local = {name: local_tensor(state[name]) for name in sorted(names)}
    staged = {name: _on_host(value) if value.is_cuda else value.to("cpu", copy=copy) for name, value in local.items()}
    if any(value.is_cuda for value in local.values()):
        torch.cuda.current_stream().synchronize()
    return staged


def _on_host(value: Tensor) -> Tensor:
    """Begin to copy a tensor from the GPU into page-locked memory, several times as fast as into any other."""
    return torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


def _is_empty_shard(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.chunk.sizes.numel() == 0 and data.size.numel() != 0


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
