"""Dry runs of plans that compile blocks, and of plans in fp8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planned import plan_of

from partool.plan.rank_trace import Collective, RankTrace

SPEC = """\
model: {hidden: 64, layers: 4, heads: 4, kv_heads: 2, vocab: 256, ffn_hidden: 96}
hardware: {accelerator: h100-sxm, per_node: 4}
data: python-stdlib
training: {global_batch: 16, sequence_length: 64, steps: 3, precision: %s}
parallel: {tensor: 2, sequence: 1, pipeline: 1, data: {zero: 2}, recompute: %s, compile: block}
"""
BOTH = """\
import sys
from pathlib import Path
from partool_runtime.dry.__main__ import main
assert main([sys.argv[1], "1"]) == 0
from partool.plan.types import Plan
from partool_runtime.dry.rank import dry_rank
from torch._dynamo.utils import counters
plans = [Plan.from_json(Path(path).read_text()) for path in sys.argv[1:]]
for plan in plans:
    print(dry_rank(plan, 1, compiled=True).model_dump_json())
assert counters["frames"]["ok"] == counters["frames"]["total"] > 0, counters
assert not counters["graph_break"], counters
"""
"""Dry-runs a rank of the first plan, and then the rank of each plan with compiled blocks."""


def traces(folder: Path, *texts: str) -> list[RankTrace]:
    """Return the first plan's trace without compilation, and each plan's trace with it."""
    paths = [folder / f"{number}.json" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(plan_of(text).to_json())
    environment = os.environ | {"PARTOOL_HOME": str(folder)}
    command = [sys.executable, "-c", BOTH, *map(str, paths)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-3000:]
    return [RankTrace.model_validate_json(line) for line in done.stdout.splitlines()]


def exchanges(trace: RankTrace) -> list[Collective]:
    """Return the collectives of a step; a compiled block sums into new memory."""
    return [each._replace(kind=each.kind.replace("all_reduce_", "all_reduce")) for each in trace.collectives]


@pytest.mark.long
@pytest.mark.timeout(120)
def test_compiled_blocks_exchange_the_same_and_keep_less(tmp_path: Path) -> None:
    """The compiler's partitioner keeps fewer tensors for the backward pass than eager operators do; fp8 as bf16."""
    eager, compiled, fp8 = traces(tmp_path, SPEC % ("bf16", "none"), SPEC % ("fp8", "none"))
    assert exchanges(eager) == exchanges(compiled) == exchanges(fp8)
    assert any(each.kind == "all_reduce" for each in compiled.collectives)
    assert eager.memory is not None
    assert compiled.memory is not None
    kept = [memory.terms_bytes["activations"] for memory in (compiled.memory, eager.memory)]
    assert 0.4 * kept[1] < kept[0] < 0.9 * kept[1]


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("recompute", ["full", "selective", "keep_attention"])
def test_compiled_blocks_that_are_recomputed(tmp_path: Path, recompute: str) -> None:
    eager, compiled = traces(tmp_path, SPEC % ("bf16", recompute))
    assert exchanges(eager) == exchanges(compiled)
    assert eager.memory is not None
    assert compiled.memory is not None
    assert compiled.memory.peak_bytes < 1.05 * eager.memory.peak_bytes
