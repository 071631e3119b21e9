"""The parts of a rank's checkpoints: what it would write and what it would read, planned without files."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from partool.plan.rank_trace import CheckpointBlock, CheckpointTrace
from partool_runtime.checkpoint import StatePart, parts_to_load, parts_to_save
from partool_runtime.pieces import Value
from partool_runtime.torch_internals.tensors import without_modes


def checkpoint_trace(state: Mapping[str, Value]) -> CheckpointTrace:
    """Return the blocks of a rank's ``state`` (see :func:`partool_runtime.jobs.train.saving.state_of`) in checkpoints.

    The save and load plans are those of a run, before the ranks agree on who writes blocks that several of them hold.
    """
    with without_modes():  # torch reads offsets of shards from tensors that it makes
        saves, loads = list(parts_to_save(state)), list(parts_to_load(state))
    read, written = set(loads), set(saves)
    blocks = [_block(part, state[part.name], saved=True, loaded=part in read) for part in saves]
    blocks += [_block(part, state[part.name], saved=False, loaded=True) for part in loads if part not in written]
    sizes = [prod(part.sizes) * state[part.name].dtype.itemsize for part in saves]
    return CheckpointTrace(
        blocks=tuple(blocks),
        tensors=len(saves),
        size_bytes=sum(sizes),
        largest_bytes=max(sizes, default=0),
    )


def _block(part: StatePart, value: Value, *, saved: bool, loaded: bool) -> CheckpointBlock:
    dtype = str(value.dtype).removeprefix("torch.")
    return CheckpointBlock(part.name, tuple(value.shape), dtype, part.offsets, part.sizes, saved, loaded)
