"""Attention windows of transformers' families, as the planner describes them for the length of a run's sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from often import often

from partool_runtime.hf.graph import describe

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "vocab_size": 31, "hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 2**18, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 1},
    "gemma2": {"final_logit_softcapping": None},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "starcoder2": {},
    "phi3": {},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
}
"""Settings of families that have windows, in addition to :data:`SIZES`."""
EVERYWHERE = ("mistral", "mixtral", "starcoder2", "phi3")
"""Families in which all layers have the window."""
WINDOWS = (12, 128, 4096, 131_072)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("window", often(WINDOWS, (131_072,)))
@pytest.mark.parametrize("family", often(FAMILIES, ("gpt_oss",)))
def test_the_window_of_a_family_is_described(family: str, window: int, tmp_path: Path) -> None:
    import transformers

    settings = SIZES | FAMILIES[family] | {"sliding_window": window}
    transformers.CONFIG_MAPPING[family](**settings).save_pretrained(tmp_path)
    windowed = f"the last {window} tokens"
    for length, sees in ((2 * window + 1, windowed), (window - 1, "all earlier tokens")):
        found = describe(tmp_path, "", length)
        assert found["problem"] == ""
        seen = [each["sees"] for each in found["attention"]]
        assert len(seen) == 2
        assert sees in seen
        assert set(seen) <= ({sees} if family in EVERYWHERE else {sees, "all earlier tokens"})
