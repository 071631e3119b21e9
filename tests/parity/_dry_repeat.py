"""Dry-runs ranks of plans with and without repetition, in a process in which a library stands in for CUDA."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from planned import plan_of

from partool.plan.rank_trace import RankTrace
from partool.plan.types import Plan
from partool_runtime.dry import shim

SPEC = """\
model: {hidden: 64, layers: %d, heads: 4, kv_heads: 2, vocab: 256, ffn_hidden: 96, tied_embeddings: %s%s}
hardware: {accelerator: %s, nodes: 2, per_node: 4}
data: python-stdlib
training: {global_batch: %d, sequence_length: 64, steps: 3%s}
parallel: {micro_batch: 1, %s}
"""
ALONE = "tensor: 1, sequence: 1, pipeline: 1"


class Case(NamedTuple):
    """A rank of a layout."""

    parallel: str
    samples: int
    """Samples of a step."""
    rank: int
    layers: int = 4
    ran: int = 4
    """Layers that are executed in each pass."""
    fewer: bool = True
    """Whether fewer micro-batches than those of the step are executed."""
    passes: bool = True
    """Whether passes of a layer repeat each other, if there are enough."""
    accelerator: str = "h100-sxm"
    tied: bool = True
    model: str = ""
    """Further settings of the model."""
    training: str = ""
    """Further settings of the training."""
    compiled: bool = False
    config: dict[str, object] | None = None
    """Settings of a Hugging Face model that takes the place of the other one."""


def _pipeline(schedule: str, zero: int) -> str:
    return f"tensor: 2, sequence: 1, pipeline: {{stages: 2, schedule: {schedule}}}, data: {{zero: {zero}}}"


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 256, "tie_word_embeddings": False,
}  # fmt: skip
WINDOWS = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 10,
    "layer_types": ["sliding_attention", "full_attention"] * 5,
}
EXPERTS = {"model_type": "mixtral", "num_hidden_layers": 6, "num_local_experts": 4, "num_experts_per_tok": 2}
MICRO_BATCHES: dict[str, Case] = {
    **{f"zero {stage}": Case(f"{ALONE}, data: {{zero: {stage}}}", 64, 3) for stage in range(4)},
    "hybrid shards, recompute": Case(f"{ALONE}, data: {{zero: 3, shard: 4}}, recompute: full", 64, 0),
    "tensor": Case("tensor: 4, sequence: 1, pipeline: 1, data: {zero: 2}, recompute: selective", 16, 5),
    "ring": Case("tensor: 1, pipeline: 1, sequence: {degree: 2, method: ring}, data: {zero: 1}", 32, 2),
    "ulysses on CPUs": Case(
        "tensor: 1, pipeline: 1, sequence: {degree: 4, method: ulysses}", 32, 1, accelerator="cpu"
    ),
    **{
        f"{schedule}, zero {stage}, pipeline rank {rank // 4}": Case(
            _pipeline(schedule, stage), 2 * count, rank, ran=2, passes="zb" not in schedule
        )
        for schedule, stage, rank, count in (
            ("gpipe", 1, 0, 11), ("1f1b", 1, 0, 12), ("1f1b", 3, 4, 12), ("interleaved", 2, 0, 32), ("zb-h1", 1, 4, 12),
            ("zb-v", 1, 0, 16), ("hanayo", 3, 4, 24),
        )
    },
    "1f1b of 4 stages": Case("tensor: 2, sequence: 1, pipeline: {stages: 4, schedule: 1f1b}", 20, 3, ran=1),
}  # fmt: skip
"""Layouts of which micro-batches are repeated; their stages have too few layers to repeat those."""
LAYERS: dict[str, Case] = {
    "plain": Case(f"{ALONE}, data: {{zero: 0}}", 8, 3, 6, fewer=False),
    "zero 1": Case(f"{ALONE}, data: {{zero: 1}}", 16, 3, 6, fewer=False, tied=False),
    "zero 2, micro-batches": Case(f"{ALONE}, data: {{zero: 2}}", 40, 3, 6),
    "zero 3": Case(f"{ALONE}, data: {{zero: 3}}", 16, 3, 6, fewer=False),
    "recompute full": Case(f"{ALONE}, data: {{zero: 3, shard: 4}}, recompute: full", 8, 0, 6, fewer=False),
    "tensor, recompute selective": Case(
        "tensor: 4, sequence: 1, pipeline: 1, data: {zero: 2}, recompute: selective", 4, 5, 6, fewer=False
    ),
    "ulysses": Case(
        "tensor: 1, pipeline: 1, sequence: {degree: 2, method: ulysses}, data: {zero: 1}", 8, 2, 6, fewer=False
    ),
    "ring": Case("tensor: 1, pipeline: 1, sequence: {degree: 2, method: ring}, data: {zero: 3}", 8, 2, 6, fewer=False),
    "1f1b, micro-batches": Case(_pipeline("1f1b", 1), 14, 0, 10),
    "compiled 1f1b": Case(f"{_pipeline('1f1b', 1)}, compile: block", 14, 0, ran=2, compiled=True),
    "1f1b on CPUs": Case(_pipeline("1f1b", 1), 14, 0, ran=2, fewer=False, accelerator="cpu"),
    "1f1b, recompute full": Case(f"{_pipeline('1f1b', 3)}, recompute: full", 14, 4, ran=2),
    "interleaved": Case(_pipeline("interleaved, chunks: 2", 2), 8, 4, 20, ran=8, fewer=False),
    "fp8": Case(f"{ALONE}, data: {{zero: 1}}", 8, 1, 6, fewer=False, training=", precision: fp8"),
    "compiled": Case(
        f"{ALONE}, data: {{zero: 3}}, compile: block, recompute: keep_attention", 8, 1, 6, fewer=False, compiled=True
    ),
    "on CPUs": Case(f"{ALONE}, data: {{zero: 3}}", 8, 1, 6, fewer=False, accelerator="cpu"),
    "halved backward passes": Case(_pipeline("zb-h1", 1), 16, 4, 12, ran=6, passes=False),
    "offload": Case(f"{ALONE}, data: {{zero: 1}}, offload: {{activations: cpu}}", 8, 1, 6, ran=6, fewer=False),
    "weipipe": Case(
        "tensor: 1, sequence: 1, pipeline: {stages: 4, schedule: weipipe}, data: {zero: 0}",
        8,
        1,
        12,
        ran=12,
        fewer=False,
    ),
    "experts": Case(
        "tensor: 1, sequence: 1, pipeline: 1, expert: 2, data: {zero: 1}",
        8,
        1,
        6,
        ran=6,
        fewer=False,
        model=", moe: {experts: 4, top_k: 2, ffn_hidden: 48}",
    ),
    "transformers, windows in turns": Case(
        f"{ALONE}, data: {{zero: 3}}", 8, 1, 10, ran=8, fewer=False, config=SMALL | WINDOWS | {"sliding_window": 16}
    ),
    "transformers, 1f1b": Case(
        _pipeline("1f1b", 1), 14, 0, 6, ran=3, config=SMALL | {"model_type": "llama", "num_hidden_layers": 6}
    ),
    "transformers, experts": Case(f"{ALONE}, data: {{zero: 2}}", 8, 1, 6, fewer=False, config=SMALL | EXPERTS),
}
"""Layouts with more layers; where they cannot be repeated all of them run."""
CASES = {
    **{f"micro-batches: {name}": case for name, case in MICRO_BATCHES.items()},
    **{f"layers: {name}": case for name, case in LAYERS.items()},
}


def check(name: str, folder: Path) -> None:
    """Compare a rank's two traces; the repetition must really have left out work."""
    case = CASES[name]
    model = case.layers, str(case.tied).lower(), case.model
    text = SPEC % (*model, case.accelerator, case.samples, case.training, case.parallel)
    if case.config is not None:
        (folder / "hf").mkdir(exist_ok=True)
        (folder / "hf" / "config.json").write_text(json.dumps(case.config))
        text = "model: {hf: hf}\n" + text.partition("\n")[2]
    _compare(name, plan_of(text, folder=folder), case)


