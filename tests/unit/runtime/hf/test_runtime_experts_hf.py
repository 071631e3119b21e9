"""Import and export of mixtures of experts, against transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _routers import observed
from safetensors.torch import load_file, save_file

from partool.catalog.huggingface import convert
from partool.catalog.lookup import table
from partool.spec.experts import ExpertShape, Moe
from partool.spec.model import Mla, ModelConfig, Weights
from partool_runtime.checkpoint import Checkpointer
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import family_of, open_folder, write_folder
from partool_runtime.hf.experts import plain_experts
from partool_runtime.hf.numerics import KeepWide
from partool_runtime.model import Decoder
from partool_runtime.weights import build, fill, materialise, post_load
from partool_runtime.weights.from_checkpoint import load_whole
from partool_runtime.weights.upcycle import upcycled

transformers = pytest.importorskip("transformers")

TOKENS_BS = torch.arange(2 * 13).reshape(2, 13) * 7 % 43
SIZES = {
    "layers": 2, "hidden": 24, "ffn_hidden": 36, "heads": 4, "kv_heads": 2, "head_dim": 6, "vocab": 43,
    "max_position": 64,
}  # fmt: skip
COMMON = {
    "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 36, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "vocab_size": 43, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "head_dim": 4, "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 7, "first_k_dense_replace": 1, "moe_intermediate_size": 10,
    "n_shared_experts": 2,
}  # fmt: skip
MLA = Mla(q_rank=14, kv_rank=10, nope_head_dim=6, rope_head_dim=4, v_head_dim=7)


def config(moe: Moe, **more: Any) -> ModelConfig:
    return ModelConfig(**SIZES | {"moe": moe} | more)


def latent(moe: Moe, mla: Mla = MLA) -> ModelConfig:
    shared = moe.model_copy(update={"shared_experts": 2, "first_dense_layers": 1})
    return config(shared, mla=mla, kv_heads=4, head_dim=mla.qk_head_dim)


CASES = {
    "mixtral": (
        config(Moe(experts=5, top_k=2, ffn_hidden=36, aux_loss=0.02)),
        {"num_local_experts": 5, "output_router_logits": True, "router_aux_loss_coef": 0.02},
    ),
    "qwen3_moe": (
        config(
            Moe(experts=6, top_k=3, ffn_hidden=10, normalise=False, first_dense_layers=1, every=2),
            qk_norm=True,
            layers=4,
        ),
        {
            "num_hidden_layers": 4, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 10,
            "decoder_sparse_step": 2,
        },
    ),
    "deepseek_v2": (
        latent(
            Moe(
                experts=6, top_k=2, ffn_hidden=10, normalise=False, scaling_factor=1.7, groups=3, top_groups=2,
                group_score="max", aux_loss=0.003, aux_scope="sequence",
            )
        ),
        LATENT | {
            "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 3, "topk_group": 2,
            "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7, "aux_loss_alpha": 0.003,
            "seq_aux": True,
        },
    ),
    "v2-lite": (
        latent(
            Moe(experts=5, top_k=2, ffn_hidden=10, normalise=False, aux_scope="sequence"),
            MLA.model_copy(update={"q_rank": None}),
        ),
        LATENT | {"q_lora_rank": None, "n_routed_experts": 5, "num_experts_per_tok": 2},
    ),
    "deepseek_v3": (
        latent(
            Moe(
                experts=8, top_k=3, ffn_hidden=10, scores="sigmoid", scaling_factor=2.5, groups=4, top_groups=2,
                bias_rate=0.001, aux_scope="sequence",
            )
        ),
        LATENT | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2},
    ),
}  # fmt: skip


def randomised(model: Any) -> Any:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("bias", "weight", "proj")):
                noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                norm = tensor.dim() == 1 and not name.endswith("bias")
                # rounded, as transformers loads the routers of DeepSeek in float32
                tensor.copy_((noise * 0.3 + (1.0 if norm else 0.0)).float())
    return model


def logits_of(theirs: Any) -> torch.Tensor:
    """Return the logits of a model in float64, which transformers would round to float32 on the way."""
    plain_experts(theirs, wide=True)
    for module in theirs.modules():
        if hasattr(module, "inv_freq"):
            width = 2 * len(module.inv_freq)
            module.inv_freq = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    with torch.no_grad(), KeepWide():
        logits: torch.Tensor = theirs.eval()(TOKENS_BS).logits
    return logits


def native(ours: ModelConfig, path: Path) -> Decoder:
    model = build(ours)
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(source="hf", path=str(path)), seed=0)
    post_load(model)
    return model


def theirs_of(case: str) -> tuple[ModelConfig, Any]:
    ours, more = CASES[case]
    settings = transformers.AutoConfig.for_model(case.replace("v2-lite", "deepseek_v2"), **COMMON | more)
    return ours, randomised(transformers.AutoModelForCausalLM.from_config(settings).double())


@pytest.mark.parametrize("case", CASES)
def test_logits_there_and_back(case: str, tmp_path: Path) -> None:
    ours, theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path / "theirs")
    written = json.loads((tmp_path / "theirs/config.json").read_text())
    fields, findings = convert(written)
    assert {finding.code for finding in findings} <= {"PT255"}, findings
    assert ModelConfig(**fields) == ours
    model, expected = native(ours, tmp_path / "theirs"), logits_of(theirs)
    with torch.no_grad():
        found = model.logits(TOKENS_BS)
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-10)

    write_folder(model.state_dict(), ours, tmp_path / "ours")
    assert ModelConfig(**convert(json.loads((tmp_path / "ours/config.json").read_text()))[0]) == ours
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    torch.testing.assert_close(logits_of(again.double()), expected, rtol=0.0, atol=1e-10)


@pytest.mark.parametrize("dense", [0, 2])
def test_losses_of_equal_layers_pull_as_hard_as_those_of_transformers(dense: int) -> None:
    """Every layer with experts has the same tokens and the same router."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    folder = COMMON | {
        "model_type": "qwen3_moe", "num_hidden_layers": 5, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 10, "mlp_only_layers": list(range(dense)), "output_router_logits": True,
        "router_aux_loss_coef": 0.03,
    }  # fmt: skip
    fields, _ = convert(folder)
    assert fields is not None
    moe = ModelConfig(**fields).moe
    assert moe is not None
    router, _ = observed(moe, 12)
    x_TH = torch.randn(12, router.weight.shape[1], dtype=torch.float64)
    (ours,) = torch.autograd.grad((router(x_TH, 3).weights * 0).sum(), [router.weight])

    weights = [router.weight.detach().clone().requires_grad_() for _ in range(5 - dense)]
    logits = tuple(x_TH @ weight.T for weight in weights)
    loss = 0.03 * load_balancing_loss_func(logits, 6, 3)
    theirs = torch.autograd.grad(loss, weights)
    assert ours.abs().max() > 1e-4
    for each in theirs:
        torch.testing.assert_close(each, ours, rtol=1e-5, atol=1e-8)  # transformers adds in float32


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("case", ["mixtral", "deepseek_v3"])
def test_blocks_of_experts_are_read_alone(case: str, fused: bool, tmp_path: Path) -> None:
    """Blocks that begin and end in the middle of experts; folders with a tensor per expert, or with stacks of them."""
    ours, theirs = theirs_of(case)
    theirs.save_pretrained(tmp_path, save_original_format=not fused)
    assert any(name.endswith("experts.gate_up_proj") for name in load_file(tmp_path / "model.safetensors")) == fused
    whole = native(ours, tmp_path).state_dict()
    stacked = theirs.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    gate, up = stacked.chunk(2, dim=1)
    assert torch.equal(whole["layers.1.moe.experts.gate.weight"], gate.flatten(0, 1))
    assert torch.equal(whole["layers.1.moe.experts.up.weight"], up.flatten(0, 1))
    with open_folder(tmp_path, ours) as source:
        for name in [name for name in whole if ".moe." in name]:
            shape = tuple(whole[name].shape)
            rows = shape[0] // (ours.moe.experts if ours.moe else 1)
            for first, stop in ((0, 0), (rows + 1, rows + 1), (1, rows - 1), (rows - 1, 2 * rows + 1), (0, shape[0])):
                begin, end = (min(number, shape[0]) for number in (first, stop))
                columns = tuple(slice(size // 3, size - 1) for size in shape[1:])
                sizes = (end - begin, *(part.stop - part.start for part in columns))
                offsets = (begin, *(part.start for part in columns))
                block = source.block(name, shape, offsets, sizes)
                assert torch.equal(block.double(), whole[name][slice(begin, end), *columns]), name


def test_experts_in_8_bits(tmp_path: Path) -> None:
    """Blocks of scales that do not divide an expert's matrix."""
    ours, theirs = theirs_of("deepseek_v3")
    theirs.float().save_pretrained(tmp_path)
    tensors, block = load_file(tmp_path / "model.safetensors"), (4, 9)
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    scales = torch.rand(3, 3, generator=torch.Generator().manual_seed(2)) + 0.5
    plain = (tensors[name] * 4).to(torch.float8_e4m3fn)
    save_file(tensors | {name: plain, f"{name}_scale_inv": scales}, tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block), "fmt": "e4m3"}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    each = scales.repeat_interleave(4, 0)[:10].repeat_interleave(9, 1)[:, :24]
    found = native(ours, tmp_path).state_dict()["layers.1.moe.experts.up.weight"]
    assert torch.equal(found[50:60].float(), plain.float() * each)
    assert torch.equal(found[60:70].float(), tensors[name.replace(".5.", ".6.")])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"experts": 4}, "unexpected model.layers.0.block_sparse_moe.experts.4.w1.weight"),
        (
            {"experts": 6},
            "missing layers.0.moe.experts.gate.weight (model.layers.0.block_sparse_moe.experts.5.w1.weight)",
        ),
        ({"ffn_hidden": 35}, "layers.0.moe.experts.down.weight has shape [120, 35] in the model and [120, 36] in"),
        ({"bias_rate": 0.1}, "missing layers.0.moe.router.bias"),
    ],
)
def test_other_experts_are_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    ours, theirs = theirs_of("mixtral")
    theirs.save_pretrained(tmp_path)
    assert ours.moe is not None
    with pytest.raises(ConfigurationError) as error:
        native(ours.model_copy(update={"moe": ours.moe.model_copy(update=change)}), tmp_path)
    assert error.value.code == "PT621"
    assert said in str(error.value)


