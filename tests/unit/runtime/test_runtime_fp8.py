"""``precision: fp8`` in the runtime: the layers that multiply in 8 bits, and no change elsewhere."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from _adapters import FACTOR, Scaled
from _telemetry import small_plan
from layouts import laid
from torch import nn

from partool.plan.types import Plan
from partool.spec.model import ModelConfig
from partool.spec.parallel import Recompute
from partool_kernels import fp8_linear as linear
from partool_kernels.fp8_linear import product
from partool_runtime import deferral, fp8
from partool_runtime.errors import ConfigurationError
from partool_runtime.fp8 import Fp8Linear, narrow_type, use_fp8
from partool_runtime.model import Decoder
from partool_runtime.parallel import apply as parallel
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.tiling import tile_networks

CPU = torch.device("cpu")
MODEL = ModelConfig(
    layers=3, hidden=48, ffn_hidden=80, heads=3, kv_heads=1, head_dim=16, vocab=37, qkv_bias=True, ffn_bias=True
)
ODD = MODEL.model_copy(update={"ffn_hidden": 84})


def plan_of(model: ModelConfig, precision: str = "fp8", **layout: Any) -> Plan:
    plan = small_plan(model=model)
    training = plan.training.model_copy(update={"precision": precision})
    return plan.model_copy(update={"training": training, "layout": laid(plan.layout, **layout)})


def make(model: ModelConfig = MODEL, precision: str = "fp8", **layout: Any) -> Decoder:
    """Return a decoder in bf16 whose every parameter is random."""
    made, generator = Decoder(model).bfloat16(), torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    use_fp8(made.layers, plan_of(model, precision, **layout), CPU)
    return made


def run(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the loss of a batch and all gradients."""
    tokens_BS, labels_BS = torch.randint(MODEL.vocab, (2, 2, 11), generator=torch.Generator().manual_seed(3))
    loss: torch.Tensor = model(tokens_BS, labels_BS)
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_same(one: Decoder, other: Decoder) -> None:
    (loss, gradients), (wanted, expected) = run(one), run(other)
    assert torch.equal(loss, wanted)
    assert len(gradients) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def narrow_layers(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Fp8Linear) and module.fits}


def test_linear_layers_of_blocks_and_nothing_else() -> None:
    model = make()
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert narrow_layers(model) == {name for name in linears if name.startswith("layers.")}
    assert len(narrow_layers(model)) == 3 * 7
    assert not narrow_layers(make(precision="bf16"))
    assert {name.rpartition(".")[2] for name in narrow_layers(make(ODD))} == {"q", "k", "v", "o"}


def test_gradients_are_near_those_of_bf16_and_not_the_same() -> None:
    (loss, narrow), (wide_loss, wide) = run(make()), run(make(precision="bf16"))
    assert float(loss) == pytest.approx(float(wide_loss), rel=1e-2)
    for one, other in zip(narrow, wide, strict=True):
        error = float((one - other).float().norm() / other.float().norm())
        assert 0 < error < 0.35


