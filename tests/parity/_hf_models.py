"""Small models of transformers with random weights, of odd sizes."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from layouts import laid

from partool.layout.tensor import decide
from partool.layout.tensor.structure import Structure
from partool.plan.layout import Mesh
from partool.plan.types import HfModel, Plan
from partool.spec.model import ModelConfig
from partool_runtime.hf.building import build_causal
from partool_runtime.hf.sizes import model_fields
from partool_runtime.hf.structure import structure_of

COMMON: dict[str, Any] = {
    "num_hidden_layers": 2, "vocab_size": 31, "initializer_range": 0.2, "max_position_embeddings": 16,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_LLAMA: dict[str, Any] = {"hidden_size": 18, "intermediate_size": 13, "num_attention_heads": 6, "head_dim": 4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA, "num_key_value_heads": 2, "pad_token_id": 3},
    "qwen2": {
        "hidden_size": 24, "intermediate_size": 13, "num_attention_heads": 6, "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "qwen3": {**_LLAMA, "num_attention_heads": 5, "num_key_value_heads": 5},
    "mistral": {**_LLAMA, "num_attention_heads": 4, "num_key_value_heads": 4, "sliding_window": 3},
    "mistral_single": {**_LLAMA, "num_attention_heads": 1, "num_key_value_heads": 1},
    "mixtral": {
        **_LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "gpt_neox": {
        "hidden_size": 20, "intermediate_size": 13, "num_attention_heads": 5, "rotary_pct": 0.5,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    },
    "phi": {
        "hidden_size": 32, "intermediate_size": 13, "num_attention_heads": 4, "num_key_value_heads": 4,
        "partial_rotary_factor": 0.5, "qk_layernorm": True,
    },
    "phi3": {"hidden_size": 24, "intermediate_size": 13, "num_attention_heads": 6, "num_key_value_heads": 3},
    "deepseek_v2": {
        "hidden_size": 18, "intermediate_size": 13, "num_attention_heads": 3, "num_key_value_heads": 3,
        "q_lora_rank": 11, "kv_lora_rank": 5, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 7,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    },
    "qwen3_deep": {
        **_LLAMA, "num_hidden_layers": 4, "num_key_value_heads": 3, "use_sliding_window": True, "sliding_window": 3,
        "max_window_layers": 2, "tie_word_embeddings": True,
    },
    "gpt_neox_deep": {
        "num_hidden_layers": 4, "hidden_size": 20, "intermediate_size": 13, "num_attention_heads": 5,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    },
    "gemma_deep": {
        **_LLAMA, "num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "gemma3_text_deep": {
        **_LLAMA, "num_hidden_layers": 4, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2,
        "sliding_window": 3,
    },
    "gpt_neox_dropout": {
        "hidden_size": 20, "intermediate_size": 13, "num_attention_heads": 5, "hidden_dropout": 0.3,
        "attention_dropout": 0.3,
    },
    "llama_dropout": {**_LLAMA, "num_key_value_heads": 2, "attention_dropout": 0.3},
}  # fmt: skip
"""By model type. Over 3 ranks: Llama's 2 heads of keys lie on three ranks, Mistral's third rank has no head. Gemma's
embeddings are multiplied by the root of their width, which here is the same number in every type."""


def write_model(model_type: str, folder: Path) -> Path:
    """Write a model's configuration and weights; vectors are no ones and zeros, so that their gradients count."""
    import transformers

    path = folder / model_type
    family = re.sub("(_(deep|dropout|single|long|wide|wider))+$", "", model_type)
    config = transformers.CONFIG_MAPPING[family](**COMMON | MODELS[model_type])
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.linspace(-0.3, 0.4, parameter.shape[0], dtype=parameter.dtype))
    model.save_pretrained(path, max_shard_size="8KB")
    return path


def plan_of(base: Plan, path: Path, mesh: Mesh, patterns: Mapping[str, Any] | None = None, **fields: Any) -> Plan:
    """Return a plan that trains the model of a folder, its parameters cut as ``patterns`` say."""
    causal = build_causal(path)
    structure: Structure = structure_of(causal)
    config = ModelConfig.model_validate(model_fields(causal, causal.config), strict=False)
    decided = decide(structure, mesh.tp, patterns or {})
    assert not [f for f in decided.findings if f.severity == "error"], decided.findings
    plain = {"mesh": mesh, "recompute": ("none",) * config.layers, "micro_batch": 2}
    plain |= {"stages": ((0, config.layers),), "accumulation": 4 // 2 // mesh.dp}
    layout = laid(base.layout, **(plain | fields))
    return base.model_copy(
        update={
            "model": config,
            "layout": layout,
            "partition": decided.rows if mesh.tp > 1 else (),
            "hf": HfModel(path=str(path), model_type=structure.model_type, architecture=structure.architecture),
        }
    )
