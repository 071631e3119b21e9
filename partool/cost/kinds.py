"""Kinds of layers of one model; a kind has the properties that change a layer's cost."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from partool.layout.grid import Axis, turns
from partool.layout.parameters import is_frozen, layer_parameters, projection_of
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
    shape: int = 0
    """Place of the layer's experts in :attr:`ModelConfig.expert_shapes`; 0 for a dense layer."""

    @property
    def place(self) -> int:
        """Place of the layer's parameters among those of the model's kinds: 0 if dense, else 1 and more, by shape."""
        return 1 + self.shape if self.moe else 0


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
            model.expert_shape(layer),
        )
        for layer in range(model.layers)
    )


@lru_cache(maxsize=64)
def layer_places(model: ModelConfig) -> tuple[int, ...]:
    """Return :attr:`Kind.place` of every layer."""
    return tuple(kind.place for kind in kinds(model))


def places_of(model: ModelConfig) -> range:
    """Return the places that :func:`layer_places` may have; of a dense model only 0."""
    return range(1 + len(model.expert_shapes) if model.moe is not None else 1)


def axis_of(model: ModelConfig, layer: int) -> Axis | None:
    """Return the axis of the model's grid along which a layer attends; None means the whole sequence."""
    kind = model.attention_kind(layer)
    return kind if kind in ("row", "column") else None


@lru_cache(maxsize=64)
def trained_matrices(model: ModelConfig, frozen: tuple[str, ...], *, moe: bool, shape: int = 0) -> float:
    """Return the trained share of the elements of matrices in layers with experts of a shape, or in dense ones.

    Matrices that an adapter adds are left out.
    """
    if not frozen:
        return 1.0
    place = 1 + shape if moe else 0
    layers = [layer for layer, its_place in enumerate(layer_places(model)) if its_place == place]
    infos = [info for layer in layers for info in layer_parameters(model, layer) if projection_of(info) is not None]
    elements = sum(info.elements for info in infos)
    return sum(info.elements for info in infos if not is_frozen(info.name, frozen)) / max(elements, 1)