def _compare(name: str, plan: Plan, case: Case) -> None:
    fast, whole = _traced(plan, case), _traced(plan, case, repeat=False)
    print(f"{name}: {fast.seconds:.2f} s instead of {whole.seconds:.2f} s, {fast.executed}", flush=True)
    _equal(fast, whole, case)


def _traced(plan: Plan, case: Case, *, repeat: bool = True) -> RankTrace:
    from partool_runtime.dry.rank import dry_rank  # torch must not be imported before the library is loaded

    return dry_rank(plan, case.rank, compiled=case.compiled, repeat=repeat)


def _equal(fast: RankTrace, whole: RankTrace, case: Case, unequal: str = "") -> None:
    assert fast.executed is not None
    assert whole.executed is not None
    assert fast.executed.layers == case.ran, fast.executed
    assert fast.executed.of_layers == whole.executed.of_layers == whole.executed.layers
    assert fast.executed.unequal == unequal, fast.executed
    assert whole.executed.micro_batches == fast.executed.of_micro_batches
    # Of five or more micro-batches that run, a layer executes four, if nothing in it is halved or moved.
    if fast.executed.micro_batches >= 5 and case.passes and not unequal:
        share = 4 / fast.executed.micro_batches
        assert fast.executed.passes <= share * fast.executed.of_passes, fast.executed
    else:
        assert fast.executed.passes == fast.executed.of_passes
    assert case.fewer == (fast.executed.micro_batches < fast.executed.of_micro_batches), fast.executed
    assert list(fast.collectives) == list(whole.collectives)
    assert fast.memory is not None
    assert whole.memory is not None
    for field in type(whole.memory).model_fields:
        assert getattr(fast.memory, field) == getattr(whole.memory, field), field
    left = {"seconds": 0.0, "executed": None}
    assert fast.model_copy(update=left) == whole.model_copy(update=left)


