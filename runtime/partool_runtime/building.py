"""The steps around :func:`partool_runtime.weights.fill.fill`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from partool.layout.parameters import frozen_problem, is_frozen, is_selection_bias, parameters
from partool.layout.quantised import quantised_names
from partool.spec.model import ModelConfig
from partool_runtime.errors import ConfigurationError
from partool_runtime.model import AnyDecoder, Decoder, DecoderParts
from partool_runtime.model.moe import Stacked
from partool_runtime.model.projection import Linear
from partool_runtime.model.stored import store
from partool_runtime.pieces import local_part


def build(config: ModelConfig) -> Decoder:
    """Return the decoder on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        return Decoder(config)


def build_parts(config: ModelConfig, spans: Sequence[tuple[int, int]], mine: Sequence[int]) -> DecoderParts:
    """Return a rank's stages on the meta device: ``spans`` are the layers of all stages, ``mine`` the rank's stages."""
    with torch.device("meta"):
        return DecoderParts(config, spans, mine)


def materialise(model: AnyDecoder, device: torch.device | str, dtype: torch.dtype | None = None) -> None:
    """Give every parameter memory on ``device``, filled with NaN; ``dtype`` None keeps each parameter's type.

    Buffers move to the device with their values: no source of weights has values for them. Works on whole and on
    sharded models; each rank allocates only its part. If :func:`build`'s model has another type than the sharded model
    needs, set the type before sharding (``model.to(dtype)``).
    """
    # The root of a sharded model must notice that its parameters moved, and stages' roots are no children of parts.
    for root in model.roots():
        if dtype is not None:
            root.to(dtype=dtype)
        values = {name: buffer.clone() for name, buffer in root.named_buffers()}
        root.to_empty(device=device)
        for name, buffer in root.named_buffers():
            buffer.copy_(values[name])  # raises an error if the value itself is on the meta device
        poison(root)


@torch.no_grad()
def poison(root: nn.Module) -> None:
    """Fill this rank's part of a module's parameters with NaN, so that :func:`post_load` finds unfilled values.

    Integers become zero; the scales beside them are NaN.
    """
    for parameter in root.parameters():
        local_part(parameter).fill_(torch.nan if parameter.is_floating_point() else 0)


def post_load(model: AnyDecoder) -> None:
    """Check that every tensor which the filled model uses has memory and a known name, and that parameters are finite.

    Raises ConfigurationError PT622 with the names of parameters that hold a NaN or infinity, and RuntimeError for
    tensors that no source of weights can have filled.
    """
    parameters = dict(model.named_parameters())
    parameter_ids = {id(parameter) for parameter in parameters.values()}
    for root in model.roots():
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            if tensor.is_meta:
                raise RuntimeError(f"{name} has no memory: materialise and fill the model first")
            if isinstance(tensor, nn.Parameter) and id(tensor) not in parameter_ids:
                raise RuntimeError(f"{name} of {type(root).__name__} has no name in the model: nothing fills it")
    check_finite(parameters)


def check_finite(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ConfigurationError PT622 with the names of weights of which this rank holds a NaN or an infinity."""
    bad = [name for name, tensor in tensors.items() if not bool(local_part(tensor).isfinite().all())]
    if bad:
        shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
        raise ConfigurationError("PT622", f"the weights hold values that are not finite: {shown}")


def freeze(model: AnyDecoder, patterns: Sequence[str]) -> list[str]:
    """Freeze the parameters whose names match a glob pattern (``embed.*``); return the names of all frozen parameters.

    The patterns apply to the whole model, of which ``model`` may be a part. Call it before the first forward pass.
    Raises ConfigurationError PT623 for a pattern that matches nothing, or if no parameter would be left to train.
    """
    frozen = frozen_names(model.whole_shapes(), patterns)
    for name, parameter in model.named_parameters():
        if name in frozen:
            parameter.requires_grad_(False)
    return sorted(frozen)


def narrow(model: AnyDecoder, patterns: Sequence[str], dtype: torch.dtype) -> None:
    """Store frozen parameters in the type of computation, or in the few bits that the adapter's base asks for.

    Without updates they need no more. Selection biases of routers stay wide, since the loads of experts change them by
    little. Call it after tensor ranks have cut the parameters, and before they are sharded.
    """
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not is_selection_bias(name):
            parameter.data = parameter.data.to(dtype)
    adapter = model.config.adapter
    wanted = quantised_names(model.config, patterns)
    if adapter is None or not wanted:
        return
    modules = {f"{name}.weight": module for name, module in model.named_modules()}
    stored = {}
    for name in (name for name, _ in list(model.named_parameters()) if name in wanted):
        module = modules[name]
        assert isinstance(module, Linear | Stacked), name
        stored[name] = module, store(module, adapter, model.placements.get(name), dtype=dtype)
    model.stored = MappingProxyType(stored)


def whole_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shape of every parameter of partool's own decoder, by name; equal on every rank."""
    return {info.name: info.shape for info in parameters(config)}


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the parameter names that glob patterns match; raises like :func:`freeze`."""
    problem = frozen_problem(names, patterns)
    if problem is not None:
        raise ConfigurationError("PT623", problem[1], f"Names are {', '.join(list(names)[:4])}, …")
    return {name for name in names if is_frozen(name, patterns)}
