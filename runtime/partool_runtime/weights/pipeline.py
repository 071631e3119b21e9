"""The steps around :func:`partool_runtime.weights.fill.fill`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.model import Decoder
from partool_runtime.weights.rows import local_part


def build(config: ModelConfig) -> Decoder:
    """Return the decoder on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        return Decoder(config)


def materialise(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Give every parameter memory on ``device``, with whatever that holds; ``dtype`` None keeps each one's type.

    Works on plain and on sharded models; each rank allocates its part only. Give the type to :func:`build`'s model
    before sharding it (``model.to(dtype)``) where the two differ.
    """
    if dtype is not None:
        model.to(dtype=dtype)
    model.to_empty(device=device)


def post_load(model: nn.Module) -> None:
    """Check what was filled: no parameter is left on the meta device, and all values are finite.

    Raises ConfigurationError PT622 with the names of those that hold a NaN or infinity.
    """
    bad = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise RuntimeError(f"{name} has no memory: materialise and fill the model first")
        if not bool(local_part(parameter).isfinite().all()):
            bad.append(name)
    if bad:
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise ConfigurationError("PT622", f"the weights hold values that are not finite: {shown}")


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop training of the parameters whose names match a glob pattern (``embed.*``); return their names.

    Call it before the first forward pass. Raises ConfigurationError PT623 for a pattern that matches nothing, or if
    nothing would be left to train.
    """
    parameters = dict(model.named_parameters())
    frozen: set[str] = set()
    for pattern in patterns:
        matches = {name for name in parameters if fnmatchcase(name, pattern)}
        if not matches:
            some = ", ".join(list(parameters)[:4])
            raise ConfigurationError("PT623", f"model.frozen: {pattern!r} matches no parameter", f"Names are {some}, …")
        frozen |= matches
    if len(frozen) == len(parameters):
        raise ConfigurationError("PT623", "model.frozen: the patterns match every parameter, nothing would be trained")
    for name in frozen:
        parameters[name].requires_grad_(False)
    return sorted(frozen)
