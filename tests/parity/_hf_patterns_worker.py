"""Ranks of test_tensor_hf_patterns.py: models of transformers cut as the spec's patterns say, in float64."""

from __future__ import annotations

from _hf_models import MODELS
from _hf_worker import GATHERED, Case, check_case
from _hf_worker import written as models_written

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS.update(
    {
        # Transposed matrices, and queries, keys and values behind each other.
        "gpt2_long": {"n_embd": 20, "n_layer": 2, "n_head": 5, "n_positions": 16, "n_inner": 13, **_NO_DROPOUT},
        # Norms over the width of all heads: its own plan gathers what they read.
        "olmo2": {"hidden_size": 24, "intermediate_size": 13, "num_attention_heads": 6, "num_key_value_heads": 3},
    }
)


def cases(ranks: int) -> list[Case]:
    """Every style in a place where no rule would put it."""
    whole = (("*.layers.0.mlp", "replicated"), ("*.layers.1.self_attn.*", "replicated"))
    fused = (("*.gate_up_proj", "column_gathered"), ("*.qkv_proj", "column_gathered"))
    return [
        Case("gpt2_long", tp=ranks),
        Case("olmo2", tp=ranks),
        Case("llama", tp=ranks, patterns=whole),
        Case("mistral", tp=ranks, patterns=GATHERED),
        Case("mistral_single", tp=ranks),
        Case("mistral_single", tp=ranks, patterns=GATHERED),
        Case("phi3", tp=ranks, patterns=fused),
        Case("mixtral", tp=ranks, patterns=(("*.experts", "replicated"),)),
        Case("qwen2", tp=ranks, patterns=(("lm_head", "replicated"),)),
    ]


def written(name: str) -> None:
    """Write a model, those of this module among them, that is not there yet."""
    models_written(name)


def check_cut(case: Case) -> None:
    """Compare one case with transformers' own model."""
    check_case(case)
