"""What may run: each entry names a test that exists, and nothing else is runnable."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import pytest

from partool.layout.capabilities import CAPABILITIES, GAPS, GATHERS, Needs, aspects, gaps
from partool.spec.hardware import Devices
from partool.spec.model import Activation, AttentionKind, Mla, ModelConfig, Moe, Norm, Position, RopeScaling
from partool.spec.parallel import Compile, Recompute, ZeroStage
from partool.spec.training import Precision
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(layers=2, hidden=8, ffn_hidden=8, heads=2, kv_heads=2, head_dim=4, vocab=9)
PLAIN = Needs(
    model=MODEL,
    frozen=False,
    backend="cpu",
    nodes=1,
    zero=0,
    replicas=1,
    tensor=1,
    tensor_inner=1,
    sequence_norms=False,
    tensor_overlap="none",
    stages=1,
    schedule="1f1b",
    sequence=1,
    expert=1,
    offload_optimizer="none",
    offload_parameters="none",
    offload_activations="none",
    accumulation=1,
    recompute=frozenset({"none"}),
    compile="none",
    precision="fp32",
)
KNOWN = {capability.aspect for capability in CAPABILITIES}


def needs(**changes: Any) -> Needs:
    return Needs(**{name: changes.get(name, getattr(PLAIN, name)) for name in PLAIN.__slots__})


def model(**changes: Any) -> Needs:
    return needs(model=MODEL.model_copy(update=changes))


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda capability: capability.aspect)
def test_parity_test_exists(capability: Any) -> None:
    file, _, function = capability.parity_test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def every_kind() -> list[Needs]:
    """Return needs that together have every aspect a spec can ask for."""
    backends = get_args(Devices.model_fields["backend"].annotation)
    return [
        *(needs(backend=value) for value in backends),
        *(needs(zero=value) for value in get_args(ZeroStage)),
        *(needs(precision=value) for value in get_args(Precision)),
        *(needs(stages=2, schedule=value) for value in [*SCHEDULES, "file"]),
        *(needs(compile=value) for value in get_args(Compile)),
        *(needs(recompute=frozenset({value})) for value in get_args(Recompute)),
        *(model(norm=value) for value in get_args(Norm)),
        *(model(activation=value) for value in get_args(Activation)),
        *(model(position=value) for value in get_args(Position)),
        *(model(layer_types=(value,) * 2, window=4) for value in get_args(AttentionKind)),
        needs(nodes=2), needs(tensor=2, stages=2), needs(expert=2),
        *(needs(sequence=2, sequence_method=value) for value in METHODS),
        needs(tensor=2, tensor_inner=2), needs(tensor=2, sequence_norms=True),
        needs(tensor=2, tensor_overlap="symmetric"),
        needs(precision="fp8", tensor=2, tensor_inner=2), needs(precision="fp8", hf=True, tensor=2),
        needs(precision="fp8", stages=2, schedule="weipipe"), needs(precision="fp8", architecture="sm_89"),
        needs(offload_optimizer="nvme"), needs(offload_parameters="nvme"), needs(offload_activations="cpu"),
        needs(zero=3, gathers=frozenset(GATHERS)), needs(hf=True), needs(hf=True, sequence=2),
        needs(mlp_tile=4), needs(loss_tile=4),
        needs(zero=3, replicas=2), needs(accumulation=2), needs(frozen=True),
        model(tied_embeddings=True), model(kv_heads=1), model(qk_norm=True), model(qkv_bias=True),
        model(rope_scaling=RopeScaling(factor=8.0, original_max_position=16)),
        model(moe=Moe(experts=4, top_k=2, ffn_hidden=8)),
        model(mla=Mla(kv_rank=4, nope_head_dim=2, rope_head_dim=2, v_head_dim=4)),
    ]  # fmt: skip


def test_every_aspect_is_run_or_a_gap() -> None:
    asked = {aspect for kind in every_kind() for aspect in aspects(kind)}
    assert asked == KNOWN | set(GAPS)
    assert not KNOWN & set(GAPS)


def test_what_is_not_in_the_table_is_not_runnable() -> None:
    assert gaps(PLAIN) == ()
    for kind in every_kind():
        assert bool(gaps(kind)) == (not set(aspects(kind)) <= KNOWN)
    both = gaps(needs(expert=2, tensor=2, tensor_overlap="symmetric"))
    assert [gap.code for gap in both] == ["PT401", "PT404"]


def test_fp8_runs_where_kernels_for_it_are_compiled() -> None:
    for architecture in ("sm_90", "sm_100", "gfx942", "gfx950", ""):
        assert gaps(needs(precision="fp8", architecture=architecture, tensor=2, sequence=2)) == ()
    for architecture in ("sm_80", "sm_89", "sm_103", "gfx90a"):
        assert [gap.code for gap in gaps(needs(precision="fp8", architecture=architecture))] == ["PT489"]
        assert gaps(needs(precision="bf16", architecture=architecture)) == ()
