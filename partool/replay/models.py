"""Models of rows: dimensions as printed, else by name, else from the number of parameters."""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from partool.catalog.lookup import table
from partool.replay.cells import Cells
from partool.replay.experts import experts_of, has_experts
from partool.spec.experts import Moe
from partool.spec.model import ModelConfig

DIMENSIONS = Path(__file__).parent / "model_dims.csv"
_GPT_SHAPES = (
    (0.125, 12, 768, 12), (0.35, 24, 1024, 16), (0.76, 24, 1536, 16), (1.3, 24, 2048, 16), (1.7, 24, 2304, 24),
    (2.7, 32, 2560, 32), (3.6, 30, 3072, 32), (6.7, 32, 4096, 32), (7.5, 36, 4096, 32), (10.0, 50, 4096, 32),
    (13.0, 40, 5120, 40), (18.4, 40, 6144, 48), (22.0, 48, 6144, 64), (30.0, 48, 7168, 56), (39.1, 48, 8192, 64),
    (52.0, 64, 8192, 64), (76.1, 60, 10240, 80), (104.0, 64, 11600, 80), (145.6, 80, 12288, 96),
    (174.6, 96, 12288, 96), (310.1, 96, 16384, 128), (529.6, 105, 20480, 128), (1008.0, 128, 25600, 160),
)  # fmt: skip
"""Billions of parameters, layers, width and heads: GPT-3 (arXiv 2005.14165, table 2.1), Megatron-LM (arXiv 2104.04473,
table 1), BLOOM's forerunners and vTrain."""
_LLAMA_LIKE = (
    "llama",
    "qwen",
    "mistral",
    "mixtral",
    "deepseek",
    "yi-",
    "gemma",
    "phi",
    "olmo",
    "smol",
    "apertus",
    "kimi",
)
_ALIASES = {
    "gpt21.5b": "gpt2xl", "smollm135m": "smollm2135m", "smollm360m": "smollm2360m", "smollm1.7b": "smollm21.7b",
    "mtnlg530b": "megatron530b",
}  # fmt: skip
"""Other names of presets, both as :func:`plain` writes them."""
_LARGE = 10**7


def model_of(cells: Cells) -> ModelConfig | None:
    """Return the model of a row, or None where its dimensions cannot be found."""
    fields = _named(cells.text("model")) or {}
    printed = _printed(cells)
    if "hidden" in printed and fields and printed["hidden"] != fields["hidden"]:
        fields = {}
    fields = {**fields, **printed}
    if not {"layers", "hidden"} <= fields.keys():
        fields = {**_by_size(cells), **fields} if not printed else {**_by_size(cells), **printed}
    if not {"layers", "hidden"} <= fields.keys():
        return None
    if "moe" not in fields and has_experts(cells) and experts_of(cells) is None:
        return None  # not one dense network in the place of experts whose number is unknown
    return _completed(fields, cells)


def dimensions_known(cells: Cells) -> bool:
    """Return True if a row states its model's layers and width, or names or sizes a model with published dimensions."""
    if {"layers", "hidden"} <= {**(_named(cells.text("model")) or {}), **_printed(cells)}.keys():
        return True
    billions = _billions(cells)
    return billions is not None and any(abs(size / billions - 1) < 0.02 for size, *_ in _GPT_SHAPES)


def hybrid(name: str) -> bool:
    """Return True for models whose layers are not all attention with a feed-forward network."""
    return bool(
        re.search(r"mamba|jamba|zamba|rwkv|nemotron[-_ ]?(h\b|h[-_ ]?\d|3\b|nano)|qwen3[-_ .]?next", name.lower())
    )


def _printed(cells: Cells) -> dict[str, Any]:
    names = {
        "layers": "n_layers", "hidden": "hidden", "ffn_hidden": "ffn_hidden", "heads": "n_heads",
        "kv_heads": "n_kv_heads", "vocab": "vocab",
    }  # fmt: skip
    values = {field: cells.count(column) for field, column in names.items()}
    return {field: value for field, value in values.items() if 0 < value < _LARGE}


