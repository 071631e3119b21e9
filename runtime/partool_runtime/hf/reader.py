"""Reads blocks of the tensors in a safetensors folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.families import FAMILIES, Family, ParameterPlace, family_of, place_of

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class HfFolder:
    """An open folder; see :func:`open_folder`."""

    def __init__(self, path: Path, config: ModelConfig, family: Family, handles: Mapping[str, Any]) -> None:
        self.path = path
        self.family = family
        self._handles = handles
        """Open files by tensor name."""
        self._strip = not any(name.startswith(family.prefix) for name in handles)
        self._fused = {
            "q": (0, config.heads * config.head_dim),
            "k": (config.heads * config.head_dim, config.kv_heads * config.head_dim),
            "v": ((config.heads + config.kv_heads) * config.head_dim, config.kv_heads * config.head_dim),
        }

    def block(
        self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Return the block at ``offsets`` of the parameter ``name`` (partool's); only this block is read from disk."""
        del shape
        place = self._place(name)
        assert place is not None, name
        view = self._handles[place.name].get_slice(place.name)
        begin = self._fused[place.part][0] if place.part else 0
        cut = [slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)]
        if cut:
            cut[0] = slice(cut[0].start + begin, cut[0].stop + begin)
        stored: torch.Tensor = view[tuple(reversed(cut) if place.transposed else cut)]
        return stored.T if place.transposed else stored

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare the folder with a model's parameters; raises ConfigurationError PT621 with all differences."""
        problems, used = [], set()
        for name, shape in shapes.items():
            place = self._place(name)
            if place is None or place.name not in self._handles:
                problems.append(f"missing {name}" + (f" ({place.name})" if place else ""))
                continue
            used.add(place.name)
            found = self._shape(place)
            if found != shape:
                problems.append(f"{name} has shape {list(shape)} in the model and {list(found)} in the folder")
        problems += [
            f"unexpected {name}" for name in sorted(set(self._handles) - used) if not self._ignorable(name, shapes)
        ]
        if problems:
            shown = problems[:12] + ([f"… and {len(problems) - 12} more"] if len(problems) > 12 else [])
            message = f"the weights in {self.path} do not fit the model:\n  " + "\n  ".join(shown)
            raise ConfigurationError("PT621", message, "Take the model from the folder: model.config: <folder>.")

    def _place(self, name: str) -> ParameterPlace | None:
        place = place_of(self.family, name)
        if place is None or not self._strip:
            return place
        return place._replace(name=place.name.removeprefix(self.family.prefix))

    def _shape(self, place: ParameterPlace) -> tuple[int, ...]:
        shape = list(self._handles[place.name].get_slice(place.name).get_shape())
        if place.transposed:
            shape.reverse()
        if place.part:
            whole = sum(length for _, length in self._fused.values())
            # A fused tensor of an unexpected size keeps its size, so that the comparison reports it.
            shape[0] = self._fused[place.part][1] if shape[0] == whole else shape[0]
        return tuple(shape)

    def _ignorable(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        copy_of_embedding = name == "lm_head.weight" and "head.weight" not in shapes
        return copy_of_embedding or name.endswith(self.family.ignored)


@contextmanager
def open_folder(path: Path, config: ModelConfig) -> Iterator[HfFolder]:
    """Open a folder with ``model.safetensors``, or with parts and ``model.safetensors.index.json``.

    The family is determined by the folder's ``config.json``, or by ``config`` if this file is missing. Raises
    ConfigurationError PT620 if the folder or a file in the folder cannot be read.
    """
    with ExitStack() as stack:
        handles = open_files(path, stack)
        yield HfFolder(path, config, _family(path, config), handles)


def open_files(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Open the files of a folder, until ``stack`` closes them; return a mapping from tensor names to open files.

    Raises ConfigurationError PT620.
    """
    if not path.is_dir():
        raise ConfigurationError("PT620", f"model.weights.path: no folder {path}")
    handles: dict[str, Any] = {}
    for file in _files(path):
        handle = _open(stack, file)
        handles.update(dict.fromkeys(handle.keys(), handle))
    return handles


def _family(path: Path, config: ModelConfig) -> Family:
    file = path / "config.json"
    if not file.exists():
        return family_of(config)
    content = _json(file)
    model_type = content.get("model_type") if isinstance(content, dict) else None
    if model_type not in FAMILIES:
        message = f"{file}: weights of the model type {model_type!r} cannot be read"
        raise ConfigurationError("PT620", message, f"Known types: {', '.join(FAMILIES)}.")
    return FAMILIES[model_type]


def _files(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.exists():
        content = _json(index)
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ConfigurationError("PT620", f"{index}: no weight_map of names to files")
        files = [path / name for name in sorted(set(weight_map.values()))]
    elif (path / _SINGLE).exists():
        files = [path / _SINGLE]
    else:
        message = f"{path} holds neither {_SINGLE} nor {_INDEX}"
        found = sorted(file.name for file in path.iterdir())[:8]
        raise ConfigurationError("PT620", message, f"It holds {', '.join(found) or 'nothing'}.")
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigurationError("PT620", f"{path}: the index names files that are missing: {', '.join(missing)}")
    return files


def _open(stack: ExitStack, file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return stack.enter_context(safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise ConfigurationError("PT620", f"{file} cannot be read: {error}") from error


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError("PT620", f"{file} cannot be read: {error}") from error
