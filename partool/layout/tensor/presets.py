"""Matrices whose arrangement no structure tells, by the model types of transformers (read in its 5.23)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from partool.layout.tensor.choice import Choice, Unclear
from partool.layout.tensor.structure import Structure
from partool.layout.tensor.types import Style

Arrangement = Literal["plain", "qkv", "per_head", "halves"]
"""qkv: all queries, then all keys, then all values; per_head: queries, keys and values of one head after the other;
halves: two matrices of the same width."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A style and how what is cut lies in the matrix."""

    style: Style
    arrangement: Arrangement = "plain"


PRESETS: dict[str, dict[str, Preset]] = {
    "gpt2": {"attn.c_attn": Preset("column", "qkv")},
    "gpt_neox": {"attention.query_key_value": Preset("column", "per_head")},
    "phi3": {"self_attn.qkv_proj": Preset("column", "qkv"), "mlp.gate_up_proj": Preset("column", "halves")},
    "glm": {"mlp.gate_up_proj": Preset("column", "halves")},
    "glm4": {"mlp.gate_up_proj": Preset("column", "halves")},
}
"""By model type and by the end of the module's name; o_proj and down_proj beside them are found by their widths."""


def preset(structure: Structure, name: str, width: int) -> Choice | Unclear | None:
    """Return what the presets say of a matrix of this output width; None: nothing."""
    for ending, found in PRESETS.get(structure.model_type, {}).items():
        if name == ending or name.endswith("." + ending):
            return arranged(structure, found, width, f"preset {structure.model_type}")
    return None


def arranged(structure: Structure, found: Preset, width: int, rule: str) -> Choice | Unclear:
    """Return the choice that an arrangement means for a matrix of this output width."""
    query, key = structure.heads * structure.head_dim, structure.kv_heads * structure.head_dim
    if found.arrangement == "halves" and width % 2 == 0:
        return Choice(found.style, rule, "two matrices, each by its inner widths", parts=(width // 2, width // 2))
    if found.arrangement == "qkv" and width == query + 2 * key:
        return Choice(found.style, rule, "queries, keys and values, each by whole heads", (query, key, key), 1, "query")
    if found.arrangement == "per_head" and structure.heads == structure.kv_heads and width == 3 * query:
        return Choice(found.style, rule, "whole heads, of queries, keys and values together", heads="query")
    if found.arrangement == "plain":
        return Choice(found.style, rule)
    return Unclear(
        f"its width of {width} is not what the preset of {structure.model_type} expects", '"NAME": column_gathered'
    )
