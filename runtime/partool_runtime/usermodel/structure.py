"""``python -P -m partool_runtime.usermodel.structure MODEL TOKENS`` prints facts about a user's module for the planner.

MODEL is a :class:`partool.plan.types.ModuleModel` as JSON, TOKENS the length of a sequence. The program is a process of
its own, so that the planner needs no torch and does not run the user's code. The module is built without memory.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import nn

from partool.layout.tensor.structure import Structure
from partool.plan.types import ModuleModel
from partool_runtime.errors import ConfigurationError
from partool_runtime.graph.capture import Captured, CaptureError
from partool_runtime.graph.functions import name_of
from partool_runtime.graph.nodes import value_of
from partool_runtime.graph.share import shares_of
from partool_runtime.hf.building import aliases, say_as_json
from partool_runtime.hf.graph import AttentionFields, attention_in
from partool_runtime.hf.structure import structure_module
from partool_runtime.usermodel.building import blocks_of, build_module, user_code
from partool_runtime.usermodel.model import capture_module

_SIZES = "partool reads the sizes of the model from its graph."
_LONGEST = 2**20
"""Positions of a model that has no table of them."""


def describe(text: str, length: int) -> dict[str, object]:
    """Return a description with the entries of :func:`partool_runtime.hf.structure.describe` and of its graph.

    The graph is that of sequences of ``length`` tokens. Sizes are read from it, so a module whose graph cannot be
    captured is refused: PT655.
    """
    model = ModuleModel.model_validate_json(text)
    code = user_code(model, recorded=True)
    root = build_module(model, code)
    blocks = blocks_of(root)
    units = [f"{blocks}.{number}" for number, _ in enumerate(root.get_submodule(blocks).children())]
    try:
        of_length = partial(capture_module, root, dtype=torch.float32, length=length)
        captured = of_length(training=True)
        problem, attention = attention_in(captured, length, root, units)
        if not problem:
            problem, _ = attention_in(of_length(training=False), length, root, units)
    except CaptureError as error:
        raise ConfigurationError("PT655", f"{model.module}: {error}", _SIZES) from error
    if not attention:
        raise ConfigurationError("PT655", f"{model.module}: {problem}", "Its layers need torch's attention function.")
    vocab = value_of(captured.graph.output_node().args[0][0]).shape[-1]  # type: ignore[index]
    fields = _fields(root, root.get_submodule(blocks), attention, int(vocab)) | _positions(captured)
    name = model.module.rpartition(":")[2]
    why = f"{name} is a module of yours, whose code partool runs as it is"
    return {
        "structure": _structure(root, blocks, name, fields).model_dump(mode="json"),
        "head_problem": "",
        "pipeline_problem": why,
        "draws": True,
        "tiles_problem": why,
        "auxiliary_loss": False,
        "fields": fields,
        "attention_problem": why,
        "attention_dropout": 0.0,
        "graph_problem": problem,
        "graph_attention": attention,
        "code_files": dict(sorted(code.files.items())),
    }


def _structure(root: nn.Module, blocks: str, name: str, fields: dict[str, Any]) -> Structure:
    embedding = next((each for each, module in root.named_modules() if isinstance(module, nn.Embedding)), "")
    return Structure(
        model_type="module",
        architecture=name,
        modules=tuple(structure_module(each, module, root, 0) for each, module in root.named_modules()),
        blocks=blocks,
        embedding=embedding,
        head="",
        tied=aliases(root),
        hidden=fields["hidden"],
        heads=fields["heads"],
        kv_heads=fields["kv_heads"],
        head_dim=fields["head_dim"],
    )


def _fields(root: nn.Module, layers: nn.Module, attention: list[AttentionFields], vocab: int) -> dict[str, Any]:
    """Return the fields of the decoder of partool that is nearest: with the same attention and as many parameters."""
    one = attention[0]
    heads, keys, width = one["heads"], one["key_heads"], one["head_dim"]
    count = sum(1 for _ in layers.children())
    tables = [module for module in root.modules() if isinstance(module, nn.Embedding)]
    hidden = tables[0].embedding_dim if tables else heads * width
    outside = set(root.parameters()) - set(layers.parameters())
    each = sum(parameter.numel() for parameter in layers.parameters() if parameter.dim() > 1) // count
    products = sum(isinstance(module, nn.Linear) for module in layers.modules()) // count
    gated = products > _PLAIN
    network = each - 2 * hidden * width * (heads + keys)
    return {
        "layers": count,
        "hidden": hidden,
        "ffn_hidden": max(1, round(network / (hidden * (3 if gated else 2)))),
        "heads": heads,
        "kv_heads": keys,
        "head_dim": width,
        "vocab": vocab,
        "norm": "layernorm" if any(isinstance(module, nn.LayerNorm) for module in root.modules()) else "rmsnorm",
        "activation": "swiglu" if gated else "gelu",
        "tied_embeddings": sum(parameter.numel() for parameter in outside) < 2 * vocab * hidden,
    }


def _positions(captured: Captured) -> dict[str, Any]:
    """Return the table of positions, if one is looked up by numbers that depend on no token."""
    shares = shares_of(captured)
    for node in captured.graph.nodes:
        if name_of(node) == "embedding" and node not in shares:
            return {"position": "learned", "max_position": int(value_of(node.args[1]).shape[0])}
    return {"position": "none", "max_position": _LONGEST}


_PLAIN = 6
"""Products of a layer without a gate: at most four of attention and two of the network."""


def main(arguments: list[str]) -> int:
    """Print the description of a module as JSON, or an error."""
    return say_as_json(lambda model, length: describe(model, int(length)), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