def check_mixed() -> None:
    """Layers of two kinds in turns repeat each other."""
    case = Case(f"{ALONE}, data: {{zero: 2}}", 8, 3, 10, ran=8, fewer=False)
    _compare("two kinds of layers", _recomputed(case, ("full", "none") * 5), case)


def check_unequal() -> None:
    """Where a comparison shows that layers differ which seem equal, all of them run."""
    from partool_runtime.dry import layers

    case = Case(f"{ALONE}, data: {{zero: 2}}", 8, 3, 6, ran=6, fewer=False)
    plan = _recomputed(case, ("none", "none", "none", "none", "full", "none"))
    with _replaced(layers, "kind_of", lambda block: "all"):
        fast = _traced(plan, case)
    _equal(fast, _traced(plan, case, repeat=False), case, unequal="forward passes of layers")
    print("unequal layers", flush=True)


def check_unequal_passes() -> None:
    """Where a layer does more for the last micro-batch but one than it did for the second, all of its passes run."""
    from torch import nn
    from torch.nn.modules.module import register_module_forward_pre_hook

    from partool_runtime.model.decoder import Block

    case = Case(_pipeline("1f1b", 1), 12, 0, ran=2, fewer=False)
    plan = plan_of(SPEC % (4, "true", "", case.accelerator, case.samples, "", case.parallel))
    forward, calls = Block.forward, Counter[nn.Module]()

    def odd(block: Block, x_BSH: Any, context: Any) -> Any:
        y_BSH = forward(block, x_BSH, context)
        return y_BSH * y_BSH if calls[block] % 6 == 5 else y_BSH

    # Layers that are not executed are called, too.
    counting = register_module_forward_pre_hook(lambda module, _: calls.update([module]))
    with _replaced(Block, "forward", odd):
        _equal(_traced(plan, case), _traced(plan, case, repeat=False), case, unequal="forward passes of layers")
    counting.remove()
    print("unequal passes", flush=True)


def _recomputed(case: Case, recompute: tuple[str, ...]) -> Plan:
    plan = plan_of(SPEC % (case.layers, "false", "", case.accelerator, case.samples, "", case.parallel))
    return plan.model_copy(update={"layout": plan.layout.model_copy(update={"recompute": recompute})})


@contextmanager
def _replaced(module: Any, name: str, by: Callable[..., Any]) -> Any:
    before = getattr(module, name)
    setattr(module, name, by)
    try:
        yield
    finally:
        setattr(module, name, before)


OTHERS = {"mixed": check_mixed, "unequal": check_unequal, "unequal passes": check_unequal_passes}


def main() -> None:
    """Check the cases that the arguments name, those of GPUs or those of CPUs."""
    names = sys.argv[2:]
    if names[0] not in CASES or CASES[names[0]].accelerator != "cpu":
        shim.load(Path(os.environ["PARTOOL_HOME"]) / "dry")
        from partool_runtime.dry.device import install

        install("H100", (9, 0), 80 << 30, 4)
    for name in names:
        check(name, Path(sys.argv[1])) if name in CASES else OTHERS[name]()


if __name__ == "__main__":
    main()