class _Experts(nn.Module):
    """Stand-in for a layer of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 16), nn.ModuleList([nn.Linear(32, 32)])


def test_routers_stay_wide() -> None:
    block = nn.ModuleDict({"mlp": _Experts(), "gate": nn.Linear(32, 32)})
    use_fp8([block], plan_of(MODEL), CPU)
    assert narrow_layers(block) == {"mlp.experts.0", "gate"}


def test_what_has_a_forward_pass_of_its_own_keeps_it() -> None:
    block = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
    own = block[0].forward
    block[0].forward = own
    use_fp8([block], plan_of(MODEL), CPU)
    assert narrow_layers(block) == {"1"}


def test_layers_without_linear_ones_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"PT658: LayerNorm has no torch\.nn\.Linear"):
        use_fp8([nn.LayerNorm(32)], plan_of(MODEL), CPU)


@pytest.mark.parametrize("policy", get_args(Recompute))
def test_recomputation_changes_no_bit(policy: Recompute) -> None:
    model = make()
    recompute(model.layers, [policy] * MODEL.layers)
    assert_same(model, make())


@pytest.mark.parametrize(("policy", "extra"), [("none", 0), ("selective", 0), ("full", 1)])
def test_selective_recomputation_multiplies_nothing_again(
    policy: Recompute, extra: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(1)
        return product(*arguments)

    monkeypatch.setattr(linear, "product", counted)
    model = make()
    recompute(model.layers, [policy] * MODEL.layers)
    run(model)
    assert len(calls) == (3 + extra) * 7 * MODEL.layers


@pytest.mark.parametrize("leaves", [(), ("layers.*.ffn",)])
def test_inputs_are_made_narrow_once_for_all_that_read_them(leaves: tuple[str, ...]) -> None:
    model = make(leaves=leaves)
    widths: list[int] = []
    for module in model.modules():
        if isinstance(module, Fp8Linear):
            module.register_forward_hook(lambda *_: widths.append(1))
    run(model)
    # Layers that share an input are called together, unless each one gathers its own parameters.
    assert len(widths) == (7 if leaves else 2) * MODEL.layers


def test_a_wrapped_projection_computes_its_own_product() -> None:
    attention = make(MODEL.model_copy(update={"qkv_bias": False})).layers[0].attention
    x_BSH = torch.randn(2, 5, 48).bfloat16()
    q, k, v = attention.q, attention.k, attention.v
    plain, wrapped = attention.inputs(x_BSH, (q, k, v)), attention.inputs(x_BSH, (q, Scaled(k), v))
    assert torch.equal(wrapped[1], FACTOR * plain[1])
    assert torch.equal(wrapped[0], plain[0])
    assert torch.equal(wrapped[2], plain[2])


def test_put_off_gradients_are_the_same() -> None:
    model, sink = make().float(), list[deferral.Work]()
    with deferral.splitting(), deferral.collecting(sink):
        loss, _ = run(model)
    assert all(model.get_submodule(name).weight.grad is None for name in narrow_layers(model))
    for work in sink:
        work()
    wanted, expected = run(make().float())
    assert torch.equal(loss, wanted)
    for (name, parameter), other in zip(model.named_parameters(), expected, strict=True):
        assert parameter.grad is not None
        # Gradients of an input shared by several layers are added in another order.
        assert float((parameter.grad - other).norm()) <= 5e-3 * float(other.norm()), name


def test_tiles_change_little() -> None:
    model = make()
    tile_networks(model.layers, 4)
    (loss, gradients), (wanted, expected) = run(model), run(make())
    assert torch.equal(loss, wanted)  # scales are per row, so tiles do not change them
    for one, other in zip(gradients, expected, strict=True):
        # Sums over tokens are split into other blocks.
        assert float((one - other).float().norm()) <= 0.1 * float(other.float().norm())


# torch reads .grad in a check and tries to silence the warning, which fails if warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_equal_layers_share_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile
    monkeypatch.setattr(parallel.torch, "compile", lambda block: compiled(block, backend=backend, fullgraph=True))
    model = make()
    parallel.compile_blocks(model.layers)
    assert_same(model, make())
    assert len(graphs) == 1


def test_types_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, found = torch.device("cuda", 0), {"name": ""}
    assert narrow_type(CPU, "auto") == torch.float8_e4m3fn
    assert narrow_type(cuda, "torch") == torch.float8_e4m3fn
    monkeypatch.setattr(fp8, "architecture", lambda device: found["name"] or None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    for name, dtype in (("sm_90", torch.float8_e4m3fn), ("gfx942", torch.float8_e4m3fnuz)):
        found["name"] = name
        assert narrow_type(cuda, "auto") == dtype
    for name in ("sm_80", ""):
        found["name"] = name
        with pytest.raises(ConfigurationError, match="PT658: there are no products in 8 bits for NVIDIA L40S"):
            narrow_type(cuda, "auto")


def test_layers_of_transformers() -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = MixtralConfig(**sizes, num_hidden_layers=1, head_dim=16, vocab_size=37, num_local_experts=16)
    model = MixtralForCausalLM(config).bfloat16()
    use_fp8(model.model.layers, plan_of(MODEL), CPU)
    # Experts are stacked, and their router's choice depends on small differences.
    assert {name.rpartition(".")[2] for name in narrow_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    tokens_BS = torch.randint(37, (2, 11))
    model(input_ids=tokens_BS, labels=tokens_BS).loss.backward()
    assert all(model.get_submodule(name).weight.grad.isfinite().all() for name in narrow_layers(model))
