"""Weights of a run with an adapter: the trained ones of a checkpoint, or the whole model with the adapter's sum."""

from __future__ import annotations

import torch

from partool.layout.adapters import MAGNITUDE, A, B, is_adapter
from partool.layout.parameters import is_frozen, parameters
from partool.plan.types import Plan
from partool.spec.model import ModelConfig
from partool_runtime.checkpoint import load_folder
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.model import HfDecoder
from partool_runtime.model import AnyDecoder, Decoder
from partool_runtime.precision import COMPUTE_DTYPE, MASTER_DTYPE
from partool_runtime.weights import build, checksum, fill, freeze, frozen_of, materialise, narrow
from partool_runtime.weights.chosen import ChosenWeights


def trained_weights(plan: Plan, weights: ChosenWeights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the parameters that were trained, whole and cast to ``dtype``, by name.

    Raises ConfigurationError PT621 where the checkpoint holds others.
    """
    if plan.own_decoder:
        every = {info.name: info.shape for info in parameters(plan.model)}
    else:
        every = _built(plan).whole_shapes()
    shapes = {name: shape for name, shape in every.items() if not is_frozen(name, plan.frozen)}
    return weights.load(dtype, shapes)


@torch.no_grad()
def merged_weights(plan: Plan, weights: ChosenWeights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the model's parameters with the adapter's sum, whole and cast to ``dtype``, by name.

    The base is read from the plan's source of weights, in the type in which the run stored it; sums are computed in
    float32 or wider. Raises ConfigurationError PT618 if the base is not the one that the run had.
    """
    precision = plan.training.precision
    model = _built(plan).to(MASTER_DTYPE[precision])
    freeze(model, plan.frozen)
    narrow(model, plan.frozen, COMPUTE_DTYPE[precision])
    materialise(model, "cpu")
    fill(model, plan.weights, seed=plan.training.seed)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    trained = {f"model.{name}": state[name] for name, p in model.named_parameters() if p.requires_grad}
    extra = load_folder(weights.newest, trained)
    if extra.get("base") != checksum(model, frozen_of(model, plan.frozen), None):
        message = "model.weights gives other weights than those beside which the adapter was trained"
        raise ConfigurationError("PT618", message, "Restore the folder that the run started from.")
    for name, tensor in weights.tensors() if weights.changed else ():
        state[name].copy_(tensor)
    return {
        name: _merged(state, _numbers(model, state, name), name, plan.model).to(dtype)
        for name in model.whole_shapes()
        if not is_adapter(name)
    }


def _numbers(model: AnyDecoder, state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return a parameter of the base, which may be stored in few bits, as the run multiplied by it."""
    if name not in model.stored:
        return state[name]
    module, matrix = model.stored[name]
    return matrix.numbers(module)


def _built(plan: Plan) -> Decoder | HfDecoder:
    """Return the plan's model on the meta device."""
    if plan.hf is None:
        return build(plan.model)
    wide, adapter = plan.training.precision == "fp64", None if plan.adapter is None else plan.adapter.form
    return HfDecoder(plan.hf, plan.model, wide=wide, adapter=adapter)


def _merged(state: dict[str, torch.Tensor], weight: torch.Tensor, name: str, config: ModelConfig) -> torch.Tensor:
    """Return a parameter ``weight`` plus its adapter's product, if it has any, with the magnitudes of its rows."""
    projection = name.removesuffix(".weight")
    a, b = (state.get(f"{projection}.{each}") for each in (A, B))
    if a is None or b is None or config.adapter is None:
        return weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    count = len(a) // config.adapter.rank  # experts have one each
    pairs = zip(a.to(wide).chunk(count), b.to(wide).chunk(count), strict=True)
    merged = weight.to(wide) + config.adapter.scale * torch.cat([low_b @ low_a for low_a, low_b in pairs])
    magnitude = state.get(f"{projection}.{MAGNITUDE}")
    if magnitude is None:
        return merged
    norms = torch.linalg.vector_norm(merged, dim=1).clamp_min(torch.finfo(wide).tiny)
    scaled: torch.Tensor = merged * (magnitude.to(wide) / norms)[:, None]
    return scaled
