"""What a first spec for fine-tuning says, from the model's folder and the data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from partool.catalog.huggingface import read_config
from partool.plan.records import DataError
from partool.planner.rules.data_sample import sample
from partool.spec.data import DataSpec

_LONGEST = 2048
"""Tokens of a sequence where the model reads more: most conversations are shorter, and memory grows with it."""


class StartError(Exception):
    """The folder is no model, or the data cannot be read."""

    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code = code
        self.help = help


def finetuning(folder: Path, source: Path, spec: Path) -> dict[str, str]:
    """Return the values of the template ``finetune.yaml``; paths are relative to the folder of ``spec``.

    A model that partool's own decoder computes is read into it, another one is left to transformers. Raises StartError.
    """
    config = _config(folder)
    try:
        records = sample(str(source), DataSpec(source=str(source), tokenizer=str(folder))) or "text"
    except DataError as error:
        raise StartError("PT602", str(error), error.help) from error
    except (OSError, ValueError) as error:
        raise StartError("PT601", f"{source} cannot be read: {error}", "name a file or folder of data") from error
    here = spec.absolute().parent
    place = os.path.relpath(folder, here)
    fields, _, _ = read_config(folder / "config.json")
    read_by_partool = f"{{config: {_quoted(place + '/config.json')}, weights: {{source: hf, path: {_quoted(place)}}}}}"
    model = read_by_partool if fields is not None else f"{{hf: {_quoted(place)}}}"
    longest = config.get("max_position_embeddings") or config.get("n_positions") or _LONGEST
    return {
        "path": str(spec),
        "model": f"model: {model}",
        "folder": _quoted(place),
        "data": _quoted(os.path.relpath(source, here)),
        "records": records,
        "length": str(min(int(longest), _LONGEST)),
        "precision": "bf16",
    }


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        help = "name a folder with config.json, model.safetensors and tokenizer.json; from the hub: hf download NAME"
        raise StartError("PT250", f"{folder} is no model's folder: {error}", help) from error
    if not (folder / "tokenizer.json").is_file():
        help = "save it with transformers' save_pretrained"
        raise StartError("PT603", f"{folder} has no tokenizer.json", help)
    return dict(config)


def _quoted(path: str) -> str:
    """Return a path as YAML reads it."""
    return (
        path if path.replace("/", "").replace(".", "").replace("-", "").replace("_", "").isalnum() else json.dumps(path)
    )
