"""``python -P -m partool_runtime.hf.structure DIR [HASH]`` prints facts about a model for the planner, as JSON.

The program is a separate process, so that the planner itself needs no torch. The model is built without memory.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any, cast

from torch import nn

from partool.layout.tensor.structure import Kind, Structure, StructureModule
from partool_runtime.hf.asked import UnknownAttentionError, asked
from partool_runtime.hf.building import (
    aliases,
    base_name,
    blocks_name,
    build_causal,
    check_buffers,
    check_sizes,
    draws_random,
    head_name,
    say_as_json,
)
from partool_runtime.hf.cutting import head_problem, returns_tuples
from partool_runtime.hf.sizes import expert_count, kv_heads, model_fields

_NETWORK = re.compile(r"(MLP|Mlp|FeedForward)$")


def networks(block: nn.Module) -> list[nn.Module]:
    """Return a layer's feed-forward networks, without experts' networks; networks are recognised by class name."""
    return [
        module
        for name, module in block.named_modules()
        if _NETWORK.search(type(module).__name__) and "expert" not in name and _takes_one(module)
    ]


def _takes_one(module: nn.Module) -> bool:
    """Return True if a forward pass takes a single tensor; networks that add the residual stream take more."""
    taken = inspect.signature(type(module).forward).parameters.values()
    return sum(one.default is inspect.Parameter.empty for one in taken) == 2  # with ``self``


def tiles_problem(blocks: nn.ModuleList) -> str:
    """Return why a layer's network cannot process a sequence in tiles; empty if the networks of all layers can."""
    for block in blocks:
        feed_forwards = networks(block)
        if not feed_forwards:
            return f"{type(block).__name__} has no network of its own that maps every token by itself"
        rates = [inner.p for network in feed_forwards for inner in network.modules() if isinstance(inner, nn.Dropout)]
        if any(rate > 0.0 for rate in rates):
            kind = type(feed_forwards[0]).__name__
            return f"{kind} draws random numbers, which a tile that is computed again would not repeat"
    return ""


def describe(path: Path | str, code: str = "") -> dict[str, object]:
    """Return ``structure`` (:class:`Structure`) and facts that decide which layouts the model allows.

    Four entries give reasons; an empty text means no problem. ``head_problem`` is why the head is more than one
    product, ``pipeline_problem`` why stages cannot be cut, ``attention_problem`` why attention cannot be replaced, and
    ``tiles_problem`` why networks cannot run on tiles. ``draws`` tells whether training draws random numbers.
    ``attention_dropout`` is the share of attention weights that are dropped. ``fields`` are fields of a
    ``ModelConfig``, for the planner's costs. If the model code in the folder is allowed, the argument ``code`` is the
    hash of this code. Raises ConfigurationError PT643, PT644, PT649, PT590, PT591.
    """
    causal = build_causal(Path(path), code)
    check_sizes(causal)
    check_buffers(causal)
    config = cast(Any, causal).config
    structure = structure_of(causal)
    tuples = returns_tuples(causal, config.num_hidden_layers)
    fields, attention = model_fields(causal, config), _attention(causal, config.num_hidden_layers)
    if attention["windows"] is not None:
        fields |= _windows(attention["windows"])
    return {
        "structure": structure.model_dump(mode="json"),
        "head_problem": head_problem(causal),
        "pipeline_problem": tuples if isinstance(tuples, str) else "",
        "draws": draws_random(causal),
        "tiles_problem": tiles_problem(cast(nn.ModuleList, causal.get_submodule(structure.blocks))),
        "auxiliary_loss": bool(getattr(config, "output_router_logits", False)),
        "fields": fields,
        "attention_problem": attention["problem"],
        "attention_dropout": attention["dropout"],
    }


def _attention(causal: nn.Module, layers: int) -> dict[str, Any]:
    """Return why partool cannot replace the model's attention (empty if it can), and attention's window and dropout."""
    try:
        forms = asked(causal, layers)
    except UnknownAttentionError as error:
        return {"problem": str(error), "dropout": 0.0, "windows": None}
    windows = [layer.window for layer in forms]
    several = sorted({window for window in windows if window is not None})
    problem = f"its layers have windows of {' and '.join(map(str, several))} tokens" if len(several) > 1 else ""
    return {"problem": problem, "dropout": max(layer.dropout for layer in forms), "windows": windows}


def _windows(windows: list[int | None]) -> dict[str, Any]:
    """Return the attention windows of the layers as fields of a ``ModelConfig``."""
    kinds = ["full" if window is None else "sliding" for window in windows]
    return {"window": max((window for window in windows if window is not None), default=None), "layer_types": kinds}


def structure_of(causal: nn.Module) -> Structure:
    """Return the structure of a causal language model; raises ConfigurationError PT644."""
    config = cast(Any, causal).config
    base, head = base_name(causal), head_name(causal)
    embedding = cast(Any, causal).get_input_embeddings()
    experts = expert_count(config)
    heads, hidden = config.num_attention_heads, config.hidden_size
    return Structure(
        model_type=config.model_type,
        architecture=type(causal).__name__,
        modules=tuple(structure_module(name, module, causal, experts) for name, module in causal.named_modules()),
        blocks=f"{base}.{blocks_name(causal.get_submodule(base), config.num_hidden_layers)}",
        embedding=next(name for name, module in causal.named_modules() if module is embedding),
        head=head,
        tied=aliases(causal),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads(config),
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        experts=experts,
        tp_plan=dict(getattr(causal, "tp_plan", None) or getattr(causal, "_tp_plan", None) or {}),
    )


def structure_module(name: str, module: nn.Module, causal: nn.Module, experts: int) -> StructureModule:
    """Return the record of one module of a model whose layers have so many experts."""
    shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters(recurse=False)}
    # A tied parameter is listed under each of its names.
    for key, parameter in module._parameters.items():
        if parameter is not None:
            shapes.setdefault(key, tuple(parameter.shape))
    return StructureModule(
        name=name, class_name=type(module).__name__, kind=_kind(name, module, causal, experts), parameters=shapes
    )


def _kind(name: str, module: nn.Module, causal: nn.Module, experts: int) -> Kind:
    shapes = [tuple(parameter.shape) for parameter in module._parameters.values() if parameter is not None]
    class_name = type(module).__name__
    if experts and len(shapes) <= 2 and any(len(shape) == 2 and shape[0] == experts for shape in shapes):
        parent = causal.get_submodule(name.rpartition(".")[0])
        if any("expert" in child for child, _ in parent.named_children()):
            return "router"
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if class_name == "Conv1D":
        return "conv1d"
    if "Norm" in class_name and shapes:
        return "norm"
    return "experts" if any(len(shape) == 3 for shape in shapes) else "other"


if __name__ == "__main__":
    sys.exit(say_as_json(describe, sys.argv[1:]))
