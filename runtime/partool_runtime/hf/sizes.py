"""Describes a transformers model in the fields of partool's own decoder, from which the planner computes costs."""

from __future__ import annotations

from typing import Any

from torch import nn

from partool_runtime.hf.building import base_name, blocks_name

_FFN = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


def expert_count(config: Any) -> int:
    """Return a configuration's number of experts per layer; 0 if layers have no experts."""
    return _first(config, _EXPERTS) or 0


def kv_heads(config: Any) -> int:
    """Return a configuration's number of key-value heads per layer.

    Multi-query attention has one key-value head (Shazeer, arXiv 1911.02150). GPT-BigCode and Falcon use multi-query
    attention. Falcon's ``num_kv_heads`` applies only to Falcon's new architecture, in which ``multi_query`` has no
    effect.
    """
    heads = int(config.num_attention_heads)
    grouped = getattr(config, "new_decoder_architecture", None)  # Falcon's
    if not grouped and getattr(config, "multi_query", False):
        return 1
    names = ("num_key_value_heads",) if grouped is None else ("num_kv_heads",) if grouped else ()
    return _first(config, names) or heads


def model_fields(causal: nn.Module, config: Any) -> dict[str, Any]:
    """Return fields of a ``ModelConfig``; sizes are read from the configuration, other fields from the modules."""
    hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_hidden_layers
    base = causal.get_submodule(base_name(causal))
    blocks = base.get_submodule(blocks_name(base, layers))
    names = {name: module for name, module in blocks.get_submodule("0").named_modules() if _owns(module)}
    attention = {name: m for name, m in names.items() if "." in name and "att" in name.partition(".")[0]}
    network = {name: module for name, module in names.items() if name not in attention and _linear(module)}
    projections = [module for module in attention.values() if _linear(module)]
    norms = [module for module in names.values() if "Norm" in type(module).__name__]
    fields = {
        "layers": layers,
        "hidden": hidden,
        "ffn_hidden": _first(config, _FFN) or 4 * hidden,
        "heads": heads,
        "kv_heads": kv_heads(config),
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "vocab": config.vocab_size,
        "max_position": getattr(config, "max_position_embeddings", None),
        "norm": "layernorm" if any(_bias(module) for module in norms) else "rmsnorm",
        "activation": "swiglu" if _gated(network, config) else "gelu",
        "position": "learned" if _embeddings(base) > 1 else "rope",
        "qkv_bias": bool(projections) and _bias(projections[0]),
        "out_bias": bool(projections) and _bias(projections[-1]),
        "ffn_bias": any(_bias(module) for module in network.values()),
        "qk_norm": any("Norm" in type(module).__name__ for module in attention.values()) and not _latent(config),
        "tied_embeddings": bool(config.tie_word_embeddings),
        "init_std": getattr(config, "initializer_range", None),
        **_windows(config),
        **_experts(config),
        **_latent(config),
    }
    if fields["position"] == "rope" and fields["head_dim"] % 2:
        fields["position"] = "none"  # the model rotates part of a head, at negligible cost
    return {name: value for name, value in fields.items() if value is not None}


def _owns(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _bias(module: nn.Module) -> bool:
    return module._parameters.get("bias") is not None


def _embeddings(base: nn.Module) -> int:
    return sum(isinstance(module, nn.Embedding) for module in base.children())


def _gated(network: dict[str, nn.Module], config: Any) -> bool:
    """Return True if feed-forward networks have three matrices; two of the three may be fused into one."""
    if any("gate" in name.rpartition(".")[2] for name in network):
        return True
    return not network and expert_count(config) > 0


def _windows(config: Any) -> dict[str, Any]:
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return {}
    if kinds is None:
        return {"window": window, "layer_types": ["sliding"] * config.num_hidden_layers}
    return {"window": window, "layer_types": ["full" if kind == "full_attention" else "sliding" for kind in kinds]}


def _experts(config: Any) -> dict[str, Any]:
    count = expert_count(config)
    if not count:
        return {}
    moe = {
        "experts": count,
        "top_k": config.num_experts_per_tok,
        "ffn_hidden": getattr(config, "moe_intermediate_size", None) or config.intermediate_size,
        "first_dense_layers": getattr(config, "first_k_dense_replace", None) or 0,
        "shared_experts": getattr(config, "n_shared_experts", None) or 0,
    }
    return {"moe": moe}


def _latent(config: Any) -> dict[str, Any]:
    """Return the fields of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""
    if getattr(config, "kv_lora_rank", None) is None:
        return {}
    mla = {
        "q_rank": config.q_lora_rank,
        "kv_rank": config.kv_lora_rank,
        "nope_head_dim": config.qk_nope_head_dim,
        "rope_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim,
    }
    return {"mla": mla, "head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim}


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    values = (getattr(config, name, None) for name in names)
    return next((int(value) for value in values if isinstance(value, int)), None)
