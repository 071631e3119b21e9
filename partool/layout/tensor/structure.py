"""Structure of a model that another library builds: the modules in order, with shapes, as data without a framework."""

from __future__ import annotations

from math import prod
from typing import Literal

from pydantic import BaseModel, ConfigDict

Kind = Literal["linear", "conv1d", "embedding", "norm", "experts", "router", "other"]
"""linear: weight ``[out, in]``; conv1d: ``[in, out]``, as in GPT-2; embedding: ``[rows, width]``; norm: any
normalisation; experts: matrices of all experts stacked in three dimensions; router: selects experts; other: all other
modules, including containers."""


class StructureModule(BaseModel):
    """One module of a model, with its class and the shapes of its parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: str
    class_name: str
    """Name of the class without its package, such as ``LlamaAttention``."""
    kind: Kind
    parameters: dict[str, tuple[int, ...]] = {}
    """Shape of each parameter of the module, by name within the module, without parameters of child modules."""


class Structure(BaseModel):
    """The structure of a model, as far as the partition of its parameters needs it."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    model_type: str
    """Model type in the model's configuration, such as ``llama``."""
    architecture: str
    """Name of the model's class, such as ``LlamaForCausalLM``."""
    modules: tuple[StructureModule, ...]
    """All modules, including containers, in the order of registration."""
    blocks: str
    """Name of the list of layers; empty if there is not exactly one."""
    embedding: str
    """Name of the token embedding module."""
    head: str
    """Name of the output projection module; empty if there is none."""
    tied: dict[str, str] = {}
    """Name of a tied parameter → name of the earlier parameter that it is tied to, such as
    ``lm_head.weight`` and ``model.embed_tokens.weight``."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    """Number of experts per layer; 0 if there are none."""
    tp_plan: dict[str, str] = {}
    """Styles by pattern of module or parameter names (``*`` for numbers), as transformers writes them."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return full name → shape for the parameters in order, without parameters that are tied to an earlier one."""
        shapes = {}
        for module in self.modules:
            for name, shape in module.parameters.items():
                full = f"{module.name}.{name}" if module.name else name
                if full not in self.tied:
                    shapes[full] = shape
        return shapes

    def shared_elements(self) -> int:
        """Return the number of elements of the parameters that several layers, and no other modules, have in common."""
        layers: dict[str, set[str]] = {}
        for name in (*self.shapes(), *self.tied):
            place = name.removeprefix(f"{self.blocks}.").partition(".")[0] if name.startswith(f"{self.blocks}.") else ""
            layers.setdefault(self.tied.get(name, name), set()).add(place)
        return sum(
            prod(shape) for name, shape in self.shapes().items() if len(layers[name]) > 1 and "" not in layers[name]
        )
