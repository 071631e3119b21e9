"""Reads the model from Megatron-LM's arguments.

Meanings and defaults are those of ``validate_args`` in ``megatron/training/arguments.py`` and of
``megatron/core/transformer/transformer_config.py`` (https://github.com/NVIDIA/Megatron-LM, commit 000c4ac2, core 0.15).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from partool.engines.fields import complaint
from partool.engines.megatron_experts import by_layer, expert_numbers
from partool.engines.recipes import carried
from partool.engines.settings import Sheet, shown, whole_of
from partool.spec.numbers import MOST_LAYERS

_TOKENIZERS = {"Llama2Tokenizer": 32000, "GPT2BPETokenizer": 50257}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm", "layernorm": "layernorm", "rmsnorm": "rmsnorm"}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}

_OF_EXPERTS = """
moe-expert-capacity-factor moe-train-capacity-factor moe-ffn-hidden-size moe-layer-freq expert-interval topk
moe-router-enable-expert-bias moe-router-force-load-balancing moe-router-group-topk moe-router-num-groups
moe-router-pre-softmax moe-router-score-function moe-router-topk moe-shared-expert-intermediate-size
num-shared-experts disable-moe-token-dropping
"""
"""Arguments that say nothing without experts."""


def model_of(sheet: Sheet, tensor: int) -> dict[str, object]:
    """Return the section ``model``; the vocabulary is padded for ``tensor`` ranks."""
    model: dict[str, Any] = {
        field: sheet.integer(name, to=f"model.{field}")
        for name, field in (
            ("num-layers", "layers"), ("hidden-size", "hidden"), ("ffn-hidden-size", "ffn_hidden"),
            ("num-attention-heads", "heads"), ("kv-channels", "head_dim"), ("max-position-embeddings", "max_position"),
        )
    }  # fmt: skip
    model["kv_heads"] = _groups(sheet)
    model["vocab"] = _vocabulary(sheet, tensor)
    model["norm"] = chosen(sheet, "normalization", "LayerNorm", _NORMS, to="model.norm")
    model["activation"] = _activation(sheet)
    if model["ffn_hidden"] is None and model["hidden"] is not None:
        gated = model["activation"] == "swiglu"
        model["ffn_hidden"] = int(4 * model["hidden"] * 2 / 3 / 64) * 64 if gated else 4 * model["hidden"]
    model["position"] = _position(sheet)
    model |= _numbers(sheet)
    bias = not sheet.switch("disable-bias-linear", to="model.ffn_bias")
    wanted = sheet.switch("add-qkv-bias", to="model.qkv_bias")
    model["qkv_bias"] = bias or bool(wanted)
    model |= {"out_bias": bias, "ffn_bias": bias, "attention": _window(sheet)}
    model["qk_norm"] = bool(sheet.switch("qk-layernorm", to="model.qk_norm"))
    model["tied_embeddings"] = not sheet.switch("untie-embeddings-and-output-weights", to="model.tied_embeddings")
    if sheet.switch("multi-latent-attention", to="model.mla") or "qk-nope-head-dim" in sheet.settings:
        model["mla"], model["qk_norm"] = _latent(sheet), False
        for name in ("kv_heads", "head_dim"):
            model.pop(name, None)
    for name in ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim"):
        sheet.get(name, to=sheet.carried.get(name, "nothing: there is no latent attention"))
    numbers = expert_numbers(sheet)
    if max(numbers, default=0) > 1:
        model["moe"] = _experts(sheet, model, numbers)
    for name in sheet.settings if "moe" not in model else ():
        if name in _OF_EXPERTS.split():
            sheet.get(name, to="nothing: there are no experts")
    return {field: value for field, value in model.items() if value is not None}


def _numbers(sheet: Sheet) -> dict[str, Any]:
    """Return fields that change values, not sizes."""
    fields: dict[str, Any] = {"init_std": carried(sheet, "init-method-std", "model.init_std")}
    for field, names in (
        ("norm_eps", ("norm-epsilon", "layernorm-epsilon")),
        ("rope_theta", ("rotary-base", "rotary-position-embeddings-theta")),
    ):
        values = [carried(sheet, name, f"model.{field}") for name in names]
        fields[field] = next((value for value in values if value), None)
    factor = carried(sheet, "rope-scaling-factor", "model.rope_scaling")
    if sheet.switch("use-rope-scaling", to="model.rope_scaling"):
        # The rule of Llama 3.1 as Megatron-LM has it, megatron/core/models/common/embeddings/rotary_pos_embedding.py.
        fields["rope_scaling"] = {"kind": "llama3", "factor": factor or 8.0, "original_max_position": 8192}
    return fields


def _groups(sheet: Sheet) -> int | None:
    heads: int | None = sheet.integer("num-key-value-heads", to="model.kv_heads")
    if sheet.switch("group-query-attention", to="model.kv_heads"):
        groups: int = sheet.integer("num-query-groups", 1, to="model.kv_heads")
        return groups if heads is None else heads
    if heads is not None:
        return heads
    if "num-query-groups" in sheet.settings:
        sheet.say(
            "PT821", "error", "num-query-groups has no effect without --group-query-attention",
            "add --group-query-attention, or remove --num-query-groups", "num-query-groups",
        )  # fmt: skip
        sheet.get("num-query-groups", to="model.kv_heads")
    return None


def _vocabulary(sheet: Sheet, tensor: int) -> int | None:
    """Return the rows of the embedding: Megatron-LM pads a tokenizer's size for its tensor ranks.

    ``NullTokenizer`` has one token more than it is told (until core 0.16).
    """
    names = ("padded-vocab-size", "pad-vocab-size-to", "vocab-size")
    unit: int = sheet.integer("make-vocab-size-divisible-by", 128, to="model.vocab") * tensor
    exact = sheet.switch("no-pad-vocab-size", to="model.vocab")
    sizes: list[int | None] = [sheet.integer(name, to="model.vocab") for name in names]
    padded, filled, size = sizes
    if padded is not None or filled is not None:
        return filled if padded is None else padded
    kind = sheet.settings.get("tokenizer-type")
    name = str(kind.value) if kind else ""
    size = _TOKENIZERS.get(name) if size is None else size + (name == "NullTokenizer")
    if size is None:
        what = "the arguments do not say how large the vocabulary is: the tokenizer's files do"
        sheet.lacks("model.vocab", what, "tokenizer-type")
        return None
    return size if exact else -(-size // unit) * unit


def _activation(sheet: Sheet) -> str:
    if sheet.switch("swiglu", to="model.activation"):
        return "swiglu"
    if sheet.switch("quick-geglu", to="model.activation"):
        return "geglu"
    if sheet.switch("squared-relu", to="model.activation"):
        sheet.say(
            "PT824", "note", "squared-relu is priced as relu", "the price is that of a network with relu",
            "squared-relu",
        )  # fmt: skip
        return "relu"
    return "gelu_tanh" if sheet.switch("openai-gelu", to="model.activation") else "gelu"


def _position(sheet: Sheet) -> str:
    position = chosen(sheet, "position-embedding-type", "learned_absolute", _POSITIONS, to="model.position")
    return "rope" if sheet.switch("use-rotary-position-embeddings", to="model.position") else position


def _window(sheet: Sheet) -> dict[str, Any] | None:
    """Return attention to a window: ``window-size`` has the tokens before and after a token."""
    given = sheet.get("window-size", to="model.attention.window")
    every = sheet.get("window-attn-skip-freq", to="model.attention.layer_types")
    if given is None:
        return None
    before = str(given[0] if isinstance(given, tuple) else given).strip("()").split(",")[0]
    width, step = whole_of(before), None if every is None else whole_of(every)
    wrong = width is None or complaint("model.attention.window", width + 1) is not None
    if width is None or wrong or (every is not None and not 1 <= (step or 0) <= MOST_LAYERS):
        names = ("window-size", "window-attn-skip-freq")
        sheet.say("PT823", "error", f"the window {shown(given)}, {shown(every)} has no counterpart", "BEFORE,0", *names)
        return None
    pattern = ["sliding"] * (step - 1) + ["full"] if step else ["sliding"]
    return {"window": width + 1, "layer_types": {"pattern": pattern}}


def chosen(sheet: Sheet, name: str, default: str, counterparts: Mapping[str, str], *, to: str) -> str:
    """Return what a spec has in place of an argument's word; a finding for a word that is not ``counterparts``."""
    word = str(sheet.get(name, default, to=to))
    if word not in counterparts:
        sheet.say("PT823", "error", f"{name} {word} has no counterpart here", " or ".join(counterparts), name)
    return counterparts.get(word, counterparts[default])


