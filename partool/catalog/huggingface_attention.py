"""The parts of a Hugging Face ``config.json`` that say how layers attend: rotary positions and windows."""

from __future__ import annotations

from typing import Any

from partool.diagnostics.record import Diagnostic

CONFIG_PATH = ("model", "config")
LATENT = ("deepseek_v2", "deepseek_v3")
"""Model types with latent attention."""


def config_error(code: str, message: str, help_text: str = "") -> Diagnostic:
    """Return an error about the configuration that a spec names."""
    return Diagnostic(code, message, path=CONFIG_PATH, help=help_text)


def rope(config: dict[str, Any], findings: list[Diagnostic]) -> dict[str, Any]:
    """Return the fields of rotary positions; add what partool lacks to ``findings``."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    kind_of_rope = given.get("rope_type", given.get("type", "default"))
    fields: dict[str, Any] = {"rope_theta": float(theta)}
    if kind_of_rope == "llama3":
        fields["rope_scaling"] = {
            "factor": float(given["factor"]),
            "low_freq_factor": float(given.get("low_freq_factor", 1.0)),
            "high_freq_factor": float(given.get("high_freq_factor", 4.0)),
            "original_max_position": int(given["original_max_position_embeddings"]),
        }
    elif kind_of_rope == "yarn":
        fields["rope_scaling"] = _yarn(given, config, findings)
    elif kind_of_rope != "default":
        text = f"RoPE scaling of type {kind_of_rope!r} is not supported"
        findings.append(config_error("PT253", text, "supported: none, llama3, yarn"))
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        findings.append(config_error("PT253", "partial_rotary_factor other than 1 is not supported"))
    return fields


def _yarn(rope: dict[str, Any], config: dict[str, Any], findings: list[Diagnostic]) -> dict[str, Any]:
    if rope.get("attention_factor") is not None:
        help = "give mscale and mscale_all_dim, from which it follows"
        findings.append(config_error("PT253", "attention_factor of yarn is not supported", help))
    original = int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
    factor = rope.get("factor") or config["max_position_embeddings"] / original
    fields = {"kind": "yarn", "factor": float(factor), "original_max_position": original}
    if not rope.get("truncate", True):
        fields["truncate"] = False
    names = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return fields | {name: float(rope[name]) for name in names if rope.get(name)}


def windows(config: dict[str, Any], kind: str, findings: list[Diagnostic]) -> dict[str, Any]:
    """Return the window and the layers that have it, or nothing; add what partool lacks to ``findings``."""
    layers = int(config.get("num_hidden_layers", 32))
    window = config.get("sliding_window")
    if kind in ("llama", *LATENT) or window is None:
        return {}
    if kind in ("qwen2", "qwen3", "qwen3_moe") and not config.get("use_sliding_window", False):
        return {}
    names = {"full_attention": "full", "sliding_attention": "sliding"}
    types = config.get("layer_types")
    if types is None and kind == "gpt_oss":
        types = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    if types is None:
        first = int(config["max_window_layers"]) if kind in ("qwen2", "qwen3") else 0
        return {"window": int(window), "layer_types": tuple("sliding" if i >= first else "full" for i in range(layers))}
    if strange := sorted(set(types) - set(names)):
        findings.append(config_error("PT253", f"layer_types {', '.join(strange)} are not supported"))
        return {}
    return {"window": int(window), "layer_types": tuple(names[name] for name in types)}
