"""What a model must tell about itself to be spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn


class Shardable(nn.Module):
    """A model of equal layers in sequence. Declares; :class:`partool_runtime.model.Decoder` is one by its methods."""

    layers: Any
    """The blocks, in order."""
    groups: Callable[[], Sequence[Sequence[nn.Module]]]
    """Modules whose parameters travel together, in the order they run; the last runs with the root."""
