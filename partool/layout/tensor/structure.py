"""What is known of a model without building it here: its modules in order, with shapes. As data, for any framework."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

Kind = Literal["linear", "conv1d", "embedding", "norm", "experts", "router", "other"]
"""linear: weight ``[out, in]``; conv1d: ``[in, out]``, as in GPT-2; embedding: ``[rows, width]``; norm: any
normalisation; experts: matrices of all experts stacked in three dimensions; router: chooses experts; other: the rest,
containers among them."""


class StructureModule(BaseModel):
    """One module."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: str
    class_name: str
    """Without its package, such as ``LlamaAttention``."""
    kind: Kind
    parameters: dict[str, tuple[int, ...]] = {}
    """Shapes of the module's own parameters, not of those of its children, by their names within it."""


class Structure(BaseModel):
    """A model, as far as cutting it needs to know it."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    model_type: str
    """Of its configuration, such as ``llama``."""
    architecture: str
    """Its class, such as ``LlamaForCausalLM``."""
    modules: tuple[StructureModule, ...]
    """All modules, containers too, in the order in which they were registered."""
    blocks: str
    """Name of the list of layers; empty where there is not exactly one."""
    embedding: str
    """Name of the module of token embeddings."""
    head: str
    """Name of the module of the output matrix; empty: none."""
    tied: dict[str, str] = {}
    """Names of parameters that are the same as an earlier one, and the name of that one, such as ``lm_head.weight`` and
    ``model.embed_tokens.weight``."""
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 0
    """Per layer; 0: none."""
    tp_plan: dict[str, str] = {}
    """Styles by pattern of module or parameter names (``*`` for numbers), as transformers writes them."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by its full name, each tied one once, in order."""
        found = {}
        for module in self.modules:
            for name, shape in module.parameters.items():
                full = f"{module.name}.{name}" if module.name else name
                if full not in self.tied:
                    found[full] = shape
        return found
