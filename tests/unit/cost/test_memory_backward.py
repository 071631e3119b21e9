"""What a layer's backward pass and the loss hold at most: executed on fake tensors, and by the cost model's equations.

The inner width is three times the model's width: without gates, norms of several operators have fuller moments below
twice the width. There are more tokens than rows of matrices: with few tokens the fullest moment of a layer's backward
pass is its end, when all matrices have their gradients. The equations of a layer leave this moment out, as the
reduction of the same gradients, which follows, takes more.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from _alive import Alive
from often import named, often

from partool.cost.case import RECOMPUTE, SCHEDULES, Layouts
from partool.cost.memory.rank_parameters import DENSE, MOE, RankLoad
from partool.cost.memory.stacks import memory_stack
from partool.cost.memory.transient import loss_bytes
from partool.cost.training.forward_moments import forward_moments
from partool.cost.training.pass_bytes import bytes_of_layers, pass_bytes
from partool.cost.training.states import states
from partool.layout.traced import applicable
from partool.spec.experts import Moe
from partool.spec.hardware import Devices
from partool.spec.model import ModelConfig
from partool.spec.parallel import Recompute
from partool.spec.training import Fused, Precision
from partool.work.evaluation import forward_only
from partool.work.stacks import own_stack
from partool.work.training import TrainingWork
from partool_runtime.fused import Fusing, put
from partool_runtime.model import Decoder
from partool_runtime.model.loss import LossKernels, loss
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_networks
from partool_runtime.precision import COMPUTE_DTYPE
from partool_runtime.torch_internals.tensors import FakeTensorMode

GPU = Devices(
    accelerator="test", backend="cuda", nodes=1, per_node=1, memory_bytes=2**36, peak_flops=1e15,
    achievable_flops=8e14, memory_bytes_per_s=2e12, link_bytes_per_s=4e11, fabric_bytes_per_s=5e10,
)  # fmt: skip
SIZES: dict[str, Any] = {
    "layers": 2, "hidden": 512, "ffn_hidden": 1536, "heads": 8, "kv_heads": 8, "head_dim": 64, "vocab": 700,
}  # fmt: skip
SEQUENCES, LENGTH, TILE = 2, 1024, 128
EXACT = (0.995, 1.005)
"""Ratio of planned to executed bytes where the equations follow every tensor but masks, scalars and indices."""
REBUILT, SELECTED, TILED, SHARED = (0.96, 1.005), (0.93, 1.005), (1.0, 1.32), (0.97, 1.07)
"""The same where torch's operators rebuild a layer, keep results beside rebuilt ones, work in tiles, and with shared
experts: bounds as executed."""


class LayerCase(NamedTuple):
    """A layer, how it is run, and the least and the most ratio of planned to executed bytes."""

    ratios: tuple[float, float] = EXACT
    model: dict[str, Any] = {}
    precision: Precision = "bf16"
    fused: bool = True
    policy: Recompute = "none"
    tile: int = 0

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(**(SIZES | self.model))

    @property
    def parts(self) -> tuple[Fused, ...]:
        return applicable(self.config) if self.fused else ()


def decoder(config: ModelConfig, dtype: torch.dtype) -> Decoder:
    """Return a model with parameters of a type; those of fake tensors cannot be converted."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Decoder(config)
    finally:
        torch.set_default_dtype(before)


def executed_bytes(case: LayerCase, *, saves: bool = True) -> int:
    """Return the most bytes that exist during the layer's backward pass, with what its forward pass has saved.

    Without ``saves`` they are those of a forward pass that saves nothing.
    """
    config, dtype = case.config, COMPUTE_DTYPE[case.precision]
    with FakeTensorMode():
        model = decoder(config, dtype)
        put(model, Fusing(case.parts, config))
        tile_networks(model.layers, case.tile)
        recompute(model.layers, [case.policy] * 2, tiled=case.tile > 0)
        context = model.contexts(torch.empty(1, LENGTH, 1, dtype=dtype))
        leaf = torch.empty(SEQUENCES, LENGTH, config.hidden, dtype=dtype, requires_grad=True)
        with Alive() as alive, torch.set_grad_enabled(saves):
            # The input and the result's gradient are tensors that nothing but autograd holds.
            out = model.layers[1](leaf * 2, context)
            if saves:
                total = (out * 2).sum()
                del out
                alive.restart()
                total.backward()
    return alive.peak_bytes


