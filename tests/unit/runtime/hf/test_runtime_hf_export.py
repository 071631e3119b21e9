"""Export of runs whose model transformers built: a folder that transformers loads, with the same bits."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from _telemetry import small_plan

from partool.plan.types import HfModel
from partool_runtime.checkpoint import Checkpointer
from partool_runtime.export import export, main
from partool_runtime.hf.folder import write_model_folder

SIZES = {
    "vocab_size": 33, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
CASES = {
    "qwen2": SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt_neox": SIZES,
    "mixtral": SIZES | {"num_key_value_heads": 2, "num_local_experts": 3},
    "qwen3_moe": SIZES | {"num_key_value_heads": 2, "num_experts": 3, "moe_intermediate_size": 10, "head_dim": 4},
    "deepseek_v2": SIZES | {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 6,
        "num_experts_per_tok": 2, "kv_lora_rank": 8, "q_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 4, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def model_of(model_type: str) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **CASES[model_type])
    )


def make_run(tmp_path, model_type: str) -> transformers.PreTrainedModel:
    model = model_of(model_type)
    model.config.save_pretrained(tmp_path / "hf")
    hf = HfModel(path=str(tmp_path / "hf"), model_type=model_type, architecture=type(model).__name__)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "plan.json").write_text(small_plan(hf=hf).to_json())
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", keep=1, mode="sync", rank=0, world_size=1)
    checkpointer.save(3, {f"model.{name}": p.detach() for name, p in model.named_parameters()}, {})
    checkpointer.close()
    return model


@pytest.mark.parametrize("model_type", list(CASES))
def test_transformers_loads_what_was_exported(tmp_path, model_type, capsys):
    model = make_run(tmp_path, model_type)
    (tmp_path / "hf" / "generation_config.json").write_text('{"do_sample": true}')
    assert model_type in export(tmp_path / "run", tmp_path / "out", dtype="fp64")
    back, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype="auto"
    )
    assert not any(report.values()), report
    assert back.dtype == torch.float64
    assert back.generation_config.do_sample
    expected = dict(model.named_parameters())
    found = dict(back.named_parameters())
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter.double()), name


def test_experts_are_stored_one_by_one(tmp_path):
    model = make_run(tmp_path, "mixtral")
    export(tmp_path / "run", tmp_path / "out")
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = "model.layers.1.block_sparse_moe"
    assert tensors[f"{layer}.gate.weight"].shape == (3, 16)
    stacked = model.model.layers[1].mlp.experts
    assert torch.equal(tensors[f"{layer}.experts.2.w3.weight"], stacked.gate_up_proj[2, 12:])
    assert torch.equal(tensors[f"{layer}.experts.2.w2.weight"], stacked.down_proj[2])


def test_large_models_are_several_files(tmp_path):
    model = make_run(tmp_path, "qwen2")
    hf = HfModel(path=str(tmp_path / "hf"), model_type="qwen2", architecture="Qwen2ForCausalLM")
    write_model_folder({name: p.detach() for name, p in model.named_parameters()}, hf, tmp_path / "out", 4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))


def test_weights_that_are_not_finite_and_lost_configurations_are_refused(tmp_path, capsys):
    make_run(tmp_path, "gpt_neox")
    (tmp_path / "hf" / "config.json").unlink()
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 78
    assert "PT620" in capsys.readouterr().err
    checkpointer = Checkpointer(tmp_path / "run" / "checkpoints", keep=1, mode="sync", rank=0, world_size=1)
    checkpointer.save(4, {"model.w": torch.tensor([1.0, torch.nan])}, {})
    checkpointer.close()
    assert main([str(tmp_path / "run"), "--out", str(tmp_path / "out")]) == 78
    assert "PT622" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
