"""Whether the ranks' checkpoints together hold the whole training state, and are read as they are written."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

from partool.layout.checkpoint import WEIGHTS, Shape, checkpoint_shapes
from partool.plan.rank_trace import CheckpointBlock, RankTrace
from partool.plan.types import Plan
from partool.verify.findings import ranks_in_words

FaultKind = Literal[
    "missing", "unknown", "shape", "dtype", "outside", "twice", "overlap", "gap", "not read", "not saved"
]
_OF_EACH_RANK = ("worker_error.", "server_error.", "lamb_ratio.")
"""Beginnings of the keys of state that is not of the parameters' shapes, or differs between data-parallel ranks."""


class CheckpointFault(NamedTuple):
    """Something that is wrong with the ranks' parts of a checkpoint."""

    kind: FaultKind
    key: str
    """Name of the tensor in checkpoints."""
    ranks: tuple[int, ...]
    """Ranks that the fault is about; empty for all."""
    message: str


class _Held(NamedTuple):
    rank: int
    block: CheckpointBlock


def checkpoint_faults(plan: Plan, traces: Sequence[RankTrace]) -> list[CheckpointFault]:
    """Return what is wrong with the checkpoints of a plan's ranks, by key; each key has at most one fault per kind.

    Each parameter and each of its moments must be covered by the ranks' blocks without gap or overlap. Several ranks
    may hold the same block, of which one copy is written. Each rank must read the blocks that it saves. ``traces`` are
    those of all ranks, or of ranks that together hold one whole copy of the state. The planner does not know the keys
    of a model that transformers builds: only their moments are compared with their parameters.
    """
    blocks_by_key: dict[str, list[_Held]] = defaultdict(list)
    for trace in traces:
        for block in () if trace.checkpoint is None else trace.checkpoint.blocks:
            if not block.key.startswith(_OF_EACH_RANK):
                blocks_by_key[block.key].append(_Held(trace.rank, block))
    expected = _expected(plan, blocks_by_key)
    faults = [
        CheckpointFault("missing", key, (), f"no rank has {key}, of {list(shape)}")
        for key, shape in expected.items()
        if key not in blocks_by_key
    ]
    for key, blocks in blocks_by_key.items():
        if key not in expected:
            ranks = _ranks(blocks)
            faults.append(CheckpointFault("unknown", key, ranks, f"{_of(ranks)} {key}, which the plan does not have"))
        else:
            faults += _of_key(key, expected[key], blocks)
    return faults


def _expected(plan: Plan, blocks_by_key: Mapping[str, Sequence[_Held]]) -> dict[str, Shape]:
    """Return key and shape of each tensor that checkpoints of the plan hold."""
    shapes: dict[str, Shape] | None = None
    if not plan.own_decoder:
        shapes_by_key = {key: blocks[0].block.shape for key, blocks in blocks_by_key.items() if key.startswith(WEIGHTS)}
        shapes = {key.removeprefix(WEIGHTS): shape for key, shape in shapes_by_key.items()}
    averages = plan.training.ema is not None
    return checkpoint_shapes(plan.model, plan.optimizer.name, plan.frozen, shapes, averages=averages)


def _of_key(key: str, shape: Shape, blocks: Sequence[_Held]) -> Iterator[CheckpointFault]:
    """Yield the faults of a tensor; blocks of another shape or type are not compared any further."""
    if wrong := [each for each in blocks if each.block.shape != shape]:
        message = f"{_of(_ranks(wrong))} {key} as {list(wrong[0].block.shape)}; it is {list(shape)}"
        yield CheckpointFault("shape", key, _ranks(wrong), message)
        return
    dtypes = {each.block.dtype: each.rank for each in blocks}
    if len(dtypes) > 1:
        words = " and ".join(f"{dtype} (rank {rank})" for dtype, rank in dtypes.items())
        yield CheckpointFault("dtype", key, tuple(sorted(dtypes.values())), f"{key} has several types: {words}")
    if wrong := [each for each in blocks if not _inside(each.block, shape)]:
        message = f"{_of(_ranks(wrong))} a block of {key} at {_place(wrong[0].block)}, outside of {list(shape)}"
        yield CheckpointFault("outside", key, _ranks(wrong), message)
        return
    yield from _of_saves(key, shape, [each for each in blocks if each.block.saved])
    yield from _of_reads(key, blocks)


