"""Matrices that an adapter trains beside those of a layer (LoRA, Hu et al., arXiv 2106.09685).

The adapter is a term of the projection itself, and a projection's :attr:`matrix` is None where it has one: whatever
multiplies by a projection calls it, or its ``product``, and exchanges are not fused with one of its matrices alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from partool.layout.adapters import A, B, is_target
from partool.spec.adapter import LowRank
from partool_kernels.grouped_gemm.op import grouped_gemm
from partool_runtime import deferral
from partool_runtime.model.moe import Experts, Stacked
from partool_runtime.model.projection import Linear

Draw = AbstractContextManager[Any]


class Switched:
    """A module with an adapter, which can be left out of its passes."""

    adapter_off: bool = False
    """Whether the module computes with the frozen matrix alone."""


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Leave all adapters of ``model`` out of the passes within."""
    switched = [module for module in model.modules() if isinstance(module, Switched)]
    for module in switched:
        module.adapter_off = True
    try:
        yield
    finally:
        for module in switched:
            module.adapter_off = False


class Adapted(Linear, Switched):
    """A projection with the sum ``W x + scale · B (A x)``; a rank holds parts of A and B as it does of W."""

    lora_a: nn.Parameter
    """A, ``[r, I]``."""
    lora_b: nn.Parameter
    """B, ``[O, r]``."""
    scale: float
    dropout: float
    draw: Draw
    """What dropout draws its random numbers in; tensor ranks that hold columns draw different ones."""

    @property
    def matrix(self) -> torch.Tensor | None:
        """See :class:`~partool_runtime.model.projection.Projection`."""
        return None

    def product(self, x: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        """See :class:`~partool_runtime.model.projection.Projection`."""
        out = deferral.linear(x, self.weight, self.bias if biased else None)
        return out if self.adapter_off else out + self.added(x)

    def added(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``scale · B (A x)``."""
        if self.dropout and torch.is_grad_enabled():
            with self.draw:
                x = F.dropout(x, self.dropout)
        return deferral.linear(deferral.linear(x, self.lora_a) * self.scale, self.lora_b)


class AdaptedStack(Stacked, Switched):
    """The matrices of one projection of all experts, each with its own A and B, stacked as the matrices are."""

    lora_a: nn.Parameter
    """A of the experts, ``[E · r, I]``."""
    lora_b: nn.Parameter
    """B of the experts, ``[E · O, r]``."""
    scale: float

    def product(self, rows_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """See :class:`~partool_runtime.model.moe.Stacked`."""
        if self.adapter_off:
            return super().product(rows_RI, ends_E)
        low_Rr = grouped_gemm(rows_RI, self.matrices(self.lora_a, ends_E), ends_E) * self.scale
        return super().product(rows_RI, ends_E) + grouped_gemm(low_Rr, self.matrices(self.lora_b, ends_E), ends_E)


def add_adapters(block: nn.Module, adapter: LowRank, prefix: str) -> None:
    """Give the projections of a layer that are targets their A and B, in place; ``prefix`` is the layer's name.

    A is Kaiming-uniform with a = √5, that is uniform within ±1/√I, and B is zero, as in PEFT.
    """
    for name, module in block.named_modules():
        if isinstance(module, Linear) and is_target(adapter, f"{prefix}.{name}"):
            rows, columns = module.weight.shape
            module.__class__ = Adapted
            assert isinstance(module, Adapted)
            module.dropout, module.draw = adapter.dropout, nullcontext()
            _add(module, adapter, 1, rows, columns)
        elif isinstance(module, Experts):
            for leaf, stacked in module.stacked():
                if is_target(adapter, f"{prefix}.{name}.{leaf}"):
                    stacked.__class__ = AdaptedStack
                    assert isinstance(stacked, AdaptedStack)
                    _add(stacked, adapter, module.number, *stacked.weight.shape)


def _add(module: Adapted | AdaptedStack, adapter: LowRank, matrices: int, rows: int, columns: int) -> None:
    module.register_parameter(A, nn.Parameter(torch.empty(matrices * adapter.rank, columns)))
    module.register_parameter(B, nn.Parameter(torch.zeros(rows, adapter.rank)))
    bound = columns**-0.5
    nn.init.uniform_(module.get_parameter(A), -bound, bound)
    module.scale = adapter.scale
