"""Writes folders of transformers models, with names that all versions of transformers can load."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from partool.plan.types import HfModel
from partool.spec.model_code import code_files
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.experts import EXPERT_NAMES
from partool_runtime.hf.writer import SHARD_BYTES, write_tensors

_ALONG = ("generation_config.json",)
"""Files copied from the model's folder besides ``config.json``."""
_STACK = re.compile(r"(.*)\.mlp\.experts\.(gate_up_proj|down_proj)")
_ROUTER = re.compile(r"(.*)\.mlp\.(gate\..*)")


def write_model_folder(
    state: Mapping[str, torch.Tensor], hf: HfModel, path: Path, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write ``config.json`` and whole parameters, which have transformers' names and one type and are on the CPU.

    Raises ConfigurationError PT620 if the model's ``config.json`` cannot be read.
    """
    source = Path(hf.path)
    try:
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError("PT620", f"{source / 'config.json'} cannot be read: {error}") from error
    tensors = {
        name: tensor for key, parameter in state.items() for name, tensor in stored(key, parameter, hf.model_type)
    }
    path.mkdir(parents=True, exist_ok=True)
    write_tensors(tensors, path, shard_bytes)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    # This is the older of the two keys for the type; transformers 4 and 5 both read it.
    config = {key: value for key, value in config.items() if key != "dtype"} | {"torch_dtype": dtype}
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name in _ALONG:
        if (source / name).is_file():
            shutil.copyfile(source / name, path / name)
    for file in code_files(source) if hf.code_hash else ():
        (path / file.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, path / file.relative_to(source))


def stored(name: str, tensor: torch.Tensor, model_type: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors that store a parameter: a tensor per matrix for stacked experts, else the parameter."""
    experts = EXPERT_NAMES.get(model_type)
    stack, router = _STACK.fullmatch(name), _ROUTER.fullmatch(name)
    if experts is not None and stack is not None:
        names = (experts.gate, experts.up) if stack[2] == "gate_up_proj" else (experts.down,)
        for number, matrices in enumerate(tensor):
            for part, matrix in zip(names, matrices.chunk(len(names)), strict=True):
                yield f"{stack[1]}.{experts.block}.experts.{number}.{part}.weight", matrix.contiguous()
    elif experts is not None and router is not None:
        yield f"{router[1]}.{experts.block}.{router[2]}", tensor
    else:
        yield name, tensor