def work_of(case: LayerCase) -> TrainingWork:
    stack = own_stack("cuda", "none", case.parts)
    return TrainingWork(case.config, GPU, LENGTH, case.precision, stack, global_batch=SEQUENCES)


def planned_bytes(case: LayerCase) -> float:
    layouts = Layouts(micro_batch=SEQUENCES, compiled=0, mlp_tile_tokens=case.tile)
    key = MOE if case.config.moe else DENSE, RECOMPUTE.index(case.policy)
    load = RankLoad((1, 1), 1, 1, 1, {key: 1})
    layer = bytes_of_layers(work_of(case), layouts, memory_stack("partool"), [load])[key]
    return float(np.asarray(layer.saved + layer.backward_peak_bytes))


FEW, MANY, WIDE = (
    {"moe": Moe(experts=experts, top_k=top_k, ffn_hidden=inner)}
    for experts, top_k, inner in ((8, 2, 512), (16, 4, 256), (4, 1, 2048))
)
WITH_SHARED = {"moe": Moe(experts=8, top_k=2, ffn_hidden=512, shared_experts=1)}
GPT_OSS = {
    "activation": "swiglu_clamped", "sinks": True, "qkv_bias": True, "out_bias": True,
    "moe": Moe(experts=8, top_k=2, ffn_hidden=512, bias=True),
}  # fmt: skip
NAMED: dict[str, LayerCase] = {
    "gpt-oss": LayerCase(model=GPT_OSS),
    "clamped": LayerCase(model={"activation": "swiglu_clamped", "sinks": True}),
    "fused": LayerCase(),
    "of torch's operators": LayerCase(fused=False),
    "plain network": LayerCase(model={"norm": "layernorm", "activation": "gelu"}),
    "rebuilt": LayerCase(policy="full"),
    "rebuilt but attention": LayerCase(policy="keep_attention"),
    "attention rebuilt": LayerCase(policy="attention"),
    "rebuilt by torch's operators": LayerCase(REBUILT, fused=False, policy="full"),
    "selected": LayerCase(SELECTED, policy="selective"),
    "selected of torch's operators": LayerCase(SELECTED, fused=False, policy="selective"),
    "in tiles": LayerCase(TILED, policy="full", tile=TILE),
    "in tiles, of torch's operators": LayerCase(TILED, fused=False, tile=TILE),
    "experts": LayerCase(model=FEW),
    "experts of torch's operators": LayerCase(model=FEW, fused=False),
    "experts, rebuilt": LayerCase(model=FEW, policy="full"),
    "experts, rebuilt by torch's operators": LayerCase(REBUILT, model=FEW, fused=False, policy="full"),
    "wide experts": LayerCase(model=WIDE),
    "many choices": LayerCase(model=MANY),
    "many choices, selected": LayerCase(model=MANY, policy="selective"),
    "shared experts": LayerCase(SHARED, model=WITH_SHARED),
    "shared experts, selected": LayerCase(SHARED, model=WITH_SHARED, policy="selective", fused=False),
}
KINDS: dict[str, LayerCase] = {
    f"{norm} {activation} {precision}{' qk-norm' * qk_norm}{' fused' * fused}": LayerCase(
        EXACT, {"norm": norm, "activation": activation, "qk_norm": qk_norm}, precision, fused
    )
    for norm, activation, precision, qk_norm, fused in itertools.product(
        ("rmsnorm", "layernorm"), ("swiglu", "gelu", "relu"), ("bf16", "fp32"), (False, True), (False, True)
    )
}
OFTEN = ("fused", "gpt-oss", "of torch's operators", "rebuilt", "wide experts")


@pytest.mark.parametrize("case", named(NAMED | KINDS, OFTEN))
def test_a_backward_pass_holds_what_the_equations_say(case: LayerCase) -> None:
    least, most = case.ratios
    assert least <= planned_bytes(case) / executed_bytes(case) <= most


