"""Writes folders that ``transformers.AutoModelForCausalLM.from_pretrained`` can load."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from partool.layout.parameters import parameters
from partool.plan.types import Generation
from partool.spec.experts import Moe
from partool.spec.model import ModelConfig
from partool_runtime.hf.conditions import all_sliding
from partool_runtime.hf.families import Family, family_of, place_of
from partool_runtime.hf.in_turns import joined_in_turns
from partool_runtime.hf.stored import copies_of, row_order

SHARD_BYTES = 5 * 10**9
"""Maximum bytes of a file, unless a single tensor is larger."""

_PARTS = ("q", "k", "v")


def write_folder(
    state: Mapping[str, torch.Tensor],
    config: ModelConfig,
    path: Path,
    shard_bytes: int = SHARD_BYTES,
    *,
    generation: Generation | None = None,
) -> Family:
    """Write safetensors files and ``config.json`` into ``path``.

    ``state`` holds whole parameters on the CPU by partool's names, of one type but for selection biases of routers.
    ``generation`` holds token ids for text generation; without ``generation`` no begin, end or padding token is set.
    Modules of further tokens are left out where the family has none. Returns the family whose layout was written.
    Raises ConfigurationError PT624 if no Hugging Face model type can express the model.
    """
    family = family_of(config)
    if config.predictions and not family.predicts:
        config = config.model_copy(update={"multi_token": None})
        state = {info.name: state[info.name] for info in parameters(config)}
    tensors = to_hf(state, family, config)
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, path, shard_bytes)
    dtype = next(iter(tensors.values())).dtype
    generation = generation or Generation()
    padding = {} if config.padding_token is None else {"pad_token_id": config.padding_token}
    settings = hf_config(config, family) | {"torch_dtype": str(dtype).removeprefix("torch.")} | generation.token_ids
    settings |= padding
    _write_json(path / "config.json", settings)
    if generation.settings:
        _write_json(path / "generation_config.json", generation.settings)
    return family


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def to_hf(state: Mapping[str, torch.Tensor], family: Family, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the parameters under their Hugging Face names; transposed, joined and with other rows where needed."""
    tensors: dict[str, torch.Tensor] = {}
    fused: dict[str, dict[str, torch.Tensor]] = {}
    turns: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in state.items():
        place = place_of(family, name, config.layers)
        assert place is not None, f"{name} has no place in {family.model_type}"
        stored = tensor.T if place.transposed else tensor
        if place.rotated and config.mla is not None:
            stored = tensor[row_order(config.mla, place.rotated, len(tensor)).argsort()]
        if "{e}" in place.name and config.moe is not None:
            for expert, matrix in enumerate(stored.chunk(config.moe.experts)):
                tensors[place.name.replace("{e}", str(expert))] = matrix.contiguous()
        elif place.turns is not None:
            turns.setdefault(place.name, {})[place.turns[0]] = stored
        elif place.part:
            fused.setdefault(place.name, {})[place.part] = stored
        else:
            tensors[place.name] = stored.contiguous()
    for name, parts in fused.items():
        tensors[name] = torch.cat([parts[part] for part in _PARTS], dim=-1)
    for name, numbered in turns.items():
        assert config.moe is not None, "tensors of experts"
        tensors[name] = joined_in_turns(numbered, config.moe.experts)
    # Cloned: a file of safetensors has no two names for one storage.
    return tensors | {copy: tensors[original].clone() for copy, original in copies_of(config).items()}


def write_tensors(tensors: Mapping[str, torch.Tensor], path: Path, shard_bytes: int) -> None:
    """Write tensors as one safetensors file; if it would exceed ``shard_bytes``, write several files and an index."""
    from safetensors.torch import save_file

    shards: list[dict[str, torch.Tensor]] = [{}]
    used_bytes = 0
    for name, tensor in tensors.items():
        if used_bytes and used_bytes + tensor.nbytes > shard_bytes:
            shards.append({})
            used_bytes = 0
        shards[-1][name] = tensor
        used_bytes += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], path / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def hf_config(config: ModelConfig, family: Family) -> dict[str, object]:
    """Return the content of ``config.json``, with fields that both transformers 4 and transformers 5 read."""
    common = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tied_embeddings,
        "initializer_range": config.init_std,
        # Without these, transformers assumes token numbers that a small vocabulary does not have.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return common | (_gpt2(config) if family.model_type == "gpt2" else _llama_like(config, family.model_type))


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": config.layers,
        "n_embd": config.hidden,
        "n_inner": config.ffn_hidden,
        "n_head": config.heads,
        "n_positions": config.max_position,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(config.activation, config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
    }


