"""From a configuration to a model with weights: build (meta) → materialise → fill → post_load → freeze.

Sharding happens between ``build`` and ``materialise``, so no rank ever holds more than its part.
"""

from partool_runtime.weights.fill import fill, fill_from
from partool_runtime.weights.pipeline import build, freeze, materialise, post_load

__all__ = ["build", "fill", "fill_from", "freeze", "materialise", "post_load"]
