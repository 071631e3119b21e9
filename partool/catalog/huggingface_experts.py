"""The part of a Hugging Face ``config.json`` that describes mixtures of experts, as fields of ``Moe``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 14336},
    "gpt_oss": {"num_local_experts": 128, "num_experts_per_tok": 4, "intermediate_size": 2880},
    "qwen3_moe": {"decoder_sparse_step": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "deepseek_v2": {
        "first_k_dense_replace": 0, "n_shared_experts": 2, "n_routed_experts": 64, "moe_intermediate_size": 1407,
        "topk_method": "greedy",
    },
    "deepseek_v3": {
        "first_k_dense_replace": 3, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
}  # fmt: skip
"""Values of transformers' configuration classes, by ``model_type``, where those classes and partool differ.

``topk_method`` and ``scoring_func`` of DeepSeek-V3 are what its code in transformers computes.
"""
KEYS = frozenset({
    "num_local_experts", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step",
    "mlp_only_layers", "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "moe_layer_freq",
    "output_router_logits", "router_aux_loss_coef", "norm_topk_prob", "n_group", "topk_group", "topk_method",
    "scoring_func", "routed_scaling_factor", "aux_loss_alpha", "seq_aux",
})  # fmt: skip
"""Keys that this module reads."""

_BIAS_RATE = 0.001
"""Change of selection biases per step with which DeepSeek-V3 was trained (arXiv 2412.19437, section 4.2)."""
_AUX_COEFFICIENT = 0.001
"""``router_aux_loss_coef`` of transformers' configuration classes."""


def experts(config: dict[str, Any], kind: str) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the fields of ``Moe``, or None if all layers are dense; and texts about what partool lacks.

    ``config`` has the values of :data:`DEFAULTS` where the file lacks them. Raises KeyError for a key that has none.
    """
    if kind not in DEFAULTS:
        return None, []
    problems: list[str] = []
    read = {"mixtral": _mixtral, "gpt_oss": _gpt_oss, "qwen3_moe": _qwen3}.get(kind, _deepseek)
    fields = read(config, kind, problems)
    return fields, problems


def _mixtral(config: dict[str, Any], kind: str, problems: list[str]) -> dict[str, Any]:
    del kind, problems
    return {
        "experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "ffn_hidden": config["intermediate_size"],
        "normalise": True,
        "aux_loss": _aux_loss(config, dense=0, every=1),
    }


def _gpt_oss(config: dict[str, Any], kind: str, problems: list[str]) -> dict[str, Any]:
    """Return the fields of GPT-OSS: a softmax of the chosen logits is the softmax of all, divided by its chosen sum."""
    return _mixtral(config, kind, problems) | {"bias": True}


def _qwen3(config: dict[str, Any], kind: str, problems: list[str]) -> dict[str, Any] | None:
    del kind
    step = int(config["decoder_sparse_step"])
    places: dict[str, int] | None = {"first_dense_layers": step - 1, "every": step}
    dense = set(config.get("mlp_only_layers") or ())
    if dense:
        layers = int(config["num_hidden_layers"])
        sparse = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
        if not sparse:
            return None
        places = _places(sparse, layers)
    if places is None:
        problems.append("mlp_only_layers that leave layers with experts at uneven distances")
    return {
        "experts": config.get("num_experts", config.get("num_local_experts", 128)),
        "top_k": config["num_experts_per_tok"],
        "ffn_hidden": config["moe_intermediate_size"],
        **(places or {}),
        "normalise": bool(config.get("norm_topk_prob", False)),
        "aux_loss": _aux_loss(config, dense=places["first_dense_layers"], every=places["every"]) if places else 0.0,
    }


def _places(sparse: Sequence[int], layers: int) -> dict[str, int] | None:
    """Return the fields that say which layers have experts; None if their distances differ."""
    first = sparse[0]
    every = sparse[1] - first if len(sparse) > 1 else max(1, layers - first)
    fits = list(sparse) == list(range(first, layers, every))
    return {"first_dense_layers": first, "every": every} if fits else None


def _aux_loss(config: dict[str, Any], *, dense: int, every: int) -> float:
    """Return the coefficient of the load-balancing loss, where each ``every``-th layer after ``dense`` has experts.

    transformers adds the loss only if it returns the routers' logits. Its loss is ``top_k`` for an even load, as
    experts' shares of the choices are divided by the number of tokens; partool's is 1. transformers has one loss of the
    mean counts and mean scores of all layers, partool the sum of the layers' own losses: where layers have equal loads,
    gradients are equal if the coefficient is divided by the number of layers with experts.
    """
    if not config.get("output_router_logits", False):
        return 0.0
    layers = len(range(dense, int(config["num_hidden_layers"]), every))
    coefficient = config.get("router_aux_loss_coef", _AUX_COEFFICIENT)
    return float(coefficient * config["num_experts_per_tok"] / max(layers, 1))


def _deepseek(config: dict[str, Any], kind: str, problems: list[str]) -> dict[str, Any] | None:
    first, layers = int(config["first_k_dense_replace"]), config.get("num_hidden_layers")
    if layers is not None and first >= layers:
        return None
    if config.get("moe_layer_freq", 1) != 1:
        problems.append(f"moe_layer_freq: {config['moe_layer_freq']}, which transformers ignores,")
    choice = _v3_choice if kind == "deepseek_v3" else _v2_choice
    return {
        "experts": config.get("n_routed_experts", config.get("num_local_experts", 256)),
        "top_k": config["num_experts_per_tok"],
        "ffn_hidden": config["moe_intermediate_size"],
        "shared_experts": config["n_shared_experts"],
        "first_dense_layers": first,
        "scaling_factor": float(config.get("routed_scaling_factor", 1.0)),
        # The loss of DeepSeek's own code, which is 1 for an even load; transformers has none.
        "aux_loss": float(config.get("aux_loss_alpha", 0.0)),
        "aux_scope": "sequence" if config.get("seq_aux", True) else "micro_batch",
        **choice(config, problems),
    }


def _v3_choice(config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the fields of how DeepSeek-V3 chooses experts (arXiv 2412.19437, section 2.1.2)."""
    _only(config, "topk_method", ("noaux_tc",), problems)
    _only(config, "scoring_func", ("sigmoid",), problems)
    return {
        "scores": "sigmoid",
        "normalise": bool(config["norm_topk_prob"]),
        "groups": config["n_group"],
        "top_groups": config["topk_group"],
        "group_score": "top2",
        "bias_rate": _BIAS_RATE,
    }


def _v2_choice(config: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Return the fields of how DeepSeek-V2 chooses experts (arXiv 2405.04434, section 2.2)."""
    _only(config, "topk_method", ("greedy", "group_limited_greedy"), problems)
    _only(config, "scoring_func", ("softmax",), problems)
    if config.get("norm_topk_prob", False):
        problems.append("norm_topk_prob: true of DeepSeek-V2, which transformers ignores,")
    grouped = config["topk_method"] == "group_limited_greedy"
    groups = {"groups": config["n_group"], "top_groups": config["topk_group"], "group_score": "max"} if grouped else {}
    return {"scores": "softmax", "normalise": False, **groups}


def _only(config: dict[str, Any], key: str, allowed: tuple[str, ...], problems: list[str]) -> None:
    """Add a text to ``problems`` if a key has another than the ``allowed`` values."""
    if config.get(key, allowed[0]) not in allowed:
        problems.append(f"{key}: {config[key]!r}")
