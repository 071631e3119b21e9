"""Models of torchtitan's registries (``torchtitan/models/*/__init__.py`` of https://github.com/pytorch/torchtitan).

Flavours that have the sizes of a published model are that model's preset. Sizes are those of 0.2 and of the
``config_registry.py`` of 2026; of the small models for tests, earlier versions had others, or left the vocabulary to
the tokenizer, and those are not in the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

Flavour = str | Mapping[str, object]
"""A preset, or the fields of the section ``model``."""

_LLAMA3_DEBUG = {
    "layers": 6, "hidden": 256, "ffn_hidden": 768, "heads": 16, "vocab": 2048, "max_position": 131072,
    "rope_theta": 500000.0,
}  # fmt: skip
_QWEN3_DEBUG = {
    "layers": 8, "hidden": 256, "ffn_hidden": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128, "vocab": 2048,
    "max_position": 4096, "rope_theta": 1000000.0, "norm_eps": 1e-6, "qk_norm": True,
}  # fmt: skip
_DEEPSEEK_DEBUG = {
    "layers": 6, "hidden": 256, "ffn_hidden": 1024, "heads": 16, "vocab": 2048, "max_position": 16384,
    "moe": {
        "experts": 8, "top_k": 3, "ffn_hidden": 256, "shared_experts": 2, "first_dense_layers": 1, "normalise": False,
    },
    "mla": {"kv_rank": 512, "nope_head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128},
}  # fmt: skip

FLAVOURS: Mapping[str, Mapping[str, Flavour]] = {
    "llama3": {
        "debugmodel": _LLAMA3_DEBUG, "8b": "llama3.1-8b", "70b": "llama3.1-70b", "405b": "llama3.1-405b",
    },
    "llama4": {"17bx16e": "llama4-scout", "17bx128e": "llama4-maverick"},
    "deepseek_v3": {
        "debugmodel": _DEEPSEEK_DEBUG, "16b": "deepseek-v2-lite", "236b": "deepseek-v2", "671b": "deepseek-v3",
    },
    "qwen3": {
        "debugmodel": _QWEN3_DEBUG | {"tied_embeddings": True},
        "debugmodel_moe": _QWEN3_DEBUG | {"moe": {"experts": 64, "top_k": 8, "ffn_hidden": 768}},
        "0.6b": "qwen3-0.6b", "1.7b": "qwen3-1.7b", "4b": "qwen3-4b", "8b": "qwen3-8b", "14b": "qwen3-14b",
        "32b": "qwen3-32b", "30b-a3b": "qwen3-30b-a3b", "235b-a22b": "qwen3-235b-a22b",
    },
}  # fmt: skip
"""Flavours in small letters, by the name of the model."""

_SAME = re.compile(r"_(flex|flex_attn|varlen|varlen_attn|sdpa|fused_qkv|irope)$")
"""Endings of flavours with the same sizes and another kernel of attention."""


def flavour(name: str, size: str) -> Flavour | None:
    """Return the model that ``model.name`` and ``model.flavor`` stand for; None if it is not known here."""
    name = re.sub(r"_(ft|simple_fsdp)$", "", name.rpartition(".")[2])
    return FLAVOURS.get(name, {}).get(_SAME.sub("", size.lower()))
