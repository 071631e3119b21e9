"""Writes a rank's file of a checkpoint in the format of torch's distributed checkpoints (DCP), one block at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.filesystem import (
    DEFAULT_SUFFIX,
    FileSystemWriter,
    SerializationFormat,
    _write_item,
)
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult


def write_blocks(
    writer: FileSystemWriter, plan: SavePlan, block_of: Callable[[MetadataIndex], Tensor]
) -> list[WriteResult]:
    """Write the blocks of ``plan`` into one file, in order, and return what DCP records about each.

    The file is the one that ``FileSystemWriter.write_data`` writes with one thread. That method keeps every block of a
    file in memory until the file is complete; here a block, and a copy of it if it is a view of a larger storage, exist
    at once, apart from the blocks that ``block_of`` keeps. ``block_of`` returns a block on the CPU.
    """
    name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
    results = []
    with writer.fs.create_stream(Path(writer.path) / name, "wb") as stream:
        for item in plan.items:
            block = block_of(item.index)
            if block.untyped_storage().size() != block.nbytes:
                block = block.clone()  # torch.save writes the whole storage of a view
            results.append(_write_item(writer.transforms, stream, block, item, name, SerializationFormat.TORCH_SAVE))
            del block  # before the next one is copied
    return results
