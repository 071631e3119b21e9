"""Small configurations of ten model families of transformers, whose structures are kept beside the golden tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from partool.layout.tensor import Structure

GOLDEN = Path(__file__).parent / "golden" / "tensor"
_SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "vocab_size": 67,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**_GROUPED, "head_dim": 8, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**_GROUPED, "tie_word_embeddings": True},
    "qwen3": {**_GROUPED, "head_dim": 10},
    "mistral": {**_GROUPED, "head_dim": 8},
    "mixtral": {**_GROUPED, "head_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2},
    "gpt_neox": _SIZES,
    "phi": {**_GROUPED, "qk_layernorm": True},
    "phi3": _GROUPED,
    "deepseek_v2": {
        **_SIZES, "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 6, "n_routed_experts": 5, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 14, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
    "gpt2": {
        "n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 67, "n_positions": 32, "bos_token_id": 1,
        "eos_token_id": 2,
    },
}  # fmt: skip
"""Configurations by ``model_type``: heads, widths and vocabulary do not divide by every number of ranks."""


def structure(family: str) -> Structure:
    """Return the recorded structure of a family."""
    return Structure.model_validate_json((GOLDEN / f"{family}.json").read_text(encoding="utf-8"))


def recorded(family: str) -> Structure:
    """Return the structure of a family as transformers builds it now; needs torch and transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from partool_runtime.hf.building import meta_parameters
    from partool_runtime.hf.structure import structure_of

    with meta_parameters():
        return structure_of(AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**FAMILIES[family])))  # type: ignore[no-untyped-call]
