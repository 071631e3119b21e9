"""Tables of the Hugging Face names of parameters.

Rotary embeddings need no permutation: partool and transformers both rotate the two halves of a head against each other.
Only in DeepSeek's folders the rows of a rotated part are pairs; :mod:`partool_runtime.hf.stored` orders them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from partool_runtime.hf.experts import EXPERT_NAMES


class ParameterPlace(NamedTuple):
    """Location of a parameter in a Hugging Face state dict.

    In ``name``, ``{i}`` stands for the layer's number. ``{e}`` stands for an expert's number, where partool holds the
    matrices of a layer's experts row under row and folders hold a tensor for each.
    """

    name: str
    transposed: bool = False
    """True if the matrix is stored as ``[in, out]``, as in GPT-2's ``Conv1D``."""
    part: str = ""
    """``q``, ``k`` or ``v`` if one tensor holds all three, concatenated in this order along the output dimension."""
    rotated: Literal["", "heads", "shared"] = ""
    """Whose rows RoPE rotates, where folders may store these rows as pairs: the last rows of each head, or the last
    rows of the matrix."""
    stack: str = ""
    """Name of the tensor in folders that hold the matrices of a layer's experts in one tensor."""
    stacked: tuple[int, int] = (0, 1)
    """Which of how many matrices of an expert the parameter is in that tensor, concatenated along the output
    dimension."""
    turns: tuple[int, int] | None = None
    """Which of how many parameters, whose outputs take turns in one tensor of all experts (:mod:`.in_turns`)."""


LLAMA_PLACES = {
    "embed": ParameterPlace("model.embed_tokens"),
    "layers.{i}.attention_norm": ParameterPlace("model.layers.{i}.input_layernorm"),
    "layers.{i}.attention.q": ParameterPlace("model.layers.{i}.self_attn.q_proj"),
    "layers.{i}.attention.k": ParameterPlace("model.layers.{i}.self_attn.k_proj"),
    "layers.{i}.attention.v": ParameterPlace("model.layers.{i}.self_attn.v_proj"),
    "layers.{i}.attention.o": ParameterPlace("model.layers.{i}.self_attn.o_proj"),
    "layers.{i}.ffn_norm": ParameterPlace("model.layers.{i}.post_attention_layernorm"),
    "layers.{i}.ffn.gate": ParameterPlace("model.layers.{i}.mlp.gate_proj"),
    "layers.{i}.ffn.up": ParameterPlace("model.layers.{i}.mlp.up_proj"),
    "layers.{i}.ffn.down": ParameterPlace("model.layers.{i}.mlp.down_proj"),
    "final_norm": ParameterPlace("model.norm"),
    "head": ParameterPlace("lm_head"),
}
QK_NORM_PLACES = {
    "layers.{i}.attention.q_norm": ParameterPlace("model.layers.{i}.self_attn.q_norm"),
    "layers.{i}.attention.k_norm": ParameterPlace("model.layers.{i}.self_attn.k_norm"),
}
LATENT_PLACES = {
    "layers.{i}.attention.q": ParameterPlace("model.layers.{i}.self_attn.q_proj", rotated="heads"),
    "layers.{i}.attention.q_a": ParameterPlace("model.layers.{i}.self_attn.q_a_proj"),
    "layers.{i}.attention.q_a_norm": ParameterPlace("model.layers.{i}.self_attn.q_a_layernorm"),
    "layers.{i}.attention.q_b": ParameterPlace("model.layers.{i}.self_attn.q_b_proj", rotated="heads"),
    "layers.{i}.attention.kv_a": ParameterPlace("model.layers.{i}.self_attn.kv_a_proj_with_mqa", rotated="shared"),
    "layers.{i}.attention.kv_a_norm": ParameterPlace("model.layers.{i}.self_attn.kv_a_layernorm"),
    "layers.{i}.attention.kv_b": ParameterPlace("model.layers.{i}.self_attn.kv_b_proj"),
}


