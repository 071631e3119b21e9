"""Experts from a dense model's weights: each is a copy of its layer's network (sparse upcycling, arXiv 2212.05055)."""

from __future__ import annotations

import torch

from partool.layout.parameters import parameters
from partool.spec.model import ModelConfig
from partool_runtime.checkpoint import VerifiedFolder
from partool_runtime.pieces import in_matrices
from partool_runtime.weights.draw import BlockSource, Shape, init_source

_EXPERTS = ".moe.experts."


def dense(config: ModelConfig) -> ModelConfig:
    """Return the model without experts, whose weights are those of the source."""
    return config.model_copy(update={"moe": None, "adapter": None})


def dense_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shapes of the weights that the source must hold, by name."""
    return {info.name: info.shape for info in parameters(dense(config))}


def is_new(name: str) -> bool:
    """Return True for a parameter that the dense model does not have."""
    return ".moe." in name


def upcycled(config: ModelConfig, source: BlockSource, seed: int) -> BlockSource:
    """Return the source of a model with experts, given that of the dense model; routers are drawn from ``seed``."""
    drawn = init_source(config, seed)

    def block(name: str, shape: Shape, offsets: Shape, sizes: Shape) -> torch.Tensor:
        if _EXPERTS not in name:
            return (drawn if is_new(name) else source)(name, shape, offsets, sizes)
        moe = config.of_layer(int(name.split(".")[1])).moe
        assert moe is not None, "experts of a dense model"
        network, each = name.replace(_EXPERTS, ".ffn."), (shape[0] // moe.experts, *shape[1:])
        parts = [
            source(network, each, (rows.start, *offsets[1:]), (rows.stop - rows.start, *sizes[1:]))
            for _, rows in in_matrices(offsets[0], offsets[0] + sizes[0], each[0])
        ]
        return torch.cat(parts) if parts else torch.empty(sizes)

    return block


class WholeTensors:
    """Source of the weights of a checkpoint, one of which is in memory at a time."""

    def __init__(self, folder: VerifiedFolder, prefix: str) -> None:
        """Read from ``folder``, whose names of weights begin with ``prefix``."""
        self._folder, self._prefix = folder, prefix
        self._name, self._tensor = "", torch.empty(0)

    def block(self, name: str, shape: Shape, offsets: Shape, sizes: Shape) -> torch.Tensor:
        """Return a block of a weight; see ``BlockSource``."""
        del shape
        if name != self._name:
            self._name, self._tensor = name, self._folder.tensor(self._prefix + name)
        return self._tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
