"""What a model of transformers says of its attention, and the seam at which partool takes it over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.asked import Asked, UnknownAttentionError, asked
from partool_runtime.hf.attention import HfAttention, Seen, padded
from partool_runtime.hf.building import meta_parameters
from partool_runtime.hf.structure import describe
from partool_runtime.model.attention import AttentionLayout, attend

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))
from _hf_models import COMMON, MODELS

SMALL: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 13, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4,
}  # fmt: skip
MIXED = {**MODELS["qwen3_deep"], "layer_types": ["sliding_attention", "full_attention"] * 2}


def built(family: str, fields: dict[str, Any]) -> Any:
    import transformers

    config = transformers.CONFIG_MAPPING[family](**COMMON | fields)
    with meta_parameters():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    ("family", "fields", "windows", "dropout"),
    [
        ("llama", MODELS["llama_dropout"], [None, None], 0.3),
        ("mistral", MODELS["mistral"], [3, 3], 0.0),
        ("qwen3", MIXED, [3, None, 3, None], 0.0),
        ("deepseek_v2", MODELS["deepseek_v2"], [None, None], 0.0),
        ("gpt2", {"n_embd": 20, "n_head": 5, "n_layer": 2}, [None, None], 0.1),
        ("gemma3_text", SMALL | {"sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"]},
         [None, 3], 0.0),
    ],
)  # fmt: skip
def test_windows_and_dropout_are_those_of_the_models_code(
    family: str, fields: dict[str, Any], windows: list[int | None], dropout: float
) -> None:
    model = built(family, fields)
    before = model.config._attn_implementation
    assert asked(model, len(windows)) == [Asked(window, dropout) for window in windows]
    assert model.config._attn_implementation == before, "asking changes nothing"


@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("gpt_oss", SMALL | {"num_local_experts": 2, "layer_types": ["full_attention"] * 2}, "uses s_aux"),
        ("bloom", {"hidden_size": 24, "n_head": 4}, "compute with masks themselves"),
        ("falcon", {"hidden_size": 24, "num_attention_heads": 6}, "compute with masks themselves"),
        ("gemma2", SMALL, "uses softcap"),
        ("mamba", {"hidden_size": 24}, "does not go through"),
    ],
)
def test_attention_of_another_kind_is_refused(family: str, fields: dict[str, Any], why: str) -> None:
    with pytest.raises(UnknownAttentionError, match=why):
        asked(built(family, fields), 2)


def test_a_mask_of_the_models_own_is_refused() -> None:
    """Chunks of a sequence begin where a window would still see the tokens before."""
    import transformers.models.mistral.modeling_mistral as code
    from transformers.masking_utils import create_chunked_causal_mask

    model = built("mistral", MODELS["mistral"])
    model.config.attention_chunk_size = 3
    made = code.create_sliding_window_causal_mask
    setattr(code, "create_sliding_window_causal_mask", create_chunked_causal_mask)  # noqa: B010 - a function
    try:
        with pytest.raises(UnknownAttentionError, match="not only causal"):
            asked(model, 2)
    finally:
        setattr(code, "create_sliding_window_causal_mask", made)  # noqa: B010


def test_descriptions_tell_them_and_price_them(tmp_path: Path) -> None:
    import transformers

    transformers.Qwen3Config(**COMMON | MIXED).save_pretrained(tmp_path)
    found = describe(tmp_path)
    assert (found["attention_problem"], found["attention_dropout"]) == ("", 0.0)
    assert (found["fields"]["window"], found["fields"]["layer_types"]) == (3, ["sliding", "full"] * 2)
    transformers.GptOssConfig(**COMMON | SMALL | {"num_local_experts": 2}).save_pretrained(tmp_path)
    assert describe(tmp_path)["attention_problem"] == "its attention uses s_aux"


@pytest.mark.parametrize(
    ("seen", "options", "what"),
    [
        (Seen(None, None), {}, "has a window of None, and of 3 by the plan"),
        (Seen(3, None), {"sliding_window": 4}, "has a window of 4, and of 3"),
        (Seen(3, None), {"sliding_window": 3, "s_aux": torch.zeros(2)}, "asks for s_aux"),
        (None, {"sliding_window": 3}, "gets a NoneType as its mask"),
    ],
)
def test_a_layer_that_asks_for_something_else_stops_the_run(seen: Any, options: dict[str, Any], what: str) -> None:
    heads = tuple(torch.zeros(1, 2, 5, 4) for _ in range(3))
    with pytest.raises(ConfigurationError, match=what) as caught:
        HfAttention(AttentionLayout(3))((heads[0], heads[1], heads[2]), seen, None, 0.0, options)
    assert caught.value.code == "PT654"


@pytest.mark.parametrize("widths", [(7, 5), (5, 7), (4, 4)])
def test_heads_of_two_widths_attend_as_if_padded_with_nothing(widths: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 6, width, generator=generator, dtype=torch.float64) for width in (widths[0], *widths))
    seen = []

    def core(*heads: torch.Tensor) -> torch.Tensor:
        seen.append({x.shape[3] for x in heads})
        return attend(*heads, AttentionLayout(None))  # type: ignore[call-arg,misc]

    found = padded((q, k, v), core)
    assert seen == [{max(widths)}]
    expected = attend(q, k, v, AttentionLayout(None))
    assert (found - expected).abs().max() < 1e-14