def _of_saves(key: str, shape: Shape, saved: Sequence[_Held]) -> Iterator[CheckpointFault]:
    counts: dict[tuple[int, Shape, Shape], int] = defaultdict(int)
    for rank, block in saved:
        counts[rank, block.offsets, block.sizes] += 1
    for (rank, offsets, _), count in counts.items():
        if count > 1:
            yield CheckpointFault("twice", key, (rank,), f"rank {rank} saves {key} at {list(offsets)} {count} times")
            break
    distinct = list({(each.block.offsets, each.block.sizes): each for each in saved}.values())
    if crossing := _crossing(distinct):
        one, other = crossing
        ranks = tuple(sorted({one.rank, other.rank}))
        message = f"ranks {one.rank} and {other.rank} save {key} at {_place(one.block)} and {_place(other.block)}"
        yield CheckpointFault("overlap", key, ranks, f"{message}: these blocks share elements")
        return
    if not saved and 0 not in shape:
        yield CheckpointFault("gap", key, (), f"no rank saves {key}")
    elif (lacking := prod(shape) - sum(prod(each.block.sizes) for each in distinct)) > 0:
        yield CheckpointFault("gap", key, (), f"no rank saves {lacking} of the {prod(shape)} elements of {key}")


def _of_reads(key: str, blocks: Sequence[_Held]) -> Iterator[CheckpointFault]:
    if unread := [each for each in blocks if each.block.saved and not each.block.loaded]:
        message = f"{_of(_ranks(unread), 'saves', 'save')} a block of {key} at {_place(unread[0].block)}"
        yield CheckpointFault("not read", key, _ranks(unread), f"{message}, and a run that continues does not read it")
    if not any(each.block.saved for each in blocks):
        yield CheckpointFault(
            "not saved", key, _ranks(blocks), f"{_of(_ranks(blocks), 'reads', 'read')} {key}, unsaved"
        )


def _crossing(blocks: Sequence[_Held]) -> tuple[_Held, _Held] | None:
    """Return two blocks that share elements, or None; blocks are swept along the dimension with most cuts."""
    if not blocks or not blocks[0].block.shape:
        return (blocks[0], blocks[1]) if len(blocks) > 1 else None
    starts = [len({each.block.offsets[dim] for each in blocks}) for dim in range(len(blocks[0].block.shape))]
    along = starts.index(max(starts))
    active: list[_Held] = []
    for each in sorted(blocks, key=lambda each: each.block.offsets[along]):
        active = [a for a in active if a.block.offsets[along] + a.block.sizes[along] > each.block.offsets[along]]
        for other in active:
            if _share(each.block, other.block):
                return other, each
        active.append(each)
    return None


def _share(a: CheckpointBlock, b: CheckpointBlock) -> bool:
    spans = zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    return all(first < other + more and other < first + size for first, size, other, more in spans)


def _inside(block: CheckpointBlock, shape: Shape) -> bool:
    if not len(block.offsets) == len(block.sizes) == len(shape):
        return False
    spans = zip(block.offsets, block.sizes, shape, strict=True)
    return all(first >= 0 and size >= 0 and first + size <= length for first, size, length in spans)


def _ranks(blocks: Sequence[_Held]) -> tuple[int, ...]:
    return tuple(sorted({each.rank for each in blocks}))


def _of(ranks: Sequence[int], one: str = "holds", more: str = "hold") -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {ranks_in_words(ranks)} {more}"


def _place(block: CheckpointBlock) -> str:
    spans = zip(block.offsets, block.sizes, strict=True)
    return f"[{', '.join(f'{first}:{first + size}' for first, size in spans)}]"
