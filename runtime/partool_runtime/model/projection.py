"""Projections, the matrices by which layers multiply, and the seams at which a layer multiplies by them.

A layer calls ``inputs`` for the projections that share its input, and ``output`` for the projection of its result. Both
are attributes: tensor parallelism and training in 8 bits replace them. What a projection itself computes is its own
affair, so a module that wraps a projection, such as an adapter, works beneath all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from partool_runtime import deferral


class Projection(Protocol):
    """A matrix ``[O, I]`` with an optional bias, of which a rank holds all, some rows or some columns."""

    @property
    def weight(self) -> torch.Tensor:
        """The part of the matrix that this rank holds."""

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias of the rows that this rank holds."""

    @property
    def matrix(self) -> torch.Tensor | None:
        """The matrix if the product is ``x @ matrix.T`` and nothing else, so that exchanges may be fused with it.

        None if the product is computed in another way: in 8 bits, or with the sum that an adapter adds.
        """

    def product(self, x: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        """Return the product ``[..., O]`` with this rank's part, plus the bias if ``biased``.

        Without the bias it is linear in ``x``, since ranks that hold columns sum their products. It is a new tensor
        that no backward pass reads, since the sum overwrites it.
        """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with the bias; modules are called, so that hooks may gather their parameters first."""


class StoredMatrix(Protocol):
    """How a module's frozen matrix is stored, if not as its parameter ``weight``."""

    def linear(self, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        """Return ``x [..., I]`` times the transpose of the module's matrix ``[O, I]``."""

    def grouped(self, rows_RI: torch.Tensor, module: nn.Module, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the product of each row, sorted by expert, with its expert's matrix of the module's stack."""


class Linear(nn.Linear):
    """A projection whose matrix multiplies as it is; the gradient of its weight may be deferred."""

    stored: StoredMatrix | None = None
    """How the frozen matrix is stored; None means as ``weight``."""

    @property
    def matrix(self) -> torch.Tensor | None:
        """See :class:`Projection`."""
        return self.weight if self.stored is None else None

    def product(self, x: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        """See :class:`Projection`."""
        return self.base(x, biased=biased)

    def base(self, x: torch.Tensor, *, biased: bool) -> torch.Tensor:
        """Return the product with the matrix alone, plus the bias if ``biased``."""
        bias = self.bias if biased else None
        if self.stored is None:
            return deferral.linear(x, self.weight, bias)
        out = self.stored.linear(x, self)
        return out if bias is None else out + bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``[..., I]`` to ``[..., O]``."""
        return self.product(x)


def as_linear(module: nn.Linear) -> Linear:
    """Make a linear layer of torch, or of a subclass that FSDP2 has made of it, a :class:`Linear`, in place."""
    kind = type(module)
    module.__class__ = Linear if kind is nn.Linear else type(kind.__name__, (kind, Linear), {})
    assert isinstance(module, Linear)
    return module


class Foreign:
    """Presents a linear layer that is not partool's, such as one of transformers, as a :class:`Projection`."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module

    @property
    def weight(self) -> torch.Tensor:
        """Weight ``[O, I]``."""
        weight: torch.Tensor = self._module.weight
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Bias ``[O]``."""
        bias: torch.Tensor | None = self._module.bias
        return bias

    @property
    def matrix(self) -> torch.Tensor | None:
        """See :class:`Projection`."""
        return self.weight

    def product(self, x: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        """See :class:`Projection`."""
        return deferral.linear(x, self.weight, self.bias if biased else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See :class:`Projection`."""
        return self.product(x)


class InputProducts(Protocol):
    """How a layer multiplies one input by several projections."""

    joint: bool
    """Whether the projections have to be called together, because they share an exchange or a conversion."""

    def __call__(self, x: torch.Tensor, projections: Sequence[Projection]) -> tuple[torch.Tensor, ...]:
        """Return the product of ``x`` with each projection, ``[B, S, width]``, of all tokens."""


class OutputProduct(Protocol):
    """How a layer maps its result back to the residual stream."""

    def __call__(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """Return the residual stream's share, ``[B, S, H]``, of the product with the projection."""


class Separate:
    """:class:`InputProducts` of one rank: each projection is called on its own."""

    joint = False

    def __call__(self, x: torch.Tensor, projections: Sequence[Projection]) -> tuple[torch.Tensor, ...]:
        """See :class:`InputProducts`."""
        return tuple(projection(x) for projection in projections)


SEPARATE = Separate()
"""One object for all layers, for which torch.compile compiles equal layers once."""


def alone(x: torch.Tensor, projection: Projection) -> torch.Tensor:
    """:class:`OutputProduct` of one rank: the projection's own result."""
    return projection(x)