def test_no_family_for_other_routers() -> None:
    """Routers that no model type has are not exported as if they were another type's."""
    moe = CASES["mixtral"][0].moe
    assert moe is not None
    for change, said in (
        ({"normalise": False}, "mixtral: moe.normalise is true"),
        ({"shared_experts": 1}, "moe.shared_experts is 0"),
        ({"scores": "sigmoid"}, "moe.scores is softmax"),
        ({"scaling_factor": 2.0}, "moe.scaling_factor is 1"),
        ({"first_dense_layers": 1}, "mixtral: all layers have experts"),
        ({"routing": "balanced"}, "moe.routing is learned"),
        ({"bias_rate": 0.0}, "moe.bias_rate is null"),
        ({"groups": 5}, "moe.groups is 1"),
        ({"layers": {"1": ExpertShape(experts=6)}}, "moe.layers is not given"),
    ):
        with pytest.raises(ConfigurationError) as error:
            family_of(config(moe.model_copy(update=change)))
        assert error.value.code == "PT624"
        assert said in str(error.value), said


DENSE = ModelConfig(**SIZES)


@pytest.mark.parametrize("source", ["hf", "checkpoint"])
def test_copies_of_a_dense_network_compute_the_same(source: str, tmp_path: Path) -> None:
    plain = randomised(Decoder(DENSE).double())
    save(plain, tmp_path / "run")
    write_folder(plain.state_dict(), DENSE, tmp_path / "hf")
    path = tmp_path / ("hf" if source == "hf" else "run")
    more = {"1": ExpertShape(experts=7, top_k=3)}
    first = 1 if source == "hf" else 0
    moe = Moe(experts=5, top_k=2, ffn_hidden=36, first_dense_layers=first, bias_rate=0.01, layers=more)
    model = build(config(moe))
    materialise(model, "cpu", torch.float64)
    fill(model, Weights(source=source, path=str(path), upcycle=True), seed=3)
    post_load(model)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(TOKENS_BS), plain.logits(TOKENS_BS), rtol=0.0, atol=1e-12)
    state = model.state_dict()
    assert state["layers.1.moe.router.weight"].std() > 0.01
    assert state["layers.1.moe.experts.up.weight"].shape == (7 * 36, 24)


