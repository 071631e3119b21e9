"""Reads blocks of the tensors in a safetensors folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from partool.plan.weight_files import WeightsError, weight_files
from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.families import FAMILIES, Family, family_of, place_of
from partool_runtime.hf.in_turns import block_in_turns, check_plain, parameter_shape
from partool_runtime.hf.places import ParameterPlace
from partool_runtime.hf.stored import SCALES, beyond, block_of, copies_of, dequantized, row_order
from partool_runtime.pieces import in_matrices

_ROWS_AT_ONCE = 4096
"""Rows of the embedding that are compared with their copies at once."""


class HfFolder:
    """An open folder; see :func:`open_folder`."""

    def __init__(
        self, path: Path, config: ModelConfig, family: Family, handles: Mapping[str, Any], settings: Mapping[str, Any]
    ) -> None:
        """Wrap open files, by tensor name; ``settings`` is the content of ``config.json``, empty if there is none."""
        self.path = path
        self.family = family
        self._handles, self._layers, self._mla = handles, config.layers, config.mla
        self._scaled = block_of(settings)
        self._pairs = bool(settings.get("rope_interleave", True))
        self._predicts = bool(settings.get("num_nextn_predict_layers", 0))
        self._blocks, self._copies = config.blocks, copies_of(config)
        self._experts = 1 if config.moe is None else config.moe.experts
        self._in_memory = not any(".block_sparse_moe." in name for name in handles)
        """Whether modules of experts have the names that transformers 5 gives them in memory."""
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
        place = self._place(name)
        assert place is not None, name
        if place.turns is not None:
            view = self._handles[place.name].get_slice(place.name)
            return block_in_turns(view, place.turns, shape[0] // self._experts, offsets, sizes)
        if _of_expert(place):
            return self._of_experts(place, shape[0] // self._experts, offsets, sizes)
        begin = self._fused[place.part][0] if place.part else 0
        cut = [slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)]
        if cut:
            cut[0] = slice(cut[0].start + begin, cut[0].stop + begin)
        if not (place.rotated and self._pairs and self._mla is not None and sizes[0]):
            return self._read(place, cut)
        rows = row_order(self._mla, place.rotated, shape[0])[cut[0]]
        first = int(rows.min())
        return self._read(place, [slice(first, int(rows.max()) + 1), *cut[1:]])[rows - first]

    def _of_experts(
        self, place: ParameterPlace, rows: int, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a block of experts' matrices, stacked row under row; a matrix has ``rows`` rows."""
        columns, parts = slice(offsets[1], offsets[1] + sizes[1]), []
        for expert, cut in in_matrices(offsets[0], offsets[0] + sizes[0], rows):
            one = self._one_expert(place, expert)
            if one in self._handles:
                parts.append(self._read(place._replace(name=one), [cut, columns]))
            else:
                begin = place.stacked[0] * rows
                within = slice(cut.start + begin, cut.stop + begin)
                stack = place._replace(name=place.stack)
                parts.append(self._read(stack, [slice(expert, expert + 1), within, columns])[0])
        return torch.cat(parts) if parts else torch.empty(sizes)

    def _one_expert(self, place: ParameterPlace, expert: int) -> str:
        return place.name.replace("{e}", str(expert))

    def _read(self, place: ParameterPlace, cut: list[slice]) -> torch.Tensor:
        """Return a part of a stored tensor, given in the order of the parameter's dimensions; float32 if quantized."""
        view = self._handles[place.name].get_slice(place.name)
        stored: torch.Tensor = view[tuple(reversed(cut) if place.transposed else cut)]
        scales = place.name + SCALES
        if scales in self._handles:
            if self._scaled is None:
                message = f"{self.path / 'config.json'} does not say in which blocks {place.name} is quantized"
                raise ConfigurationError("PT620", message, "It needs quantization_config.weight_block_size.")
            offsets = tuple(one.start for one in cut)
            stored = dequantized(stored, self._handles[scales].get_tensor(scales), offsets, self._scaled)
        return stored.T if place.transposed else stored

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        """Compare the folder with a model's parameters; return the names of tensors that the model does not use.

        These are the tensors of layers for multi-token prediction, which are not trained. Raises ConfigurationError
        PT621 with all other differences, PT609 for experts in mxfp4.
        """
        check_plain(self._handles, self.path)
        problems, used = [], set()
        for name, shape in shapes.items():
            place = self._place(name)
            stored = [] if place is None else self._stored(place)
            absent = [one for one in stored if one not in self._handles]
            if place is None or absent:
                problems.append(f"missing {name}" + (f" ({absent[0]})" if absent else ""))
                continue
            used.update(stored)
            stored_shape = self._shape_of_experts(place, stored, shape) if _of_expert(place) else self._shape(place)
            if stored_shape != shape:
                problems.append(f"{name} has shape {list(shape)} in the model and {list(stored_shape)} in the folder")
        used |= {name + SCALES for name in used}
        used |= self._copies.keys() & self._handles.keys()
        unused = set(beyond(self._handles, self._blocks)) if self._predicts else set()
        others = sorted(set(self._handles) - used - unused)
        problems += [f"unexpected {name}" for name in others if not self._ignorable(name, shapes)]
        if problems:
            shown = problems[:12] + ([f"… and {len(problems) - 12} more"] if len(problems) > 12 else [])
            message = f"the weights in {self.path} do not fit the model:\n  " + "\n  ".join(shown)
            raise ConfigurationError("PT621", message, "Take the model from the folder: model.config: <folder>.")
        self._compare_copies()
        return tuple(sorted(unused))

    def _compare_copies(self) -> None:
        """Raise ConfigurationError PT619 if a copy of the embedding or of the head differs; one rank looks for all."""
        if dist.is_initialized() and dist.get_rank() > 0:
            return
        for copy, original in self._copies.items():
            if copy in self._handles and not self._equal(copy, original):
                message = f"{self.path}: {copy} differs from {original}, and the model shares one matrix for both"
                raise ConfigurationError("PT619", message, "Train without model.multi_token, or mend the folder.")

    def _equal(self, copy: str, original: str) -> bool:
        """Return whether two stored tensors are equal, comparing rows by parts."""
        views = [self._handles[name].get_slice(name) for name in (copy, original)]
        if views[0].get_shape() != views[1].get_shape():
            return False
        starts = range(0, views[0].get_shape()[0], _ROWS_AT_ONCE)
        return all(torch.equal(*(view[start : start + _ROWS_AT_ONCE] for view in views)) for start in starts)

    def rows(self, name: str) -> int | None:
        """Return the number of rows of a parameter in the folder; None if it is not there."""
        place = self._place(name)
        return None if place is None or place.name not in self._handles else self._shape(place)[0]

    def _place(self, name: str) -> ParameterPlace | None:
        place = place_of(self.family, name, self._layers)
        if place is None:
            return None
        single, stack = place.name, place.stack
        if self._in_memory:
            single, stack = (one.replace(".block_sparse_moe.", ".mlp.") for one in (single, stack))
        if self._strip:
            single, stack = (one.removeprefix(self.family.prefix) for one in (single, stack))
        return place._replace(name=single, stack=stack)

    def _stored(self, place: ParameterPlace) -> list[str]:
        """Return the names of the tensors that hold a parameter."""
        if not _of_expert(place):
            return [place.name]
        if place.stack in self._handles:
            return [place.stack]
        return [self._one_expert(place, expert) for expert in range(self._experts)]

    def _shape_of_experts(self, place: ParameterPlace, stored: list[str], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of stacked experts in the folder; if one differs from the others, as if all were like it."""
        if stored == [place.stack]:
            experts, rows, columns = self._handles[place.stack].get_slice(place.stack).get_shape()
            return (experts * rows // place.stacked[1], columns)
        each = [shape[0] // self._experts, *shape[1:]]
        shapes = (list(self._handles[name].get_slice(name).get_shape()) for name in stored)
        rows, *others = next((other for other in shapes if other != each), each)
        return (rows * self._experts, *others)

    def _shape(self, place: ParameterPlace) -> tuple[int, ...]:
        shape = list(self._handles[place.name].get_slice(place.name).get_shape())
        if place.turns is not None:
            return parameter_shape(tuple(shape), place.turns)
        if place.transposed:
            shape.reverse()
        if place.part:
            fused_rows = sum(length for _, length in self._fused.values())
            # A fused tensor of an unexpected size keeps its size, so that the comparison reports it.
            shape[0] = self._fused[place.part][1] if shape[0] == fused_rows else shape[0]
        return tuple(shape)

    def _ignorable(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
        copy_of_embedding = name == "lm_head.weight" and "head.weight" not in shapes
        return copy_of_embedding or name.endswith(self.family.ignored)


def _of_expert(place: ParameterPlace) -> bool:
    """Return True if folders hold a tensor for each expert."""
    return "{e}" in place.name


@contextmanager
def open_folder(path: Path, config: ModelConfig) -> Iterator[HfFolder]:
    """Open a folder with ``model.safetensors``, or with parts and ``model.safetensors.index.json``.

    The family is determined by the folder's ``config.json``, or by ``config`` if this file is missing. Raises
    ConfigurationError PT620 if the folder or a file in the folder cannot be read.
    """
    with ExitStack() as stack:
        handles, settings = open_files(path, stack), _settings(path)
        family = family_of(config) if settings is None else _family(path, settings)
        yield HfFolder(path, config, family, handles, settings or {})


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


def _settings(path: Path) -> dict[str, Any] | None:
    """Return the content of a folder's ``config.json``; None if there is no such file."""
    file = path / "config.json"
    if not file.exists():
        return None
    content = _json(file)
    return content if isinstance(content, dict) else {}


def _family(path: Path, settings: Mapping[str, Any]) -> Family:
    model_type = settings.get("model_type")
    if model_type not in FAMILIES:
        message = f"{path / 'config.json'}: weights of the model type {model_type!r} cannot be read"
        raise ConfigurationError("PT620", message, f"Known types: {', '.join(FAMILIES)}.")
    return FAMILIES[model_type]


def _files(path: Path) -> list[Path]:
    try:
        return weight_files(path)
    except WeightsError as error:
        raise ConfigurationError("PT620", str(error), error.help) from error


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
