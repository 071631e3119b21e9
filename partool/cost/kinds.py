"""What distinguishes the layers of one model, as far as they cost."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from partool.layout.grid import Axis, turns
from partool.spec.model import ModelConfig


class Kind(NamedTuple):
    """A kind of layers."""

    window: int | None
    """Tokens a sliding layer sees; None: all."""
    moe: bool
    axis: Literal["row", "column"] | None = None
    """Axis of a grid along which the layer attends; None: along the sequence."""
    turns: int = 0
    """How often the hidden state changes the axis that is cut, before and after such a layer, under DSP."""


@lru_cache(maxsize=64)
def kinds(model: ModelConfig) -> tuple[Kind, ...]:
    """Return the kind of every layer."""
    axes = [axis_of(model, layer) for layer in range(model.layers)]
    if all(axes):
        turned = [(turn.before is not None) + (turn.after is not None) for turn in turns([one for one in axes if one])]
    else:
        turned = [0] * model.layers
    return tuple(
        Kind(
            model.window if model.attention_kind(layer) == "sliding" else None,
            model.is_moe_layer(layer),
            axes[layer],
            turned[layer],
        )
        for layer in range(model.layers)
    )


def axis_of(model: ModelConfig, layer: int) -> Axis | None:
    """Return the axis of its grid that a layer attends along; None: all of the sequence."""
    kind = model.attention_kind(layer)
    return kind if kind in ("row", "column") else None