def test_blocks_of_copies() -> None:
    """Blocks that begin and end in the middle of copies, as ranks that cut widths hold them."""
    network = torch.arange(6.0)[:, None] + torch.arange(4) / 8
    taken = []

    def source(name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        taken.append((name, shape))
        return network[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]

    copies = upcycled(config(Moe(experts=3, top_k=1, ffn_hidden=6)), source, seed=0)
    whole = network.repeat(3, 1)
    for first, stop in ((0, 18), (2, 5), (4, 15), (7, 7)):
        block = copies("layers.1.moe.experts.up.weight", (18, 4), (first, 1), (stop - first, 2))
        assert torch.equal(block, whole[first:stop, 1:3])
    assert set(taken) == {("layers.1.ffn.up.weight", (6, 4))}


def save(model: Decoder, folder: Path) -> None:
    checkpointer = Checkpointer(folder, keep=1, mode="sync", rank=0, world_size=1)
    checkpointer.save(1, {f"model.{name}": p.detach() for name, p in model.named_parameters()}, {})
    checkpointer.close()


def test_selection_biases_stay_exact(tmp_path: Path) -> None:
    """An export in 16 bits does not round the biases, which steps change by a thousandth."""
    model = randomised(Decoder(CASES["deepseek_v3"][0]))
    save(model, tmp_path)
    name = "layers.1.moe.router.bias"
    state = load_whole(tmp_path, torch.bfloat16)
    assert torch.equal(state[name], model.state_dict()[name])
    assert {tensor.dtype for other, tensor in state.items() if other != name} == {torch.bfloat16}


@pytest.mark.parametrize(("name", "kind"), [("deepseek-v3", "DeepseekV3"), ("mixtral-8x7b", "Mixtral")])
def test_routers_of_presets_are_those_of_transformers(name: str, kind: str) -> None:
    """The defaults of these two configuration classes are the published models; the loss is not part of them."""
    config = getattr(transformers, f"{kind}Config")().to_dict() | {"architectures": [f"{kind}ForCausalLM"]}
    read, _ = convert(config)
    assert read is not None
    preset = table("models")[name]["fields"]
    unrouted = {"aux_loss": 0.0}
    assert Moe(**preset["moe"]).model_copy(update=unrouted) == Moe(**read["moe"]).model_copy(update=unrouted)
    assert preset.get("mla") == read.get("mla")
