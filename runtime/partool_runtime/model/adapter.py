"""Matrices that an adapter trains beside those of a layer (LoRA, Hu et al., arXiv 2106.09685).

The adapter is a term of the projection itself, and a projection's :attr:`matrix` is None where it has one: whatever
multiplies by a projection calls it, or its ``product``, and exchanges are not fused with one of its matrices alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F

from partool.layout.adapters import MAGNITUDE, A, B, is_target
from partool.spec.adapter import LowRank
from partool_kernels.grouped_gemm.op import grouped_gemm
from partool_runtime import deferral
from partool_runtime.model.dropout import Masks, column_hashes, dropped
from partool_runtime.model.moe import Experts, Stacked
from partool_runtime.model.projection import Linear

Sum = Callable[[torch.Tensor], torch.Tensor]
"""Function that sums a vector over the ranks that hold columns of one matrix."""


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
    masks: Masks | None
    """Keys of the tokens that dropout's masks follow from; None where torch's generator draws the masks."""
    hashes: torch.Tensor | None
    """Hashes of this rank's columns of W, ``[I]``, for masks."""
    held_tokens: tuple[int, int] | None
    """Number of this rank's share of the tokens, and the number of shares, if inputs are shares; else None."""
    magnitude: nn.Parameter | None
    """Norm of each row of the sum, ``[O]``, if it is trained by itself (DoRA); else None."""
    sum_squares: Sum | None
    """Sums a row's squares over ranks that hold columns of W; None where this rank has whole rows."""

    @property
    def matrix(self) -> torch.Tensor | None:
        """See :class:`~partool_runtime.model.projection.Projection`."""
        return None

    def product(self, x: torch.Tensor, *, biased: bool = True) -> torch.Tensor:
        """See :class:`~partool_runtime.model.projection.Projection`."""
        if self.adapter_off:
            return self.base(x, biased=biased)
        if self.magnitude is not None:
            out = self._with_norms(x, self.magnitude)
            return out if self.bias is None or not biased else out + self.bias
        return self.base(x, biased=biased) + self._low_rank(self._dropped(x))

    def _with_norms(self, x: torch.Tensor, magnitude_O: torch.Tensor) -> torch.Tensor:
        """Return ``m ⊙ (W x + scale · B (A x)) / ‖W + scale · B A‖``; no gradient goes through the norm.

        As in PEFT, dropout concerns what the adapter changes: what is added to W x has the input that is left.
        """
        # The norm is rounded as the magnitude is, so that the quotient of equal ones is 1.
        factor_O = (magnitude_O / self.row_norms().to(magnitude_O.dtype)).to(x.dtype)
        out, kept = deferral.linear(x, self.weight), self._dropped(x)
        if kept is x:
            return factor_O * (out + self._low_rank(x))
        return out + (factor_O - 1) * deferral.linear(kept, self.weight) + factor_O * self._low_rank(kept)

    @torch.no_grad()
    def row_norms(self) -> torch.Tensor:
        """Return the norm of each row of ``W + scale · B A``, ``[O]``, in float32 or wider.

        The sum of matrices is never made: with s = scale, the square of row o is ‖Wₒ‖² + s Bₒ · (2 A Wₒ + s A Aᵀ Bₒ).
        """
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        a_rI, b_Or = self.lora_a.to(wide), self.lora_b.to(wide)
        of_base_O = torch.linalg.vector_norm(self.weight, dim=1, dtype=wide).square()
        both_Or = F.linear(self.lora_a, self.weight).T.to(wide)
        squares_O: torch.Tensor = of_base_O + self.scale * (
            b_Or * (2.0 * both_Or + self.scale * b_Or @ (a_rI @ a_rI.T))
        ).sum(1)
        if self.sum_squares is not None:
            squares_O = self.sum_squares(squares_O)
        return squares_O.clamp_min(torch.finfo(wide).tiny).sqrt()

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        """Return what dropout leaves of an input."""
        if not self.dropout:
            return x
        if self.masks is None or self.hashes is None:
            return F.dropout(x, self.dropout) if torch.is_grad_enabled() else x
        keys = self.masks.keys_BS
        return x if keys is None else dropped(x, self._of_this_rank(keys, x.shape[1]), self.hashes, self.dropout)

    def _of_this_rank(self, keys_BS: torch.Tensor, count: int) -> torch.Tensor:
        """Return the keys of the tokens in an input of ``count`` tokens of each sequence; padding has any keys."""
        if self.held_tokens is None:
            return keys_BS
        number, shares = self.held_tokens
        padded = F.pad(keys_BS, (0, count * shares - keys_BS.shape[1]))
        return padded[:, number * count : (number + 1) * count]

    def _low_rank(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``scale · B (A x)``."""
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


def add_adapters(block: nn.Module, adapter: LowRank, prefix: str, masks: Masks) -> None:
    """Give the projections of a layer that are targets their A and B, in place; ``prefix`` is the layer's name.

    A is Kaiming-uniform with a = √5, that is uniform within ±1/√I, and B is zero, as in PEFT. DoRA's magnitudes get
    their values once W has its own (:mod:`partool_runtime.weights.magnitudes`).
    """
    for name, module in block.named_modules():
        if isinstance(module, Linear) and is_target(adapter, f"{prefix}.{name}"):
            adapt(module, adapter, f"{prefix}.{name}", masks)
        elif isinstance(module, Experts):
            for leaf, stacked in module.stacked():
                if is_target(adapter, f"{prefix}.{name}.{leaf}"):
                    stacked.__class__ = AdaptedStack
                    assert isinstance(stacked, AdaptedStack)
                    _add(stacked, adapter, module.number, *stacked.weight.shape)


def adapt(module: nn.Linear, adapter: LowRank, name: str = "", masks: Masks | None = None) -> None:
    """Make a linear layer of torch or of partool an :class:`Adapted`, in place, on the device that is torch's default.

    Values are as :func:`add_adapters` says. Without ``masks``, torch's generator draws the masks of dropout.
    """
    rows, columns = module.weight.shape
    module.__class__ = Adapted
    assert isinstance(module, Adapted)
    module.dropout, module.masks, module.held_tokens, module.sum_squares = adapter.dropout, masks, None, None
    drops = adapter.dropout > 0 and masks is not None
    module.register_buffer("hashes", column_hashes(name, [(0, columns)]) if drops else None, persistent=False)
    _add(module, adapter, 1, rows, columns)
    module.register_parameter(MAGNITUDE, nn.Parameter(torch.ones(rows)) if adapter.kind == "dora" else None)


def _add(module: Adapted | AdaptedStack, adapter: LowRank, matrices: int, rows: int, columns: int) -> None:
    module.register_parameter(A, nn.Parameter(torch.empty(matrices * adapter.rank, columns)))
    module.register_parameter(B, nn.Parameter(torch.zeros(rows, adapter.rank)))
    bound = columns**-0.5
    nn.init.uniform_(module.get_parameter(A), -bound, bound)
    module.scale = adapter.scale
