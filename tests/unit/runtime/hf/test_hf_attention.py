"""Attention of transformers' models: its description, and the interface through which partool replaces it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from partool.plan.types import HfModel
from partool.spec.model import ModelConfig, Weights
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.asked import AttentionAsked, UnknownAttentionError, asked
from partool_runtime.hf.attention import HfAttention, MaskStandIn
from partool_runtime.hf.building import meta_parameters
from partool_runtime.hf.model import HfDecoder
from partool_runtime.hf.structure import describe
from partool_runtime.model.attention import AttentionLayout
from partool_runtime.parallel.recompute import recompute
from partool_runtime.parallel.sequence.apply import take_attention
from partool_runtime.weights import fill, materialise, post_load

sys.path.insert(0, str(Path(__file__).parents[3] / "parity"))
from _hf_models import COMMON, MODELS, write_model

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
    assert asked(model, len(windows)) == [AttentionAsked(window, dropout) for window in windows]
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
    """A chunked mask hides the tokens before a chunk, which a sliding window would still see."""
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
        (MaskStandIn(None, None), {}, "has a window of None, and of 3 by the plan"),
        (MaskStandIn(3, None), {"sliding_window": 4}, "has a window of 4, and of 3"),
        (MaskStandIn(3, None), {"sliding_window": 3, "s_aux": torch.zeros(2)}, "asks for s_aux"),
        (None, {"sliding_window": 3}, "gets a NoneType as its mask"),
    ],
)
def test_a_layer_that_asks_for_something_else_stops_the_run(seen: Any, options: dict[str, Any], what: str) -> None:
    heads = tuple(torch.zeros(1, 2, 5, 4) for _ in range(3))
    with pytest.raises(ConfigurationError, match=what) as caught:
        HfAttention(AttentionLayout(3))((heads[0], heads[1], heads[2]), seen, None, 0.0, options)
    assert caught.value.code == "PT654"


def test_two_models_and_their_recomputation_keep_apart(tmp_path: Path) -> None:
    """Recomputed layers use the tokens of their own forward pass, whichever model ran since."""
    models = [taken(write_model(name, tmp_path)) for name in ("qwen3_deep", "llama")]
    generator = torch.Generator().manual_seed(0)
    batches = []
    for length in (11, 8):
        tokens = torch.randint(31, (2, length), generator=generator)
        ends = torch.rand(tokens.shape, generator=generator) < 0.3
        batches.append((tokens, tokens.roll(1), ends.int().cumsum(1).int()))
    passes = [(model, batch) for batch in batches for model in models]
    alone = []
    for model, batch in passes:
        model(*batch).backward()
        alone.append(gradients(model))
    losses = [model(*batch) for model, batch in passes]
    for loss, (model, _), expected in zip(losses, passes, alone, strict=True):
        loss.backward()
        found = gradients(model)
        assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    import transformers

    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert other.config._attn_implementation == "sdpa"


def taken(path: Path) -> HfDecoder:
    """Model whose layers use partool's attention and are recomputed in the backward pass."""
    described = describe(path)
    config = ModelConfig.model_validate(described["fields"], strict=False)
    model = HfDecoder(HfModel(path=str(path), model_type="x", architecture="X"), config)
    take_attention(model, SimpleNamespace(model=config))  # type: ignore[arg-type]
    recompute(model.layers, ["full"] * config.layers)
    materialise(model, "cpu")
    fill(model, Weights(source="hf", path=str(path)), seed=0)
    post_load(model)
    return model


def gradients(model: HfDecoder) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found