def expert_places(model_type: str) -> dict[str, ParameterPlace]:
    """Return the places of routers and experts, and of shared experts."""
    names = EXPERT_NAMES[model_type]
    layer, block = "layers.{i}.moe", f"model.layers.{{i}}.{names.block}"
    places = {f"{layer}.router": ParameterPlace(f"{block}.gate")}
    for ours, theirs, stack, stacked in (
        ("gate", names.gate, "gate_up_proj", (0, 2)),
        ("up", names.up, "gate_up_proj", (1, 2)),
        ("down", names.down, "down_proj", (0, 1)),
    ):
        name = f"{block}.experts.{{e}}.{theirs}"
        places[f"{layer}.experts.{ours}"] = ParameterPlace(name, stack=f"{block}.experts.{stack}", stacked=stacked)
        places[f"{layer}.shared.{ours}"] = ParameterPlace(f"{block}.shared_experts.{theirs}")
    return places


_GPT_OSS, _OF_EXPERTS = "model.layers.{i}", "model.layers.{i}.mlp.experts"
GPT_OSS_PLACES = {
    "layers.{i}.attention.sinks": ParameterPlace(f"{_GPT_OSS}.self_attn.sinks"),
    "layers.{i}.moe.router.weight": ParameterPlace(f"{_GPT_OSS}.mlp.router.weight"),
    "layers.{i}.moe.router.logit_bias": ParameterPlace(f"{_GPT_OSS}.mlp.router.bias"),
    "layers.{i}.moe.experts.gate.weight": ParameterPlace(f"{_OF_EXPERTS}.gate_up_proj", turns=(0, 2)),
    "layers.{i}.moe.experts.up.weight": ParameterPlace(f"{_OF_EXPERTS}.gate_up_proj", turns=(1, 2)),
    "layers.{i}.moe.experts.down.weight": ParameterPlace(f"{_OF_EXPERTS}.down_proj", turns=(0, 1)),
    "layers.{i}.moe.experts.gate.bias": ParameterPlace(f"{_OF_EXPERTS}.gate_up_proj_bias", turns=(0, 2)),
    "layers.{i}.moe.experts.up.bias": ParameterPlace(f"{_OF_EXPERTS}.gate_up_proj_bias", turns=(1, 2)),
    "layers.{i}.moe.experts.down.bias": ParameterPlace(f"{_OF_EXPERTS}.down_proj_bias", turns=(0, 1)),
}
PREDICTION_PLACES = {
    "predictions.{p}.embedding_norm": ParameterPlace("model.layers.{i}.enorm"),
    "predictions.{p}.hidden_norm": ParameterPlace("model.layers.{i}.hnorm"),
    "predictions.{p}.projection": ParameterPlace("model.layers.{i}.eh_proj"),
    "predictions.{p}.final_norm": ParameterPlace("model.layers.{i}.shared_head.norm"),
}
"""Places of what modules of further tokens have beside their blocks, which are layers after the model's."""
SELECTION_BIAS_PLACES = {
    "layers.{i}.moe.router.bias": ParameterPlace("model.layers.{i}.mlp.gate.e_score_correction_bias"),
}
GPT2_PLACES = {
    "embed": ParameterPlace("transformer.wte"),
    "position": ParameterPlace("transformer.wpe"),
    "layers.{i}.attention_norm": ParameterPlace("transformer.h.{i}.ln_1"),
    "layers.{i}.attention.q": ParameterPlace("transformer.h.{i}.attn.c_attn", transposed=True, part="q"),
    "layers.{i}.attention.k": ParameterPlace("transformer.h.{i}.attn.c_attn", transposed=True, part="k"),
    "layers.{i}.attention.v": ParameterPlace("transformer.h.{i}.attn.c_attn", transposed=True, part="v"),
    "layers.{i}.attention.o": ParameterPlace("transformer.h.{i}.attn.c_proj", transposed=True),
    "layers.{i}.ffn_norm": ParameterPlace("transformer.h.{i}.ln_2"),
    "layers.{i}.ffn.up": ParameterPlace("transformer.h.{i}.mlp.c_fc", transposed=True),
    "layers.{i}.ffn.down": ParameterPlace("transformer.h.{i}.mlp.c_proj", transposed=True),
    "final_norm": ParameterPlace("transformer.ln_f"),
    "head": ParameterPlace("lm_head"),
}