def _latent(sheet: Sheet) -> dict[str, Any]:
    plain = sheet.integer("qk-nope-head-dim", 128, to="model.mla.nope_head_dim")
    rotated = sheet.integer("qk-rope-head-dim", 64, to="model.mla.rope_head_dim")
    ranks = {
        "q_rank": sheet.integer("q-lora-rank", to="model.mla.q_rank"),
        "kv_rank": sheet.integer("kv-lora-rank", 32, to="model.mla.kv_rank"),
        "nope_head_dim": sheet.integer("qk-head-dim", plain, to="model.mla.nope_head_dim"),
        "rope_head_dim": sheet.integer("qk-pos-emb-head-dim", rotated, to="model.mla.rope_head_dim"),
        "v_head_dim": sheet.integer("v-head-dim", 128, to="model.mla.v_head_dim"),
    }
    return {name: value for name, value in ranks.items() if value is not None}


def _experts(sheet: Sheet, model: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
    inner = sheet.integer("moe-ffn-hidden-size", model.get("ffn_hidden"), to="model.moe.ffn_hidden")
    theirs = "deepspeed" in sheet.settings
    topk = sheet.integer("topk", 1 if theirs else 2, to="model.moe.top_k")
    trained = sheet.number("moe-train-capacity-factor", 1.0 if theirs else None, to="model.moe.capacity")
    if sheet.switch("disable-moe-token-dropping", to="model.moe.capacity"):
        trained = None
    fields: dict[str, Any] = {
        "experts": numbers[0],
        "top_k": sheet.integer("moe-router-topk", topk, to="model.moe.top_k"),
        "ffn_hidden": inner,
        "scores": str(sheet.get("moe-router-score-function", "softmax", to="model.moe.scores")),
        "groups": sheet.integer("moe-router-num-groups", 1, to="model.moe.groups"),
        "top_groups": sheet.integer("moe-router-group-topk", 1, to="model.moe.top_groups"),
        "capacity": sheet.number("moe-expert-capacity-factor", trained, to="model.moe.capacity"),
    }
    for name, field in (
        ("moe-router-topk-scaling-factor", "scaling_factor"), ("moe-aux-loss-coeff", "aux_loss"),
        ("moe-z-loss-coeff", "z_loss"),
    ):  # fmt: skip
        fields[field] = carried(sheet, name, f"model.moe.{field}")
    rate = carried(sheet, "moe-router-bias-update-rate", "model.moe.bias_rate")
    if sheet.switch("moe-router-enable-expert-bias", to="model.moe.bias_rate"):
        fields["bias_rate"] = 0.001 if rate is None else rate
    if sheet.switch("moe-router-force-load-balancing", to="model.moe.routing"):
        fields["routing"] = "balanced"
    early = sheet.switch("moe-router-pre-softmax", to="model.moe.normalise") and fields["scores"] == "softmax"
    if early or fields["top_k"] == 1:
        fields["normalise"] = False
    layers = model.get("layers") or 0
    fields |= _shared(sheet, inner) | _frequency(sheet, layers, "2" if theirs else "1")
    fields |= by_layer(sheet, numbers, layers, fields)
    return {name: value for name, value in fields.items() if value is not None}


def _shared(sheet: Sheet, inner: Any) -> dict[str, int]:
    number: int = sheet.integer("num-shared-experts", 0, to="model.moe.shared_experts", least=0)
    width: int = sheet.integer("moe-shared-expert-intermediate-size", 0, to="model.moe.ffn_hidden", least=0)
    if not width or not inner:
        return {"shared_experts": number} if number else {}
    shared, rest = divmod(width, int(inner))
    if rest:
        sheet.say(
            "PT823", "error", f"the shared expert has width {width}, which is no multiple of an expert's {inner}",
            "a multiple, or price it without: --set model.moe.shared_experts=0",
            "moe-shared-expert-intermediate-size",
        )  # fmt: skip
    return {"shared_experts": shared}


def _frequency(sheet: Sheet, layers: int, default: str) -> dict[str, int]:
    """Return which layers have experts: ``moe-layer-freq`` is every n-th, or a list of 0 and 1 as Python writes it.

    Layers are counted from 0: of every ``n`` layers, the first has experts. Megatron-DeepSpeed's ``expert-interval``
    counts from 1, which is as many layers.
    """
    every = sheet.get("expert-interval", default, to="model.moe.every")
    given = sheet.get("moe-layer-freq", every, to="model.moe.first_dense_layers")
    names = ("moe-layer-freq", "expert-interval")
    if (number := whole_of(given)) is not None:
        if reason := complaint("model.moe.every", number):
            sheet.say("PT820", "error", f"moe-layer-freq is {number}, and {reason}", "a number from 1 on", *names)
        return {} if number == 1 or reason else {"every": number}
    pattern = _listed(str(given))
    dense = pattern.index(1) if pattern and 1 in pattern else -1
    if pattern is None or len(pattern) != layers or dense < 0 or 0 in pattern[dense:]:
        sheet.say(
            "PT823", "error", f"moe-layer-freq {shown(given)} is not dense layers followed by layers with experts",
            "a number, or ([0]*n+[1]*m) with n + m layers", "moe-layer-freq",
        )  # fmt: skip
        return {}
    return {"first_dense_layers": dense}


def _listed(text: str) -> list[int] | None:
    """Return the list that an expression of lists, ``+`` and ``*`` stands for, without evaluating anything else."""

    def value(node: ast.expr) -> list[int]:
        if isinstance(node, ast.List):
            return [whole_of(each.value) or 0 for each in node.elts if isinstance(each, ast.Constant)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return value(node.left) + value(node.right)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
            times, part = whole_of(node.right.value) or 0, value(node.left)
            if times * len(part) > MOST_LAYERS:
                raise ValueError("more layers than a model has")
            return part * times
        raise ValueError(ast.dump(node))

    try:
        return value(ast.parse(text.strip("'\""), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
