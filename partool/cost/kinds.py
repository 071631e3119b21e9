"""Kinds of layers of one model; a kind has the properties that change a layer's cost."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from partool.layout.grid import Axis, turns
from partool.spec.model import ModelConfig


class Kind(NamedTuple):
    """A kind of layer."""

    window: int | None
    """Number of tokens that each token attends to in a sliding-window layer; None means all tokens."""
    moe: bool
    axis: Literal["row", "column"] | None = None
    """Axis of a grid along which the layer attends; None means along the whole sequence."""
    turns: int = 0
    """With DSP, number of times that the sharded axis of the hidden state changes right before and right after the
    layer."""


@lru_cache(maxsize=64)
def kinds(model: ModelConfig) -> tuple[Kind, ...]:
    """Return the kind of every layer."""
    axes = [axis_of(model, layer) for layer in range(model.layers)]
    if all(axes):
        axis_changes = [
            (turn.before is not None) + (turn.after is not None) for turn in turns([one for one in axes if one])
        ]
    else:
        axis_changes = [0] * model.layers
    return tuple(
        Kind(
            model.window if model.attention_kind(layer) == "sliding" else None,
            model.is_moe_layer(layer),
            axes[layer],
            axis_changes[layer],
        )
        for layer in range(model.layers)
    )


def axis_of(model: ModelConfig, layer: int) -> Axis | None:
    """Return the axis of the model's grid along which a layer attends; None means the whole sequence."""
    kind = model.attention_kind(layer)
    return kind if kind in ("row", "column") else None