@pytest.mark.parametrize("name", often(("fused", "of torch's operators", "plain network", "wide experts"), ("fused",)))
def test_a_forward_pass_alone_holds_less_than_all_tensors_of_a_layer(name: str) -> None:
    """The moment of an evaluation is a bound from above, of at most 1.5 times what exists."""
    case = NAMED[name]
    work, layouts, stack = (
        forward_only(work_of(case)),
        Layouts(micro_batch=SEQUENCES, compiled=0),
        memory_stack("partool"),
    )
    key = int(case.config.moe is not None), 0
    load = RankLoad((1 - key[0], key[0]), 1, 1, 1, {key: 1})
    passes = pass_bytes(work, layouts, stack, load, bytes_of_layers(work, layouts, stack, [load]))
    (layer, _) = forward_moments(states(work, layouts, stack, load), passes)
    ratio = float(np.asarray(layer.activations - passes.tables)) / executed_bytes(case, saves=False)
    assert 1.0 <= ratio <= 1.5


class LossCase(NamedTuple):
    """How the loss is computed."""

    precision: Precision = "bf16"
    tile: int = 0
    fused: bool = False
    schedule: str = ""
    """Schedule of a pipeline; empty without a pipeline."""
    tokens: int = 1024
    vocab: int = 8192


LOSSES: dict[str, LossCase] = {
    "of torch's operators": LossCase(),
    "early": LossCase(fused=True),
    "early, in tiles": LossCase(fused=True, tile=TILE),
    "deferred": LossCase(fused=True, schedule="gpipe"),
    "in chunks": LossCase(tokens=4096, vocab=32768),
    "deferred, in chunks": LossCase(fused=True, schedule="gpipe", tokens=4096, vocab=32768),
    "in tiles": LossCase(tile=512),
    "in small tiles": LossCase(tile=128, fused=True, schedule="gpipe"),
    "wide, in small tiles": LossCase("fp32", tile=200),
    "deferred, in tiles": LossCase(tile=512, fused=True, schedule="gpipe"),
    "wide, in tiles": LossCase("fp32", tile=512),
    "wide": LossCase("fp32"),
    "wide, early": LossCase("fp32", fused=True),
    "wide, in chunks": LossCase("fp32", tokens=4096, vocab=32768),
}


@pytest.mark.parametrize(
    "case", named(LOSSES, ("of torch's operators", "early", "early, in tiles", "deferred", "in small tiles"))
)
def test_a_loss_holds_what_the_equations_say(case: LossCase) -> None:
    """At most in the forward pass, after it, at most in the backward pass, and after that the head's gradient."""
    dtype, kernels = COMPUTE_DTYPE[case.precision], LossKernels("auto", not case.schedule, case.vocab)
    with FakeTensorMode():
        hidden_BSH = torch.empty(1, case.tokens, SIZES["hidden"], dtype=dtype, requires_grad=True)
        weight_VH = torch.empty(case.vocab, SIZES["hidden"], dtype=dtype, requires_grad=True)
        labels_BS = torch.zeros(1, case.tokens, dtype=torch.int64)
        with Alive() as alive:
            total = loss(hidden_BSH, weight_VH, labels_BS, tile=case.tile, kernels=kernels if case.fused else None)
            forward_bytes = alive.peak_bytes
            kept_bytes = alive.live_bytes
            alive.restart()
            total.backward()
            backward_bytes = alive.peak_bytes
        end_bytes = alive.live_bytes - hidden_BSH.untyped_storage().nbytes()
    stack = own_stack("cuda", "none", ("loss",) if case.fused else ())
    config = ModelConfig(**(SIZES | {"vocab": case.vocab}))
    work = TrainingWork(config, GPU, case.tokens, case.precision, stack, global_batch=1)
    pipeline = {"pp": 2, "accumulation": 4, "schedule": SCHEDULES.index(case.schedule)} if case.schedule else {}
    layouts = Layouts(micro_batch=1, loss_tile_tokens=case.tile, **pipeline)
    planned = loss_bytes(work, layouts, memory_stack("partool"), 1.0)
    if case.schedule or not case.fused:
        assert float(planned.per_micro_batch) == pytest.approx(kept_bytes, rel=1e-3, abs=64)
    assert float(planned.forward - planned.within) == pytest.approx(forward_bytes, rel=1e-3)
    assert float(planned.backward) == pytest.approx(backward_bytes, rel=1e-3)
    assert float(planned.beside_layers) == pytest.approx(end_bytes, rel=1e-3)
