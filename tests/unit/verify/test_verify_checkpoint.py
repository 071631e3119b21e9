"""Checks of the ranks' parts of a checkpoint, with planted faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from planned import plan_of

from partool.layout.parameters import parameters
from partool.plan.rank_trace import CheckpointBlock, CheckpointTrace, RankTrace
from partool.plan.types import Plan
from partool.verify.checkpoint import CheckpointFault, checkpoint_faults

SPEC = """\
model: {hidden: 64, layers: 2, heads: 4, kv_heads: 2, vocab: 256, ffn_hidden: 96, frozen: ["layers.0.*"]}
hardware: {accelerator: h100-sxm, per_node: 4}
data: python-stdlib
training: {global_batch: 16, sequence_length: 64, steps: 3}
parallel: {tensor: 1, sequence: 1, pipeline: 1, data: {zero: 3}}
"""
RANKS = 4
KEY = "exp_avg.layers.1.ffn.up.weight"
Blocks = list[CheckpointBlock]


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(SPEC)


def held(plan: Plan, rank: int) -> Iterator[CheckpointBlock]:
    """Yield a rank's rows of matrices; every rank holds vectors whole."""
    for each in parameters(plan.model):
        kinds = ["model"] if each.layer == 0 else ["model", "exp_avg", "exp_avg_sq"]
        rows = each.shape[0] // RANKS
        cut = len(each.shape) > 1
        for kind in kinds:
            offsets = (rank * rows, 0) if cut else (0,)
            sizes = (rows, *each.shape[1:]) if cut else each.shape
            yield CheckpointBlock(f"{kind}.{each.name}", each.shape, "float32", offsets, sizes, True, True)


def faults(plan: Plan, change: Callable[[int, Blocks], Blocks]) -> list[CheckpointFault]:
    """Return the faults of ranks whose blocks ``change(rank, blocks)`` returns."""
    traces = []
    for rank in range(RANKS):
        blocks = change(rank, list(held(plan, rank)))
        saved = CheckpointTrace(blocks=tuple(blocks), tensors=len(blocks), size_bytes=0, largest_bytes=0)
        traces.append(RankTrace(rank=rank, vocabulary=(), order=(), operators=0, seconds=0.0, checkpoint=saved))
    return checkpoint_faults(plan, traces)


def with_fields(rank: int, **fields: object) -> Callable[[int, Blocks], Blocks]:
    """Return a change of the fields of one block of one rank; -1 stands for all ranks."""
    return lambda each, blocks: [
        block._replace(**fields) if block.key == KEY and rank in (each, -1) else block for block in blocks
    ]


def test_ranks_that_together_hold_everything_have_no_fault(plan: Plan) -> None:
    """Vectors are held by every rank, and frozen parameters have no moments."""
    assert faults(plan, lambda rank, blocks: blocks) == []
    for rank in range(RANKS):
        text = RankTrace(
            rank=rank,
            vocabulary=(),
            order=(),
            operators=0,
            seconds=0.0,
            checkpoint=CheckpointTrace(blocks=tuple(held(plan, rank)), tensors=1, size_bytes=0, largest_bytes=0),
        ).model_dump_json()
        assert checkpoint_faults(plan, [RankTrace.model_validate_json(text)]) != []


def without(blocks: Blocks, rank: int, of: tuple[int, ...]) -> Blocks:
    return [block for block in blocks if block.key != KEY or rank not in of]


PLANTED: dict[str, tuple[Callable[[int, Blocks], Blocks], str, tuple[int, ...], str]] = {
    "missing on all ranks": (lambda rank, blocks: without(blocks, rank, (0, 1, 2, 3)), "missing", (), "no rank has"),
    "missing on one rank": (lambda rank, blocks: without(blocks, rank, (2,)), "gap", (), "1536 of the 6144 elements"),
    "moments of a frozen parameter": (
        lambda rank, blocks: [*blocks, blocks[0]._replace(key="exp_avg.layers.0.ffn.up.weight")],
        "unknown", (0, 1, 2, 3), "the plan does not have",
    ),
    "another shape on one rank": (with_fields(1, shape=(96, 32)), "shape", (1,), "[96, 32]; it is [96, 64]"),
    "another shape on all ranks": (with_fields(-1, shape=(64, 96)), "shape", (0, 1, 2, 3), "[64, 96]; it is [96, 64]"),
    "another type on one rank": (with_fields(3, dtype="bfloat16"), "dtype", (2, 3), "bfloat16 (rank 3)"),
    "rows of a neighbour": (with_fields(1, offsets=(12, 0)), "overlap", (0, 1), "[0:24, 0:64] and [12:36, 0:64]"),
    "all rows beside a part": (with_fields(2, offsets=(0, 0), sizes=(96, 64)), "overlap", (0, 2), "share elements"),
    "rows that do not exist": (with_fields(3, offsets=(80, 0)), "outside", (3,), "[80:104, 0:64]"),
    "one rank twice": (
        lambda rank, blocks: blocks + [block for block in blocks if block.key == KEY and rank == 1],
        "twice", (1,), "2 times",
    ),
    "saved and not read": (with_fields(2, loaded=False), "not read", (2,), "does not read it"),
    "read and not saved": (with_fields(-1, saved=False), "not saved", (0, 1, 2, 3), "unsaved"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(plan: Plan, name: str) -> None:
    change, kind, ranks, words = PLANTED[name]
    found = faults(plan, change)
    assert {fault.key for fault in found} == {"exp_avg.layers.0.ffn.up.weight" if kind == "unknown" else KEY}
    assert {fault.kind for fault in found} == ({"gap", kind} if kind == "not saved" else {kind})
    assert (found[-1].ranks, words in found[-1].message) == (ranks, True), found
