"""What a checkpoint holds: the weights, and the moments that the optimizer keeps of each trained parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from partool.layout.matrices import matrix_stacks
from partool.layout.parameters import is_frozen, is_selection_bias, parameters
from partool.spec.model import ModelConfig
from partool.strategies.optimizers import OPTIMIZERS

WEIGHTS = "model."
"""Beginning of the names of weights in checkpoints."""

AVERAGE = "ema"
"""Kind of the moving average of weights, the beginning of its names in checkpoints as that of moments is theirs."""

Shape = tuple[int, ...]


def checkpoint_shapes(
    model: ModelConfig,
    optimizer: str,
    frozen: Iterable[str] = (),
    shapes: Mapping[str, Shape] | None = None,
    *,
    averages: bool = False,
) -> dict[str, Shape]:
    """Return name → shape of each tensor in a checkpoint; ``averages``: a moving average of what is trained is kept.

    With an adapter it holds the trained parameters only.
    ``shapes`` are the names and shapes of the model's parameters; None for those of partool's own decoder.
    """
    shapes = {each.name: each.shape for each in parameters(model)} if shapes is None else shapes
    record, frozen = OPTIMIZERS[optimizer], tuple(frozen)
    matrix_names = {stack.name for stack in matrix_stacks(model)} if record.rest else set()
    trained_only = model.adapter is not None
    tensors = {
        WEIGHTS + name: shape for name, shape in shapes.items() if not (trained_only and is_frozen(name, frozen))
    }
    for name, shape in shapes.items():
        if not is_frozen(name, frozen):
            rest = record.rest and name not in matrix_names
            moments = OPTIMIZERS[record.rest].moments if rest else record.moments
            tensors |= {f"{kind}.{name}": shape for kind in (*moments, *((AVERAGE,) if averages else ()))}
    return tensors


def checkpoint_bytes(
    model: ModelConfig,
    optimizer: str,
    frozen: Iterable[str] = (),
    *,
    weight_bytes: int,
    moment_bytes: int,
    frozen_bytes: int,
    average_bytes: int = 0,
) -> int:
    """Return the bytes of one checkpoint, over all ranks; each tensor is written once.

    ``weight_bytes``, ``moment_bytes`` and ``frozen_bytes`` are the bytes of one element of master weights, of moments
    and of weights that are not trained, ``average_bytes`` those of the moving average, 0 without one.
    """
    frozen = tuple(frozen)

    def element_bytes(name: str) -> int:
        if not name.startswith(WEIGHTS):
            return average_bytes if name.startswith(f"{AVERAGE}.") else moment_bytes
        stays = is_frozen(name.removeprefix(WEIGHTS), frozen)
        return frozen_bytes if stays and not is_selection_bias(name) else weight_bytes

    shapes = checkpoint_shapes(model, optimizer, frozen, averages=average_bytes > 0)
    return sum(element_bytes(name) * prod(shape) for name, shape in shapes.items())
