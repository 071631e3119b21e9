"""Assignment of writes to ranks, in DCP's terms; one of the ranks that hold a replicated value or a shard writes it.

A tensor-parallel rank's part of a tensor may be several blocks of the whole; each block is a separate item.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from partool_runtime.checkpoint._agreement import SavingRanks
from partool_runtime.checkpoint._arena import Arena
from partool_runtime.pieces import Placed, TensorBlock, Value

State = Mapping[str, Value]
"""Mapping of names to tensors, DTensors, or tensor-parallel ranks' parts of tensors and DTensors."""


class StatePart(NamedTuple):
    """A block of a tensor that a rank writes or reads."""

    name: str
    offsets: tuple[int, ...]
    """Offsets of the block in the whole tensor."""
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The pieces of tensors that this rank writes, and the pieces that all ranks write."""

    items: SavePlan
    metadata: Metadata
    total_bytes: int
    """Total bytes of tensor data that all ranks write; file headers and metadata are not counted."""


class StateBlocks:
    """The blocks of tensors that this rank writes; each is taken once."""

    def __init__(self, blocks: dict[MetadataIndex, Tensor], arena: Arena | None) -> None:
        """Blocks on the device of ``arena`` are copied through it, and other blocks without it."""
        self._blocks, self._arena = blocks, arena

    def take(self, index: MetadataIndex) -> Tensor:
        """Return a block on the CPU and forget it, so that its memory is free once it is written."""
        block = self._blocks.pop(index)
        if self._arena is not None and block.device == self._arena.device:
            return self._arena.copied([block])[0]
        return block.to("cpu")

    def copied(self) -> StateBlocks:
        """Return the blocks in ordinary host memory, so that the state may change while they are written."""
        arena = self._arena
        through = [index for index, block in self._blocks.items() if arena is not None and block.device == arena.device]
        copies: dict[MetadataIndex, Tensor] = {}
        if arena is not None:
            copies = dict(zip(through, arena.copied(self._blocks[index] for index in through), strict=True))
        copies |= {i: block.to("cpu", copy=True) for i, block in self._blocks.items() if i not in copies}
        return StateBlocks(copies, None)


def local_tensor(value: Tensor) -> Tensor:
    """Return this rank's piece of a tensor, detached from autograd."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def holds_any(value: Value) -> bool:
    """Return True if this rank holds an element of a tensor, or if the whole tensor is empty."""
    local = local_tensor(value.tensor if isinstance(value, Placed) else value)
    return local.numel() > 0 or 0 in value.shape


def signature(state: State) -> tuple[object, ...]:
    """Return the names, shapes, types and placements on which a plan depends."""
    return tuple(
        (name, value.shape, value.dtype, _layout(value.tensor), value.placement)
        if isinstance(value, Placed)
        else (name, tuple(value.shape), value.dtype, _layout(value))
        for name, value in sorted(state.items())
    )


def make_plan(state: State, ranks: SavingRanks) -> WritePlan:
    """Agree on the rank that writes each piece; a collective.

    Raises CheckpointError where the ranks' blocks do not make up whole tensors.
    """
    planner, local_plan = _own_plan(state, coordinator=ranks.rank == 0)
    plans = ranks.gather(local_plan)
    results: list[tuple[list[SavePlan], Metadata]] = []
    ranks.agree(lambda: results.append(planner.create_global_plan(plans)))  # equal on every rank, so nothing is sent
    everyone, metadata = results[0]
    mine = FileSystemWriter("").prepare_global_plan(everyone)[ranks.rank]  # names the files after the ranks
    return WritePlan(mine, metadata, sum(_item_bytes(item) for plan in everyone for item in plan.items))


def parts_to_save(state: State) -> Iterator[StatePart]:
    """Yield the parts of tensors that this rank can write, before the ranks agree on who writes each."""
    _, local_plan = _own_plan(state, coordinator=False)
    for item in local_plan.items:
        if item.tensor_data is not None:
            chunk = item.tensor_data.chunk
            yield StatePart(item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes))


def _own_plan(state: State, *, coordinator: bool) -> tuple[DefaultSavePlanner, SavePlan]:
    """Return DCP's planner, and the pieces that this rank can write."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    tensors = {name: value for name, value in sorted(state.items()) if not isinstance(value, Placed)}
    planner.set_up_planner(tensors, is_coordinator=coordinator)
    local = planner.create_local_plan()
    items = [item for item in local.items if not _is_empty_shard(item)]
    items += [
        item for name, value in sorted(state.items()) if isinstance(value, Placed) for item in _items(name, value)
    ]
    return planner, dataclasses.replace(local, items=items)


def blocks_to_write(state: State, plan: WritePlan, arena: Arena | None = None) -> StateBlocks:
    """Return the blocks that this rank writes; they share memory with ``state``."""
    blocks: dict[str, dict[MetadataIndex, Tensor]] = {}
    local: dict[MetadataIndex, Tensor] = {}
    for index in sorted((item.index for item in plan.items.items), key=lambda index: index.fqn):
        value = state[index.fqn]
        if isinstance(value, Placed):
            tensor_blocks = blocks.get(index.fqn) or blocks.setdefault(index.fqn, blocks_of(index.fqn, value))
            local[index] = tensor_blocks[index]
        else:  # in this case a rank holds at most one block
            local[index] = local_tensor(value)
    return StateBlocks(local, arena)


def blocks_of(name: str, value: Placed) -> dict[MetadataIndex, Tensor]:
    """Return this rank's blocks of a tensor, keyed by DCP's index of each block; blocks share the tensor's memory."""
    return {_index(name, piece): piece.tensor for piece in value.pieces()}


def _items(name: str, value: Placed) -> list[WriteItem]:
    """Return one write item per block; no write item if another tensor rank writes the blocks."""
    if not value.placement.counts:
        return []
    size = torch.Size(value.shape)
    return [
        WriteItem(
            index=_index(name, piece),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.shape),
                properties=TensorProperties.create_from_tensor(piece.tensor),
                size=size,
            ),
        )
        for piece in value.pieces()
    ]


def _index(name: str, piece: TensorBlock) -> MetadataIndex:
    return MetadataIndex(name, torch.Size(piece.offsets))


def _layout(tensor: Tensor) -> object:
    return tensor.placements if isinstance(tensor, DTensor) else None


def _is_empty_shard(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.chunk.sizes.numel() == 0 and data.size.numel() != 0


def _item_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize
