"""Weights of a folder for a model with a larger vocabulary."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from partool_runtime.hf.reader import HfFolder

Shape = tuple[int, ...]
_ROWS_ARE_TOKENS = ("embed.weight", "head.weight", "head.bias")
_ROWS_AT_A_TIME = 4096


class GrownVocabulary:
    """A folder, and a row for each token that it lacks: the mean of the stored rows.

    The model's logits of a new token are then the mean of its logits before, so that the token takes little of the
    others' probability (Hewitt, https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """

    def __init__(self, folder: HfFolder) -> None:
        self._folder = folder
        self._tokens = folder.rows("embed.weight") or 0
        self._means: dict[str, torch.Tensor] = {}

    def check(self, shapes: Mapping[str, Shape]) -> tuple[str, ...]:
        """See :meth:`HfFolder.check`; matrices whose rows are tokens may have fewer rows in the folder."""
        return self._folder.check({name: self._stored(name, shape) for name, shape in shapes.items()})

    def block(self, name: str, shape: Shape, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """See :meth:`HfFolder.block`."""
        stored = self._stored(name, shape)
        if stored == shape:
            return self._folder.block(name, shape, offsets, sizes)
        present = min(max(stored[0] - offsets[0], 0), sizes[0])
        rows = self._folder.block(name, stored, offsets, (present, *sizes[1:])) if present else None
        if rows is not None and present == sizes[0]:
            return rows
        columns = tuple(slice(at, at + size) for at, size in zip(offsets[1:], sizes[1:], strict=True))
        mean = self._mean(name, stored)[columns].expand(sizes[0] - present, *sizes[1:])
        return mean if rows is None else torch.cat([rows, mean.to(rows.dtype)])

    def _stored(self, name: str, shape: Shape) -> Shape:
        """Return the shape of a parameter in the folder, if it only lacks tokens; its shape in the model otherwise."""
        grows = name in _ROWS_ARE_TOKENS and 0 < self._tokens < shape[0]
        return (self._tokens, *shape[1:]) if grows else shape

    def _mean(self, name: str, stored: Shape) -> torch.Tensor:
        """Return the mean of all stored rows, summed in float64 so that all ranks get the same one."""
        if name not in self._means:
            total = torch.zeros(stored[1:], dtype=torch.float64)
            for first in range(0, stored[0], _ROWS_AT_A_TIME):
                sizes = (min(_ROWS_AT_A_TIME, stored[0] - first), *stored[1:])
                total += self._folder.block(name, stored, (first, *(0 for _ in stored[1:])), sizes).double().sum(0)
            self._means[name] = total / stored[0]
        return self._means[name]
