"""Adapters of models that transformers builds, as the predictions of the nearest of partool's models see them."""

from __future__ import annotations

from partool.layout.parameters import parameters, projection_of
from partool.layout.tensor.adapters import adapted
from partool.layout.tensor.cutting import collapsed_name
from partool.layout.tensor.structure import Structure
from partool.spec.adapter import AdapterSpec, LowRank
from partool.spec.model import ModelConfig

_QUERIES_KEYS_VALUES = dict.fromkeys(("qkv", "query_key_value", "Wqkv", "c_attn", "qkv_proj"), ("q", "k", "v"))
_PRICED = {
    **_QUERIES_KEYS_VALUES,
    **dict.fromkeys(("query", "q_lin"), ("q",)),
    **dict.fromkeys(("key", "k_lin"), ("k",)),
    **dict.fromkeys(("value", "v_lin"), ("v",)),
    **dict.fromkeys(("dense", "out", "wo"), ("o",)),
    **dict.fromkeys(("gate_up", "fc1_gate"), ("gate", "up")),
    **dict.fromkeys(("w1",), ("gate",)),
    **dict.fromkeys(("w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h"), ("up",)),
    **dict.fromkeys(("w2", "fc2", "fc_out", "dense_4h_to_h"), ("down",)),
    "kv_a_proj_with_mqa": ("kv_a",),
}
"""Last parts of names of linear modules in transformers (without ``_proj``) → partool's projections."""


def priced_adapter(structure: Structure, adapter: AdapterSpec, model: ModelConfig) -> LowRank:
    """Return the adapter for predictions: on the projections that the adapted modules are in partool's decoder.

    Where none of the modules' names says that, it is priced as one of all projections but those of experts.
    """
    last = {name.rpartition(".")[2] for name in adapted(structure, adapter.form)}
    wanted = {part for name in last for part in _PRICED.get(name, (name.removesuffix("_proj"),))}
    names = {
        collapsed_name(name)
        for info in parameters(model)
        if (name := projection_of(info)) is not None and info.kind != "expert"
    }
    chosen = {name for name in names if name.rpartition(".")[2] in wanted} or names
    return adapter.form.model_copy(update={"targets": tuple(sorted(chosen))})