def _llama_like(config: ModelConfig, model_type: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn_hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "hidden_act": {"geglu": "gelu"}.get(config.activation, "silu"),
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "attention_dropout": 0.0,
    }
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.model_dump(exclude_none=True)
        scaling["rope_type"] = scaling.pop("kind")
        scaling["original_max_position_embeddings"] = scaling.pop("original_max_position")
        fields["rope_scaling"] = scaling
    return fields | _MODEL_TYPE_FIELDS[model_type](config)


def _llama_fields(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.qkv_bias, "mlp_bias": config.ffn_bias}


def _mistral_fields(config: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": config.window if all_sliding(config) else None}


def _qwen_fields(config: ModelConfig) -> dict[str, Any]:
    names = {"full": "full_attention", "sliding": "sliding_attention"}
    kinds = [config.attention_kind(layer) for layer in range(config.layers)]
    windowed = config.window is not None and "sliding" in kinds
    # Layers before max_window_layers have no window; newer versions read layer_types instead.
    first = kinds.index("sliding") if windowed else config.layers
    return {
        "use_sliding_window": windowed,
        "sliding_window": config.window if windowed else None,
        "max_window_layers": first,
        "layer_types": [names[kind] if windowed else "full_attention" for kind in kinds],
    }


def _qwen3_fields(config: ModelConfig) -> dict[str, Any]:
    return _qwen_fields(config) | {"attention_bias": config.qkv_bias}


def _deepseek_fields(config: ModelConfig) -> dict[str, Any]:
    mla = config.mla
    assert mla is not None, "a condition of the family"
    return {
        "attention_bias": config.qkv_bias,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_head_dim,
        "qk_rope_head_dim": mla.rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "head_dim": mla.rope_head_dim,
        "first_k_dense_replace": config.layers,
    } | _shared_fields(config.moe)


def _shared_fields(moe: Moe | None) -> dict[str, Any]:
    if moe is None:
        return {}
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden,
        "n_shared_experts": moe.shared_experts,
        "first_k_dense_replace": moe.first_dense_layers,
        "moe_layer_freq": 1,
        "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.scaling_factor,
        "n_group": moe.groups,
        "topk_group": moe.top_groups,
        "aux_loss_alpha": moe.aux_loss,
        "seq_aux": moe.aux_scope == "sequence",
    }


def _deepseek_v2_fields(config: ModelConfig) -> dict[str, Any]:
    grouped = config.moe is not None and config.moe.groups > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return _deepseek_fields(config) | {"topk_method": method, "scoring_func": "softmax"}


def _deepseek_v3_fields(config: ModelConfig) -> dict[str, Any]:
    choice = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    return _deepseek_fields(config) | choice | {"rope_interleave": True, "num_nextn_predict_layers": config.predictions}


def _mixtral_fields(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None, "a condition of the family"
    return (
        _mistral_fields(config)
        | _loss_fields(config, moe)
        | {
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.top_k,
            "intermediate_size": moe.ffn_hidden,
            "router_jitter_noise": 0.0,
        }
    )


def _gpt_oss_fields(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None, "a condition of the family"
    windows = _qwen_fields(config)
    fields = {
        "attention_bias": config.qkv_bias,
        "sliding_window": windows["sliding_window"],
        "layer_types": windows["layer_types"],
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "intermediate_size": moe.ffn_hidden,
        "swiglu_alpha": config.swiglu_alpha,
        "swiglu_limit": config.swiglu_limit,
    } | _loss_fields(config, moe)
    if config.rope_scaling is None:  # without this, transformers takes the model's own YaRN
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    return fields


def _qwen3_moe_fields(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    assert moe is not None, "a condition of the family"
    windowed = all_sliding(config)
    return _loss_fields(config, moe) | {
        "attention_bias": config.qkv_bias,
        "use_sliding_window": windowed,
        "sliding_window": config.window if windowed else None,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_hidden,
        "norm_topk_prob": moe.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config.layers) if not config.is_moe_layer(layer)],
    }


def _loss_fields(config: ModelConfig, moe: Moe) -> dict[str, Any]:
    """Return the keys of the load-balancing loss.

    In transformers it is ``top_k`` for an even load, and computed once for all layers, as
    :mod:`partool.catalog.huggingface_experts` says.
    """
    layers = sum(map(config.is_moe_layer, range(config.layers)))
    return {
        "output_router_logits": moe.aux_loss > 0,
        "router_aux_loss_coef": moe.aux_loss * max(layers, 1) / moe.top_k,
    }


_MODEL_TYPE_FIELDS = {
    "llama": _llama_fields,
    "mistral": _mistral_fields,
    "qwen2": _qwen_fields,
    "qwen3": _qwen3_fields,
    "mixtral": _mixtral_fields,
    "qwen3_moe": _qwen3_moe_fields,
    "gpt_oss": _gpt_oss_fields,
    "deepseek_v2": _deepseek_v2_fields,
    "deepseek_v3": _deepseek_v3_fields,
}
