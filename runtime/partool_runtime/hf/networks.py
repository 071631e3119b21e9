"""Which modules of a layer of transformers are feed-forward networks that map every token by itself."""

from __future__ import annotations

import inspect
import re

from torch import nn

_NETWORK = re.compile(r"(MLP|Mlp|FeedForward)$")


def networks(block: nn.Module) -> list[nn.Module]:
    """Return a layer's networks, told by the names of their classes; those of experts are not among them."""
    return [
        module
        for name, module in block.named_modules()
        if _NETWORK.search(type(module).__name__) and "expert" not in name and _takes_one(module)
    ]


def _takes_one(module: nn.Module) -> bool:
    """Return True if a forward pass is a function of one tensor: some add the residual stream themselves."""
    taken = inspect.signature(type(module).forward).parameters.values()
    return sum(one.default is inspect.Parameter.empty for one in taken) == 2  # with ``self``


def tiles_problem(blocks: nn.ModuleList) -> str:
    """Return why the networks of some layers cannot work on tiles of a sequence; empty: they can."""
    for block in blocks:
        found = networks(block)
        if not found:
            return f"{type(block).__name__} has no network of its own that maps every token by itself"
        rates = [inner.p for network in found for inner in network.modules() if isinstance(inner, nn.Dropout)]
        if any(rate > 0.0 for rate in rates):
            return (
                f"{type(found[0]).__name__} draws random numbers, which a tile that is computed again would not repeat"
            )
    return ""
