"""The decoder against a slow one written with loops, in float64 at odd sizes."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from partool.layout.gemms import gemms
from partool.layout.parameters import parameters
from partool.spec.model import Mla, ModelConfig, RopeScaling
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.model import head_loss
from partool_runtime.model import Decoder, loss
from partool_runtime.model.attention import AttentionLayout, Tokens, attend, visible
from partool_runtime.model.norm import RMSNorm
from partool_runtime.model.rope import frequencies, rotate, tables

BASE = {"layers": 2, "hidden": 21, "ffn_hidden": 35, "heads": 6, "kv_heads": 2, "head_dim": 4, "vocab": 37}
LATENT = BASE | {"heads": 3, "kv_heads": 3, "head_dim": 7}
CONFIGS = {
    "plain": ModelConfig(**BASE),
    "qwen-like": ModelConfig(
        **BASE,
        qkv_bias=True,
        qk_norm=True,
        tied_embeddings=True,
        window=3,
        layer_types=("sliding", "full"),
        rope_theta=500.0,
        rope_scaling=RopeScaling(factor=4.0, original_max_position=8),
    ),
    "gpt-like": ModelConfig(
        **BASE | {"kv_heads": 6},
        norm="layernorm",
        position="learned",
        activation="gelu_tanh",
        max_position=16,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
    ),
    "geglu": ModelConfig(**BASE | {"kv_heads": 1}, activation="geglu", ffn_bias=True, out_bias=True),
    "gelu": ModelConfig(**BASE, activation="gelu", position="none"),
    "relu": ModelConfig(**BASE, activation="relu", window=20, layer_types=("sliding", "sliding")),
    "grid": ModelConfig(**BASE | {"layers": 3}, grid=(5, 3), layer_types=("row", "column", "full")),
    "sinks": ModelConfig(
        **BASE | {"layers": 3},
        activation="swiglu_clamped",
        swiglu_limit=0.7,
        swiglu_alpha=1.4,
        ffn_bias=True,
        sinks=True,
        window=3,
        grid=(5, 3),
        layer_types=("sliding", "row", "full"),
        rope_theta=50.0,
        rope_scaling=RopeScaling(
            kind="yarn",
            factor=4.0,
            beta_fast=2,
            original_max_position=32,
            truncate=False,
            mscale=0.5,
            mscale_all_dim=0.8,
        ),
    ),
    "latent": ModelConfig(
        **LATENT,
        qkv_bias=True,
        out_bias=True,
        rope_theta=500.0,
        rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_max_position=8, mscale=0.5, mscale_all_dim=0.8),
        mla=Mla(q_rank=8, kv_rank=7, nope_head_dim=3, rope_head_dim=4, v_head_dim=5),
    ),
    "latent-lite": ModelConfig(
        **LATENT | {"layers": 3},
        window=3,
        grid=(5, 3),
        layer_types=("sliding", "row", "full"),
        mla=Mla(kv_rank=7, nope_head_dim=3, rope_head_dim=4, v_head_dim=9),
    ),
    "latent-learned": ModelConfig(
        **LATENT,
        position="learned",
        max_position=16,
        mla=Mla(kv_rank=7, nope_head_dim=3, rope_head_dim=4, v_head_dim=7),
    ),
}


def make(config: ModelConfig) -> Decoder:
    """Return a float64 decoder whose every parameter is random."""
    model = Decoder(config).double()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


def batch(config: ModelConfig, size: int = 2, length: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    length = math.prod(config.grid) if config.grid else length
    generator = torch.Generator().manual_seed(3)
    tokens_BS = torch.randint(config.vocab, (size, length), generator=generator)
    labels_BS = torch.randint(config.vocab, (size, length), generator=generator)
    labels_BS[0, :3] = -100
    return tokens_BS, labels_BS


# --- the reference: one sequence, one position, one head at a time ---


def ref_norm(p: dict[str, torch.Tensor], name: str, x: torch.Tensor, config: ModelConfig, kind: str) -> torch.Tensor:
    if kind == "latent":
        return x / math.sqrt(float((x * x).mean()) + 1e-6) * p[f"{name}.weight"]
    if kind == "rmsnorm":
        return x / math.sqrt(float((x * x).mean()) + config.norm_eps) * p[f"{name}.weight"]
    centred = x - x.mean()
    scale = math.sqrt(float((centred * centred).mean()) + config.norm_eps)
    return centred / scale * p[f"{name}.weight"] + p[f"{name}.bias"]


def ref_linear(p: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    y = p[f"{name}.weight"] @ x
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def ref_frequency(pair: int, config: ModelConfig) -> float:
    width = config.mla.rope_head_dim if config.mla else config.head_dim
    plain = config.rope_theta ** (-2 * pair / width)
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "yarn" and not scaling.truncate:
        # Pairs turn more than twice, and less than once, within 32 positions before and after these fractions of pairs.
        low, high = (math.log(32 / (turns * 2 * math.pi)) / math.log(config.rope_theta) * 2 for turns in (2, 1))
        divided = min(max((pair - low) / (high - low), 0), 1)
        return plain / scaling.factor * divided + plain * (1 - divided)
    if scaling.kind == "yarn":
        # Both pairs are between the first that turns less than 32 times within 8 positions and the last that turns
        # less than once: a ramp from 0 to 1 over ceil(log(8 / 2π) · 2 / log θ) = 1 pair.
        return plain / scaling.factor if pair else plain
    wavelength = 2 * math.pi / plain
    if wavelength > scaling.original_max_position / scaling.low_freq_factor:
        return plain / scaling.factor
    if wavelength < scaling.original_max_position / scaling.high_freq_factor:
        return plain
    smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def ref_rotate(x: torch.Tensor, position: int, config: ModelConfig) -> torch.Tensor:
    out, half = x.clone(), len(x) // 2
    for pair in range(half):
        angle = position * ref_frequency(pair, config)
        a, b = float(x[pair]), float(x[pair + half])
        out[pair] = a * math.cos(angle) - b * math.sin(angle)
        out[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    if config.rope_scaling and config.rope_scaling.kind == "yarn":
        out *= (0.05 * math.log(4.0) + 1.0) / (0.08 * math.log(4.0) + 1.0)
    return out


def ref_latent_heads(p: dict[str, torch.Tensor], name: str, x: torch.Tensor, position: int, config: ModelConfig):
    """Return queries, keys and values of one token, each a list of heads."""
    mla = config.mla
    turn = partial(ref_rotate, position=position, config=config) if config.position == "rope" else lambda part: part
    if mla.q_rank is None:
        queries = ref_linear(p, f"{name}.q", x)
    else:
        latent = ref_norm(p, f"{name}.q_a_norm", ref_linear(p, f"{name}.q_a", x), config, "latent")
        queries = ref_linear(p, f"{name}.q_b", latent)
    latent, shared = ref_linear(p, f"{name}.kv_a", x).split([mla.kv_rank, mla.rope_head_dim])
    expanded = ref_linear(p, f"{name}.kv_b", ref_norm(p, f"{name}.kv_a_norm", latent, config, "latent"))
    q, k, v = [], [], []
    for head in range(config.heads):
        plain, rotated = queries.reshape(config.heads, -1)[head].split([mla.nope_head_dim, mla.rope_head_dim])
        q.append(torch.cat([plain, turn(rotated)]))
        plain, value = expanded.reshape(config.heads, -1)[head].split([mla.nope_head_dim, mla.v_head_dim])
        k.append(torch.cat([plain, turn(shared)]))
        v.append(value)
    return q, k, v


def ref_attention(p: dict[str, torch.Tensor], layer: int, xs: list[torch.Tensor], config: ModelConfig):
    name, d = f"layers.{layer}.attention", config.head_dim

    def heads(which: str, x: torch.Tensor, position: int) -> list[torch.Tensor]:
        parts = list(ref_linear(p, f"{name}.{which}", x).split(d))
        if which != "v" and config.qk_norm:
            parts = [ref_norm(p, f"{name}.{which}_norm", part, config, "rmsnorm") for part in parts]
        if which != "v" and config.position == "rope":
            parts = [ref_rotate(part, position, config) for part in parts]
        return parts

    if config.mla:
        q, k, v = zip(*(ref_latent_heads(p, name, x, i, config) for i, x in enumerate(xs)), strict=True)
    else:
        q, k, v = ([heads(which, x, i) for i, x in enumerate(xs)] for which in "qkv")
    scale = 1 / math.sqrt(d)
    if config.mla and config.rope_scaling:
        scale *= (0.08 * math.log(4.0) + 1.0) ** 2
    out = []
    for i in range(len(xs)):
        seen = [j for j in range(i + 1) if ref_sees(i, j, config.attention_kind(layer), config)]
        mixed = []
        for head in range(config.heads):
            shared = head // (config.heads // config.kv_heads)
            scores = torch.stack([q[i][head] @ k[j][shared] * scale for j in seen])
            sink = p[f"{name}.sinks"][head].exp() if config.sinks else 0.0
            weights = scores.exp() / (scores.exp().sum() + sink)
            mixed.append(sum(w * v[j][shared] for w, j in zip(weights, seen, strict=True)))
        out.append(ref_linear(p, f"{name}.o", torch.cat(mixed)))
    return out


def ref_sees(i: int, j: int, kind: str, config: ModelConfig) -> bool:
    if kind == "sliding":
        return i - j < config.window
    columns = config.grid[1] if config.grid else 1
    same_row, same_column = i // columns == j // columns, i % columns == j % columns
    return same_row if kind == "row" else same_column if kind == "column" else True


def ref_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "swiglu":
        return x / (1 + (-x).exp())
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x.clamp(min=0) if kind == "relu" else 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def ref_ffn(p: dict[str, torch.Tensor], layer: int, x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    name = f"layers.{layer}.ffn"
    up = ref_linear(p, f"{name}.up", x)
    if config.activation == "swiglu_clamped":
        gate = ref_linear(p, f"{name}.gate", x).clamp(max=config.swiglu_limit)
        inner = (up.clamp(-config.swiglu_limit, config.swiglu_limit) + 1) * gate
        inner = inner / (1 + (-config.swiglu_alpha * gate).exp())
    elif config.activation in ("swiglu", "geglu"):
        inner = ref_activation(ref_linear(p, f"{name}.gate", x), config.activation) * up
    else:
        inner = ref_activation(up, config.activation)
    return ref_linear(p, f"{name}.down", inner)


def ref_logits(p: dict[str, torch.Tensor], tokens: list[int], config: ModelConfig) -> torch.Tensor:
    xs = [p["embed.weight"][token] for token in tokens]
    if config.position == "learned":
        xs = [x + p["position.weight"][i] for i, x in enumerate(xs)]
    for layer in range(config.layers):
        normed = [ref_norm(p, f"layers.{layer}.attention_norm", x, config, config.norm) for x in xs]
        xs = [x + y for x, y in zip(xs, ref_attention(p, layer, normed, config), strict=True)]
        xs = [
            x + ref_ffn(p, layer, ref_norm(p, f"layers.{layer}.ffn_norm", x, config, config.norm), config) for x in xs
        ]
    head = p["embed.weight"] if config.tied_embeddings else p["head.weight"]
    return torch.stack([head @ ref_norm(p, "final_norm", x, config, config.norm) for x in xs])


@pytest.mark.parametrize("case", CONFIGS)
def test_decoder_is_the_reference(case):
    config = CONFIGS[case]
    model = make(config)
    tokens_BS, labels_BS = batch(config)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    expected = torch.stack([ref_logits(values, row.tolist(), config) for row in tokens_BS])
    logits = model.logits(tokens_BS)
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    total = model(tokens_BS, labels_BS)
    picked = -expected.log_softmax(-1)[labels_BS != -100]
    wanted = picked.gather(1, labels_BS[labels_BS != -100][:, None]).sum()
    torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
    assert total.dtype == torch.float64
    total.backward()
    for name, parameter in model.named_parameters():
        # Without position encoding, a shift of all keys by the same vector changes no softmax.
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0 or name.endswith("k.bias"), name


def test_parameter_names_and_shapes():
    config = CONFIGS["qwen-like"].model_copy(update={"tied_embeddings": False, "layers": 1, "out_bias": True})
    expected = {
        "embed.weight": (37, 21),
        "layers.0.attention_norm.weight": (21,),
        "layers.0.attention.q.weight": (24, 21),
        "layers.0.attention.q.bias": (24,),
        "layers.0.attention.k.weight": (8, 21),
        "layers.0.attention.k.bias": (8,),
        "layers.0.attention.v.weight": (8, 21),
        "layers.0.attention.v.bias": (8,),
        "layers.0.attention.o.weight": (21, 24),
        "layers.0.attention.o.bias": (21,),
        "layers.0.attention.q_norm.weight": (4,),
        "layers.0.attention.k_norm.weight": (4,),
        "layers.0.ffn_norm.weight": (21,),
        "layers.0.ffn.gate.weight": (35, 21),
        "layers.0.ffn.up.weight": (35, 21),
        "layers.0.ffn.down.weight": (21, 35),
        "final_norm.weight": (21,),
        "head.weight": (37, 21),
    }
    model = Decoder(config)
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == expected
    assert set(model.state_dict()) == set(expected)
    gpt = dict(Decoder(CONFIGS["gpt-like"]).named_parameters())
    assert gpt["position.weight"].shape == (16, 21)
    assert {"final_norm.bias", "layers.1.ffn.up.bias", "layers.1.ffn_norm.bias"} <= set(gpt)
    assert not any("gate" in name for name in gpt)


@pytest.mark.parametrize("case", CONFIGS)
def test_parameters_are_those_the_planner_counts(case):
    model = Decoder(CONFIGS[case])
    listed = [(info.name, info.shape) for info in parameters(CONFIGS[case])]
    assert [(name, tuple(parameter.shape)) for name, parameter in model.named_parameters()] == listed


@pytest.mark.parametrize("case", ["plain", "qwen-like", "gpt-like"])
def test_groups_hold_every_parameter_once(case):
    model = Decoder(CONFIGS[case])
    groups = model.groups()
    held = [parameter for group in groups for module in group for parameter in module.parameters()]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    assert model.final_norm in groups[-1]
    assert (model.embed in groups[-1]) == CONFIGS[case].tied_embeddings
    assert sum(group == [layer] for group in groups for layer in model.layers) == 2


# --- the loss ---


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 7, 8])
def test_chunked_loss_is_cross_entropy(rows, biased):
    generator = torch.Generator().manual_seed(2)
    hidden_BSH = torch.randn(3, 7, 5, dtype=torch.float64, generator=generator).requires_grad_()
    head_VH = torch.randn(13, 5, dtype=torch.float64, generator=generator).requires_grad_()
    bias_V = torch.randn(13, dtype=torch.float64, generator=generator).requires_grad_() if biased else None
    inputs = (hidden_BSH, head_VH, *([bias_V] if biased else []))
    labels_BS = torch.randint(13, (3, 7), generator=generator)
    labels_BS[1, 2:6] = -100
    logits_TV = F.linear(hidden_BSH, head_VH, bias_V).flatten(0, 1)
    whole = F.cross_entropy(logits_TV, labels_BS.flatten(), reduction="sum")
    wanted = torch.autograd.grad(whole * 3.0, inputs)
    for chunk_logits in (rows * 13, 10**6):
        total = loss(hidden_BSH, head_VH, labels_BS, chunk_logits, bias_V=bias_V)
        torch.testing.assert_close(total, whole, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(torch.autograd.grad(total * 3.0, inputs), wanted, rtol=1e-12, atol=1e-13)

    def of(hidden_BSH, head_VH, bias_V=None):
        return loss(hidden_BSH, head_VH, labels_BS, rows * 13, bias_V=bias_V)

    assert torch.autograd.gradcheck(of, inputs)


@pytest.mark.parametrize("frozen", ["weight", "bias", ""])
@pytest.mark.parametrize("chunk_logits", [4 * 13, 10**6])
def test_a_biased_head_is_not_copied_and_can_be_frozen_in_part(monkeypatch, chunk_logits, frozen):
    monkeypatch.setattr("partool_runtime.hf.model.loss", partial(loss, chunk_logits=chunk_logits))
    head = torch.nn.Linear(5, 13, dtype=torch.float64)
    for name, parameter in head.named_parameters():
        parameter.requires_grad_(name != frozen)
    hidden_BSH = torch.randn(3, 7, 5, dtype=torch.float64, requires_grad=True)
    labels_BS = torch.randint(13, (3, 7))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        total = head_loss(hidden_BSH, head, labels_BS)
    weights = [tensor for tensor in kept if sorted(tensor.shape) in ([5, 13], [6, 13])]
    assert all(tensor.untyped_storage().data_ptr() == head.weight.data_ptr() for tensor in weights)
    assert weights
    total.backward()
    whole = F.cross_entropy(head(hidden_BSH).flatten(0, 1), labels_BS.flatten(), reduction="sum")
    trained = {name: parameter for name, parameter in head.named_parameters() if name != frozen}
    for name, wanted in zip(trained, torch.autograd.grad(whole, list(trained.values())), strict=True):
        torch.testing.assert_close(trained[name].grad, wanted, rtol=1e-12, atol=1e-13)
    assert all(parameter.grad is None for name, parameter in head.named_parameters() if name == frozen)


def test_chunked_loss_with_frozen_parts_and_nothing_labelled():
    hidden_BSH, head_VH = torch.randn(2, 5, 4), torch.randn(9, 4, requires_grad=True)
    labels_BS = torch.full((2, 5), -100)
    total = loss(hidden_BSH, head_VH, labels_BS, 18)
    total.backward()
    assert total == 0.0
    assert torch.equal(head_VH.grad, torch.zeros(9, 4))
    with torch.no_grad():
        assert loss(hidden_BSH, head_VH, labels_BS + 101, 18) > 0
    hidden_BSH.requires_grad_()
    (grad,) = torch.autograd.grad(loss(hidden_BSH, head_VH.detach(), labels_BS + 101, 18), hidden_BSH)
    assert grad.shape == hidden_BSH.shape


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_loss_in_narrow_types(dtype):
    """The sum is float32, and a scaled loss keeps gradients that would underflow in unscaled float16."""
    hidden_TH, head_VH = torch.randn(40, 8).to(dtype).requires_grad_(), (torch.randn(3000, 8) * 0.1).to(dtype)
    labels_T = torch.randint(3000, (40,))
    head_VH.requires_grad_()
    total = loss(hidden_TH[None], head_VH, labels_T[None], 7 * 3000)
    assert total.dtype == torch.float32
    wide = F.cross_entropy(hidden_TH.double() @ head_VH.double().T, labels_T, reduction="sum")
    torch.testing.assert_close(total.double(), wide, rtol=2e-3, atol=0.0)
    wanted = torch.autograd.grad(wide, head_VH)[0].double()
    (got,) = torch.autograd.grad(total * 2.0**8, head_VH)
    error = (got.double() / 2.0**8 - wanted).abs().max() / wanted.abs().max()
    assert error < 0.02


# --- parts ---


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("axis", ["row", "column"])
def test_lines_of_a_grid_are_what_a_mask_of_all_tokens_says(axis, documents):
    """Holds also for a subset of whole lines, and with more query heads than key heads."""
    rows, columns, layout = 5, 3, AttentionLayout(None, axis)
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, heads, 15, 4, generator=generator, dtype=torch.float64) for heads in (6, 2, 2))
    ids_BL = torch.tensor([[0] * 4 + [1] * 3 + [2] * 8, [3] * 15]) if documents else None
    places = torch.arange(15)
    seen = visible(places, places, layout, documents=(ids_BL, ids_BL) if documents else None, columns=columns)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    got = attend(q, k, v, layout, Tokens(15, None, ids_BL, (rows, columns)))
    torch.testing.assert_close(got, wanted, rtol=1e-13, atol=1e-13)
    lines = torch.arange(15)[(places // columns if axis == "row" else places % columns) >= 1]
    some = attend(*(x[:, :, lines] for x in (q, k, v)), layout, Tokens(15, lines, ids_BL, (rows, columns)))
    torch.testing.assert_close(some, wanted[:, :, lines], rtol=1e-13, atol=1e-13)


def test_a_grid_takes_sequences_of_its_length_only():
    config = CONFIGS["grid"]
    with pytest.raises(ConfigurationError, match="5 × 3") as caught:
        make(config).logits(torch.zeros((1, 12), dtype=torch.int64))
    assert caught.value.code == "PT656"


def test_tokens_behind_the_window_change_nothing():
    """If all layers have windows, the hidden state depends on the last few tokens only."""
    config = CONFIGS["relu"]
    assert config.layer_types is not None
    model = make(config)
    tokens, _ = batch(config, length=40)
    reached = config.layers * (config.window - 1) + 1
    assert set(config.layer_types) == {"sliding"}, "a layer without a window sees all"
    other = tokens.clone()
    other[:, : 40 - reached] = (other[:, : 40 - reached] + 1) % config.vocab
    assert torch.equal(model.hidden(tokens)[:, -1], model.hidden(other)[:, -1])
    other[:, 40 - reached] = (other[:, 40 - reached] + 1) % config.vocab
    assert not torch.equal(model.hidden(tokens)[:, -1], model.hidden(other)[:, -1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_and_rotations_are_wide(dtype):
    x = (torch.randn(3, 64, dtype=torch.float64) * 3000).to(dtype)
    norm = RMSNorm(64, 1e-5).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
    # squares of 3000 overflow float16
    torch.testing.assert_close(norm(x), exact.to(dtype), rtol=2**-7, atol=0.0)
    config = ModelConfig(**BASE | {"head_dim": 16})
    rope = tables(config, 3000, dtype, torch.device("cpu"))
    assert rope[0].dtype == torch.float32
    heads = torch.randn(1, 2, 3000, 16, dtype=torch.float64).to(dtype)
    wide = rotate(heads.double(), tables(config, 3000, torch.float64, torch.device("cpu")))
    torch.testing.assert_close(rotate(heads, rope), wide.to(dtype), rtol=2**-7, atol=1e-4)
    model = make(CONFIGS["qwen-like"]).to(dtype)
    tokens_BS, labels_BS = batch(CONFIGS["qwen-like"])
    total = model(tokens_BS, labels_BS)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), make(CONFIGS["qwen-like"])(tokens_BS, labels_BS), rtol=0.03, atol=0.0)
    assert [table.dtype for table in next(iter(model.contexts._rope.values()))] == [torch.float32] * 2


def test_llama3_frequencies_with_equal_factors():
    scaling = RopeScaling(factor=8.0, low_freq_factor=2.0, high_freq_factor=2.0, original_max_position=64)
    config = ModelConfig(**BASE | {"head_dim": 16}, rope_scaling=scaling)
    plain = frequencies(config.model_copy(update={"rope_scaling": None}))
    ratio = (frequencies(config) / plain).tolist()
    assert sorted(set(ratio)) == [0.125, 1.0]
    assert frequencies(config).isfinite().all()


def test_tables_made_in_inference_serve_training():
    config = CONFIGS["qwen-like"]
    model = make(config)
    tokens_BS, labels_BS = batch(config)
    with torch.inference_mode():
        quiet = model(tokens_BS, labels_BS)
    total = model(tokens_BS, labels_BS)
    total.backward()
    assert total.item() == quiet.item()


@pytest.mark.parametrize("name", ["plain", "latent", "latent-lite"])
def test_products_are_those_that_the_planner_lists(name: str) -> None:
    config = CONFIGS[name].model_copy(update={"qkv_bias": False, "out_bias": False})
    model, (tokens_BS, _) = make(config), batch(config)
    seen: Counter[tuple[int, int, int]] = Counter()

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor], out: torch.Tensor) -> None:
        seen[out.numel() // out.shape[-1], *module.weight.shape] += 1

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(count)
    model.hidden(tokens_BS)
    listed: Counter[tuple[int, int, int]] = Counter()
    for gemm in gemms(config, tensor=1, expert=1, tokens=tokens_BS.numel()):
        listed[gemm.rows.most, gemm.n, gemm.k] += gemm.alike * gemm.layers * (gemm.name != "head")
    assert +listed == seen


# torch reads .grad in a check and tries to silence the warning, which fails if warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("case", ["qwen-like", "sinks"])
def test_block_compiles_in_one_graph(case):
    kinds = ("sliding", "full", "full")[: CONFIGS[case].layers]
    config = CONFIGS[case].model_copy(update={"grid": None, "layer_types": kinds})
    model, plain = make(config), make(config)
    model.layers[0].compile(fullgraph=True, backend="aot_eager")
    tokens_BS, labels_BS = batch(config)
    for tokens, labels in ((tokens_BS, labels_BS), (tokens_BS[:, :7], labels_BS[:, :7])):
        total, wanted = model(tokens, labels), plain(tokens, labels)
        total.backward()
        wanted.backward()
        torch.testing.assert_close(total, wanted, rtol=1e-13, atol=1e-13)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-11)


def test_unsupported_models_are_refused():
    config = CONFIGS["gpt-like"]
    with pytest.raises(ConfigurationError, match="17 tokens are more than the 16 learned positions"):
        Decoder(config)(*batch(config, length=17))
