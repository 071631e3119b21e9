"""Steps from a configuration to a model with weights: build (meta) → materialise → fill → post_load → freeze.

Sharding happens between ``build`` and ``materialise``, so no rank ever holds more than its part.
"""

from partool_runtime.building import (
    build,
    build_parts,
    check_finite,
    freeze,
    frozen_names,
    materialise,
    narrow,
    poison,
    post_load,
    whole_shapes,
)
from partool_runtime.weights.blocks import fill_from
from partool_runtime.weights.checksum import checksum, frozen_of
from partool_runtime.weights.fill import fill

__all__ = [
    "build",
    "build_parts",
    "check_finite",
    "checksum",
    "fill",
    "fill_from",
    "freeze",
    "frozen_names",
    "frozen_of",
    "materialise",
    "narrow",
    "poison",
    "post_load",
    "whole_shapes",
]
