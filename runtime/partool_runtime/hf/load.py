"""Loads weights of transformers models from a safetensors folder; each rank reads only its blocks.

Rows and columns are cut while they are read. The matrices of experts are cut, too; older folders store each expert's
matrices separately, while models hold the matrices of all experts stacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.experts import EXPERT_NAMES
from partool_runtime.hf.reader import open_files

Shape = tuple[int, ...]
_SHOWN = 12


class _Stack(NamedTuple):
    """A parameter that stacks experts ``[E, out, in]``; the folder stores one tensor for each expert and part."""

    ending: str
    """Ending of the parameter's name."""
    parts: tuple[str, ...]
    """Endings of the parts' names in the folder, in the order of concatenation along ``out``; ``{e}`` is the expert."""


_STACKS = tuple(
    stack
    for names in dict.fromkeys(EXPERT_NAMES.values())
    for stack in (
        _Stack("experts.gate_up_proj", (f"experts.{{e}}.{names.gate}.weight", f"experts.{{e}}.{names.up}.weight")),
        _Stack("experts.down_proj", (f"experts.{{e}}.{names.down}.weight",)),
    )
)
_RENAMED = (("", ""), (".mlp.", ".block_sparse_moe."), ("lm_head.", "embed_out."))
"""Pairs of a substring of parameter names and its replacement in folders saved before transformers 5."""
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|\.attention\.(masked_)?bias$")
"""Pattern of the names of tensors that are in folders but are not parameters."""


class HfFiles:
    """An open folder, read by the names of a model's parameters; see :func:`open_model_files`."""

    def __init__(self, path: Path, handles: Mapping[str, Any], prefix: str, aliases: Mapping[str, str]) -> None:
        """Wrap the open files ``handles``; ``aliases`` maps each further name of a tied parameter to its first name.

        The base model's parameter names begin with ``prefix``, except in folders saved from the base model alone.
        """
        self._path, self._handles, self._prefix = path, handles, prefix
        self._others: dict[str, list[str]] = {}
        for alias, name in aliases.items():
            self._others.setdefault(name, []).append(alias)

    def block(self, name: str, shape: Shape, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """Return a block of a parameter; only this block is read from disk."""
        stored_name = self._single(name)
        if stored_name is not None:
            return _cut(self._handles[stored_name].get_slice(stored_name), offsets, sizes)
        stack = self._stack(name)
        assert stack is not None, name
        out = torch.empty(sizes, dtype=self._slice(stack[0], offsets[0]).dtype if sizes[0] else torch.float32)
        each = shape[1] // len(stack)
        for expert in range(sizes[0]):
            for number, part in enumerate(stack):
                start = max(offsets[1], number * each)
                stop = min(offsets[1] + sizes[1], (number + 1) * each)
                if start < stop:
                    view = self._slice(part, offsets[0] + expert).view
                    rows = slice(start - number * each, stop - number * each)
                    out[expert, start - offsets[1] : stop - offsets[1]] = view[rows, offsets[2] : offsets[2] + sizes[2]]
        return out

    def check(self, shapes: Mapping[str, Shape]) -> tuple[str, ...]:
        """Compare the folder with a model's parameters; raises ConfigurationError PT621 with all differences.

        Returns the names of tensors that are not used: none, as every difference is an error.
        """
        problems: list[str] = []
        used: set[str] = set()
        for name, shape in shapes.items():
            stored_shape, names = self._shape(name, shape)
            used |= names
            if stored_shape is None:
                problems.append(f"missing {name}")
            elif stored_shape != shape:
                problems.append(f"{name} has shape {list(shape)} in the model and {list(stored_shape)} in the folder")
        used |= {self._with_prefix(alias) for aliases in self._others.values() for alias in aliases}
        problems += [f"unexpected {name}" for name in sorted(set(self._handles) - used) if not _IGNORED.search(name)]
        if problems:
            more = [f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            message = f"the weights in {self._path} do not fit the model:\n  " + "\n  ".join(problems[:_SHOWN] + more)
            raise ConfigurationError("PT621", message, "Take the folder whose config.json model.hf names.")
        return ()

    def _shape(self, name: str, shape: Shape) -> tuple[Shape | None, set[str]]:
        """Return a parameter's shape in the folder, and the names of the tensors that store the parameter."""
        stored_name = self._single(name)
        if stored_name is not None:
            return tuple(self._handles[stored_name].get_slice(stored_name).get_shape()), {stored_name}
        stack = self._stack(name)
        if stack is None:
            return None, set()
        names = {part.replace("{e}", str(expert)) for part in stack for expert in range(shape[0])}
        if not names <= set(self._handles):
            return None, names
        each = [tuple(self._handles[n].get_slice(n).get_shape()) for n in sorted(names)]
        same = len(set(each)) == 1
        return (shape[0], each[0][0] * len(stack), each[0][1]) if same else (), names

    def _candidates(self, name: str) -> Iterator[str]:
        for ours, theirs in _RENAMED:
            yield self._with_prefix(name.replace(ours, theirs) if ours else name)

    def _with_prefix(self, name: str) -> str:
        return name if name in self._handles else name.removeprefix(self._prefix)

    def _single(self, name: str) -> str | None:
        candidates = (place for one in (name, *self._others.get(name, [])) for place in self._candidates(one))
        return next((place for place in candidates if place in self._handles), None)

    def _stack(self, name: str) -> list[str] | None:
        """Return the names (``{e}`` for the expert) of the tensors that store a stacked parameter; None if absent."""
        for stack in _STACKS:
            if not name.endswith(stack.ending):
                continue
            for ours, theirs in _RENAMED:
                start = name.removesuffix(stack.ending).replace(ours, theirs)
                for begin in (start, start.removeprefix(self._prefix)):
                    templates = [begin + part for part in stack.parts]
                    if all(template.replace("{e}", "0") in self._handles for template in templates):
                        return templates
        return None

    def _slice(self, template: str, expert: int) -> _View:
        name = template.replace("{e}", str(expert))
        view = self._handles[name].get_slice(name)
        return _View(view, view[:0].dtype)


class _View(NamedTuple):
    view: Any
    dtype: torch.dtype


def _cut(view: Any, offsets: Shape, sizes: Shape) -> torch.Tensor:
    if not offsets:
        return cast(torch.Tensor, view[...])
    return cast(torch.Tensor, view[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))])


@contextmanager
def open_model_files(path: Path, prefix: str, aliases: Mapping[str, str]) -> Iterator[HfFiles]:
    """Open a folder with ``model.safetensors``, or with parts and an index; raises ConfigurationError PT620."""
    with ExitStack() as stack:
        yield HfFiles(path, open_files(path, stack), prefix, aliases)
