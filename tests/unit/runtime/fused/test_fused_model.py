"""Models with fused parts against the same models without, in float64: recomputation policies, tiles, compiled."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from _telemetry import small_plan
from layouts import laid
from often import often
from torch import nn
from torch.func import functional_call

from partool.plan.types import Plan
from partool.planner.kernels.requests import early_loss
from partool.spec.model import Mla, ModelConfig
from partool.spec.parallel import Recompute
from partool.spec.training import Fused
from partool_kernels import direct
from partool_runtime.fused import fuse
from partool_runtime.model import Decoder
from partool_runtime.model.loss import LossKernels
from partool_runtime.parallel import apply as parallel
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_networks
from partool_runtime.parallel.weipipe.parts import RingDecoder

BASE: dict[str, Any] = {
    "layers": 3, "hidden": 21, "ffn_hidden": 35, "heads": 6, "kv_heads": 2, "head_dim": 4, "vocab": 37
}  # fmt: skip
MODELS = {
    "llama": ModelConfig(**BASE),
    "qwen": ModelConfig(**BASE, qkv_bias=True, qk_norm=True, tied_embeddings=True),
    "gemma": ModelConfig(**BASE, activation="geglu"),
    "gpt": ModelConfig(
        **BASE, norm="layernorm", position="learned", max_position=16, activation="gelu_tanh", ffn_bias=True
    ),
    "latent": ModelConfig(
        **BASE | {"kv_heads": 6, "head_dim": 5},
        mla=Mla(q_rank=8, kv_rank=7, nope_head_dim=3, rope_head_dim=2, v_head_dim=4),
    ),
}
PARTS: dict[Fused, tuple[str, ...]] = {
    "norm": ("llama", "qwen", "gpt", "latent"),
    "glu": ("llama", "gemma"),
    "loss": ("llama", "qwen", "gpt"),
    "rope": ("llama", "qwen"),
}
"""Every fusible part, and the models that it is tested in."""
CASES = [(part, name) for part, names in PARTS.items() for name in names]
POLICIES: tuple[Recompute, ...] = get_args(Recompute)


def plan_of(name: str, parts: tuple[str, ...]) -> Plan:
    plain = small_plan(model=MODELS[name])
    return plain.model_copy(update={"layout": laid(plain.layout, fused=parts)})


def make(name: str) -> Decoder:
    """Return a float64 decoder in which every parameter is random."""
    model, generator = Decoder(MODELS[name]).double(), torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def run(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss of a batch and all gradients."""
    generator = torch.Generator().manual_seed(3)
    tokens_BS, labels_BS = torch.randint(BASE["vocab"], (2, 2, 11), generator=generator)
    labels_BS[0, :3] = -100
    model.zero_grad()
    loss: torch.Tensor = model(tokens_BS, labels_BS)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def same(ours: nn.Module, theirs: nn.Module) -> None:
    (loss, gradients), (expected, others) = run(ours), run(theirs)
    for one, other in zip((loss, *gradients), (expected, *others), strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * max(1.0, float(other.abs().max()))


def calls(model: nn.Module) -> set[str]:
    """Return partool's operators that a pass of a model calls."""
    with torch.profiler.profile() as seen:
        run(model)
    return {event.key for event in seen.key_averages() if event.key.startswith("partool::")}


@pytest.mark.parametrize(("part", "name"), CASES)
def test_a_fused_model_computes_the_same(part: Fused, name: str) -> None:
    """With every policy: wrong gradients would show if a policy mixed up the tensors it keeps."""
    theirs = make(name)
    for policy in POLICIES:
        ours = make(name)
        fuse(ours, plan_of(name, (part,)))
        recompute(ours.layers, [policy] * 3)
        same(ours, theirs)


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_keep_the_same_past_the_dispatcher(policy: Recompute, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers keep the same tensors in the same order as through the dispatcher, and compute the same bits."""
    found = []
    for _ in range(2):
        model, kept = make("qwen"), []
        fuse(model, plan_of("qwen", ("norm", "glu", "rope")))
        recompute(model.layers, [policy] * 3)
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x.detach()) or x, lambda x: x):
            loss, gradients = run(model)
        found.append((loss, *gradients, *kept))
        monkeypatch.setattr(direct, "plain", lambda *_: False)
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_all_parts_together_and_on_tiles(name: str) -> None:
    parts = tuple(part for part, names in PARTS.items() if name in names)
    for tokens in (0, 4):
        ours, theirs = make(name), make(name)
        fuse(ours, plan_of(name, parts))
        for model in (ours, theirs):
            tile_networks(model.layers, tokens)
        recompute(ours.layers, ["selective"] * 3, tiled=tokens > 0)
        same(ours, theirs)


# torch means to silence this warning, but where warnings are errors its own check fails.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(
    ("part", "name"), often(CASES, [("norm", "qwen"), ("glu", "llama"), ("loss", "llama"), ("rope", "qwen")])
)
def test_equal_layers_share_one_compilation(part: Fused, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile
    monkeypatch.setattr(parallel.torch, "compile", lambda block: compiled(block, backend=backend, fullgraph=True))
    ours = make(name)
    fuse(ours, plan_of(name, (part,)))
    parallel.compile_blocks(ours.layers)
    same(ours, make(name))
    assert len(graphs) == 1


def test_norms_and_sums_are_fused() -> None:
    model = make("qwen")
    fuse(model, plan_of("qwen", ("norm",)))
    assert calls(model) >= {"partool::norm", "partool::add_norm", "partool::add_normBackward"}
    assert calls(make("qwen")) == set()


def test_what_a_rank_puts_in_the_place_of_a_norm_stays() -> None:
    """Norms whose ``forward`` two-dimensional tensor parallelism replaced, to exchange statistics, are not fused."""
    model, seen = make("llama"), []
    for block in model.layers:
        norm = block.ffn_norm
        setattr(norm, "forward", lambda x, plain=norm.forward: seen.append(x.shape) or plain(x))  # noqa: B010
    fuse(model, plan_of("llama", ("norm",)))
    run(model)
    assert len(seen) == 3
    assert "partool::add_norm" not in calls(model)


def test_a_norm_that_is_gathered_by_itself_is_called() -> None:
    model, called = make("llama"), []
    plan = plan_of("llama", ("norm",))
    leaves = laid(plan.layout, leaves=("layers.1.ffn_norm",))
    fuse(model, plan.model_copy(update={"layout": leaves}))
    for block in model.layers:
        block.ffn_norm.register_forward_pre_hook(lambda *_: called.append(1))
    run(model)
    assert len(called) == 1


def test_parameters_of_another_type_are_left_to_torch() -> None:
    """float32 parameters with a float64 hidden state: torch's type promotion decides the result's type."""
    model, theirs = make("llama"), make("llama")
    for one in (model, theirs):
        for block in one.layers:
            block.ffn_norm.float()
    fuse(model, plan_of("llama", ("norm",)))
    same(model, theirs)


def test_layers_that_a_rank_of_a_ring_holds_no_weights_of_are_fused_too() -> None:
    config, theirs = MODELS["llama"], make("llama")
    with torch.device("meta"):
        model = RingDecoder(config, [(0, 2), (2, 3)], [0])
    for stage in model.stages:
        fuse(stage, plan_of("llama", ("norm",)))
    weights = {f"blocks.0.{name}": p.detach() for name, p in theirs.layers[2].named_parameters()}
    x_BSH = torch.randn(2, 5, config.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    x_BSH.requires_grad_()
    plain = theirs.layers[2](x_BSH, theirs.contexts(x_BSH))
    with torch.profiler.profile() as seen:
        out = functional_call(model.stages[1], weights, (x_BSH,))
    assert torch.allclose(out, plain, rtol=1e-13, atol=1e-13)
    assert any(event.key == "partool::add_norm" for event in seen.key_averages())


def test_rotation_takes_norms_of_heads_with_it() -> None:
    """In any order of the listed parts; norms that are FSDP units of their own are still called as modules."""
    model, called = make("qwen"), []
    plan = plan_of("qwen", ("norm", "rope"))
    leaves = laid(plan.layout, leaves=("layers.1.attention.k_norm",))
    fuse(model, plan.model_copy(update={"layout": leaves}))
    for block in model.layers:
        for norm in (block.attention.q_norm, block.attention.k_norm):
            norm.register_forward_pre_hook(lambda *_: called.append(1))
    assert calls(model) >= {"partool::rope_norm", "partool::rope_normBackward", "partool::rope"}
    assert len(called) == 2  # both norms of the second layer
    same(model, make("qwen"))


def test_parts_that_a_model_lacks_change_nothing() -> None:
    model = make("gpt")
    fuse(model, plan_of("gpt", ("glu", "rope")))
    assert calls(model) == set()


@pytest.mark.parametrize(
    ("schedule", "chunks", "early"),
    [("1f1b", 1, True), ("interleaved", 2, True), ("weipipe", 1, True), ("gpipe", 1, False), ("file", 1, False)],
)
def test_a_gradient_of_the_head_is_held_for_one_micro_batch_at_most(schedule: str, chunks: int, early: bool) -> None:
    """Schedules that run other passes between a loss and its backward pass compute it in the backward pass."""
    plan = plan_of("llama", ("loss",))
    mesh = plan.layout.mesh._replace(pp=2, dp_shard=1)
    stages = ((0, 1), (1, 2), (2, 3), (3, 4))[: 2 * chunks]
    layout = laid(plan.layout, mesh=mesh, schedule=schedule, chunks=chunks, stages=stages, accumulation=4)
    model = make("llama")
    plan = plan.model_copy(update={"layout": layout})
    fuse(model, plan)
    assert early_loss(plan) is early  # the cost model counts products by the same rule
    assert model.head is not None
    assert model.head.loss.keywords["kernels"] == LossKernels("auto", early=early, vocabulary=BASE["vocab"])  # type: ignore[attr-defined]
