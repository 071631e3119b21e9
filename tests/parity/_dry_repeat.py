"""Dry-runs ranks of plans with and without repetition, in a process in which a library stands in for CUDA."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from planned import plan_of

from partool.plan.rank_trace import RankTrace
from partool_runtime.dry import shim

MODEL = "model: {hidden: 64, layers: 4, heads: 4, kv_heads: 2, vocab: 256, ffn_hidden: 96, tied_embeddings: true}"
SPEC = """\
%s
hardware: {accelerator: %s, nodes: 2, per_node: 4}
data: python-stdlib
training: {global_batch: %d, sequence_length: 64, steps: 3}
parallel: {micro_batch: 1, %s}
"""
ALONE = "tensor: 1, sequence: 1, pipeline: 1"
CASES: dict[str, tuple[str, str, int, int]] = {
    **{f"zero {stage}": ("h100-sxm", f"{ALONE}, data: {{zero: {stage}}}", 64, 3) for stage in range(4)},
    "hybrid shards, recompute": ("h100-sxm", f"{ALONE}, data: {{zero: 3, shard: 4}}, recompute: full", 64, 0),
    "tensor": ("h100-sxm", "tensor: 4, sequence: 1, pipeline: 1, data: {zero: 2}, recompute: selective", 16, 5),
    "ring": ("h100-sxm", "tensor: 1, pipeline: 1, sequence: {degree: 2, method: ring}, data: {zero: 1}", 32, 2),
    "ulysses on CPUs": ("cpu", "tensor: 1, pipeline: 1, sequence: {degree: 4, method: ulysses}", 32, 1),
    **{
        f"{schedule}, zero {stage}, pipeline rank {rank // 4}": (
            "h100-sxm",
            f"tensor: 2, sequence: 1, pipeline: {{stages: 2, schedule: {schedule}}}, data: {{zero: {stage}}}",
            2 * count,
            rank,
        )
        for schedule, stage, rank, count in (
            ("gpipe", 1, 0, 11), ("1f1b", 1, 0, 12), ("1f1b", 3, 4, 12), ("interleaved", 2, 0, 32), ("zb-h1", 1, 4, 12),
            ("zb-v", 1, 0, 16), ("hanayo", 3, 4, 24),
        )
    },
    "1f1b of 4 stages": ("h100-sxm", "tensor: 2, sequence: 1, pipeline: {stages: 4, schedule: 1f1b}", 20, 3),
}  # fmt: skip
"""Accelerator, layout, samples of a step and rank."""


def check(name: str) -> None:
    """Compare a rank's two traces; the repetition must really have run fewer micro-batches."""
    from partool_runtime.dry import repeat  # torch must not be imported before the library is loaded
    from partool_runtime.dry.rank import dry_rank

    accelerator, parallel, samples, rank = CASES[name]
    plan = plan_of(SPEC % (MODEL, accelerator, samples, parallel))
    composed: list[int] = []
    before = repeat.Shorter.composed

    def counted(shorter: repeat.Shorter, marks: repeat.Marks) -> tuple[list[int], int]:
        try:
            found = before(shorter, marks)
        except repeat.Unequal as error:
            raise AssertionError(name) from error
        composed.append(shorter.plan.layout.derived.accumulation)
        return found

    repeat.Shorter.composed = counted  # type: ignore[method-assign]
    try:
        took_s = time.process_time()
        fast, middle_s = dry_rank(plan, rank), time.process_time()
        whole = dry_rank(plan, rank, repeat=False)
    finally:
        repeat.Shorter.composed = before  # type: ignore[method-assign]
    print(f"{name}: {composed} of {plan.layout.derived.accumulation} micro-batches,", end=" ")
    print(f"{middle_s - took_s:.2f} s instead of {time.process_time() - middle_s:.2f} s", flush=True)
    assert composed, name
    assert composed[0] < plan.layout.derived.accumulation
    _compare(fast, whole)


def _compare(fast: RankTrace, whole: RankTrace) -> None:
    assert list(fast.collectives) == list(whole.collectives)
    left = {"seconds": 0.0}
    assert fast.memory is not None
    assert whole.memory is not None
    for field in type(whole.memory).model_fields:
        assert getattr(fast.memory, field) == getattr(whole.memory, field), field
    assert fast.model_copy(update=left) == whole.model_copy(update=left)


def main() -> None:
    """Check the cases that the arguments name, those of GPUs or those of CPUs."""
    names = sys.argv[2:]
    if CASES[names[0]][0] != "cpu":
        shim.load(Path(sys.argv[1]))
        from partool_runtime.dry.device import install

        install("H100", (9, 0), 80 << 30, 4)
    for name in names:
        check(name)


if __name__ == "__main__":
    main()