def _completed(fields: dict[str, Any], cells: Cells) -> ModelConfig | None:
    """Fill in what follows from the family: GPT (LayerNorm, GELU, learned positions, tied) or Llama."""
    name = cells.text("model").lower()
    fields = dict(fields)
    fields.setdefault("heads", max(fields["hidden"] // 128, 1))
    fields.setdefault("kv_heads", fields["heads"])
    if fields["heads"] % fields["kv_heads"]:
        fields["kv_heads"] = fields["heads"]
    fields.setdefault("head_dim", max(fields["hidden"] // fields["heads"], 1))
    experts = None if "moe" in fields else experts_of(cells)
    if experts is not None:
        fields.setdefault("activation", "swiglu")
    if "activation" not in fields and not any(part in name for part in _LLAMA_LIKE):
        fields |= {"norm": "layernorm", "activation": "gelu", "position": "learned", "tied_embeddings": True}
        fields |= {"qkv_bias": True, "out_bias": True, "ffn_bias": True}
    gated = fields.get("activation", "swiglu") in ("swiglu", "geglu")
    fields.setdefault("ffn_hidden", -(-8 * fields["hidden"] // (3 * 256)) * 256 if gated else 4 * fields["hidden"])
    if experts is not None:
        fields["moe"] = {**experts, "ffn_hidden": fields["ffn_hidden"]}
    fields.setdefault("vocab", 32000 if gated else 51200)
    if fields.get("position", "rope") == "rope" and fields["head_dim"] % 2:
        fields["head_dim"] += 1
    learned = fields.get("position", "rope") == "learned"
    fields["max_position"] = max(cells.count("seq_len"), 2048) if learned else 1 << 21
    if len(fields.get("layer_types", ())) != fields["layers"]:
        fields.pop("layer_types", None)
    try:
        return ModelConfig.model_validate(fields)
    except ValidationError:
        return None


def plain(name: str) -> str:
    """Return a name without what different tables write differently: ``LLAMA3.1_405B`` as ``llama3.1405b``."""
    return re.sub(r"[^a-z0-9.]", "", name.lower().split("/")[-1].replace("meta-", ""))


@cache
def _models_by_name() -> dict[str, dict[str, Any]]:
    presets = _presets()
    models: dict[str, dict[str, Any]] = {}
    with DIMENSIONS.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            # Presets know what the table has no columns for: latent attention, experts in every n-th layer.
            fields = presets.get(plain(_sizeless(row["model_key"]))) or _tabled(row)
            for name in (row["model_key"], *row["aliases"].split("|")):
                if name and fields:
                    models[plain(name)] = fields
    models |= {name: fields for name, fields in presets.items() if name not in models}
    return models | {name: presets[preset] for name, preset in _ALIASES.items() if preset in presets}


def _presets() -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = {}
    for name, entry in table("models").items():
        fields = dict(entry["fields"])
        attention = fields.pop("attention", None)
        if attention:
            fields |= {"window": attention["window"], "layer_types": ("sliding",) * fields["layers"]}
        fields.setdefault("head_dim", fields["hidden"] // fields["heads"])
        fields.setdefault("activation", "swiglu")
        models[plain(name)] = fields
    return models


def _sizeless(name: str) -> str:
    """Return a name without its total size: ``DeepSeek-V3-671B`` as ``DeepSeek-V3``."""
    return re.sub(r"[-_ ]\d+(?:\.\d+)?[bBtT]\b", "", name)


def _tabled(row: dict[str, str]) -> dict[str, Any] | None:
    """Return the fields of a line of the table of dimensions; None for latent attention, which presets describe."""
    if not row["n_kv_heads"].isdigit():
        return None
    columns = {"layers": "n_layers", "hidden": "hidden", "ffn_hidden": "ffn_hidden", "heads": "n_heads"}
    columns |= {"kv_heads": "n_kv_heads", "head_dim": "head_dim", "vocab": "vocab"}
    fields: dict[str, Any] = {field: int(row[column]) for field, column in columns.items()}
    gated = row["gated_mlp"] == "1"
    fields |= {"activation": "swiglu" if gated else "gelu", "tied_embeddings": row["tied_embeddings"] == "1"}
    if row["experts"]:
        fields["moe"] = Moe(
            experts=int(row["experts"]),
            top_k=int(row["top_k"]),
            ffn_hidden=int(row["moe_ffn"]),
            shared_experts=int(row["shared_experts"] or 0),
        )
    return fields


def _named(name: str) -> dict[str, Any] | None:
    """Return the fields of the longest known name that a row's model contains."""
    wanted = plain(name)
    if not wanted:
        return None
    for spelling in (wanted, plain(_sizeless(name))):
        if spelling in _models_by_name():
            return dict(_models_by_name()[spelling])
    inside = [key for key in _models_by_name() if len(key) > 4 and _contains(wanted, key)]
    return dict(_models_by_name()[max(inside, key=len)]) if inside else None


def _contains(text: str, part: str) -> bool:
    at = text.find(part)
    if at < 0:
        return False
    after = text[at + len(part) : at + len(part) + 1]
    before = text[at - 1 : at]
    return not (after.isdigit() or (after == "b" and part[-1].isdigit())) and not (before.isdigit() or before == ".")


def _by_size(cells: Cells) -> dict[str, Any]:
    """Return layers, width and heads of the published GPT that is nearest in size, layers scaled to match."""
    if has_experts(cells):
        return {}  # a size says nothing of what one token costs
    billions = _billions(cells)
    if billions is None:
        return {}
    size, layers, hidden, heads = min(_GPT_SHAPES, key=lambda shape: abs(shape[0] / billions - 1))
    return {"layers": max(round(layers * billions / size), 1), "hidden": hidden, "heads": heads}


def _billions(cells: Cells) -> float | None:
    """Return the billions of parameters that a row states in its column or its model's name."""
    billions = cells.number("params_b")
    if billions is None:
        match = re.search(r"(\d+(?:\.\d+)?)\s*([mbt])\b", cells.lower("model"))
        billions = float(match.group(1)) * {"m": 1e-3, "b": 1.0, "t": 1e3}[match.group(2)] if match else None
    return billions if billions is not None and 0.01 < billions < 1e4 else None
