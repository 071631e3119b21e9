"""Feed-forward layers of experts, of which each token uses a few (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F

from partool.spec.model import ModelConfig
from partool_kernels.grouped_gemm.op import grouped_gemm
from partool_kernels.moe.op import permute, route, unpermute
from partool_runtime.model.expert_bias import add_expert_bias
from partool_runtime.model.ffn import ACTIVATIONS, Combine, FeedForward, combined
from partool_runtime.model.norm import wide_dtype
from partool_runtime.model.projection import StoredMatrix
from partool_runtime.model.routing import Choices, Router

Beside = Callable[[], torch.Tensor]
"""Computation that does not depend on the routed experts, such as that of the shared experts."""


class Stacked(nn.Module):
    """The matrices of one projection of all experts, row under row: ``weight [E · rows, columns]``."""

    stored: StoredMatrix | None = None
    """How the frozen matrices are stored; None means as ``weight``."""
    first_column: int = 0
    """First of the columns of results to which this rank adds its biases; other ranks may add those of others."""

    def __init__(self, experts: int, rows: int, columns: int, std: float, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts * rows, columns))
        nn.init.normal_(self.weight, std=std)
        self.bias = nn.Parameter(torch.zeros(experts * rows)) if bias else None
        """Biases ``[E · rows]``, expert after expert; None without."""

    def matrices(self, stacked: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return stacked matrices ``[E · O, I]`` as ``[E, I, O]``, of the experts that ``ends_E`` counts."""
        # view(experts, -1, columns) could not tell the number of rows of a rank that has no columns.
        experts, (rows, columns) = len(ends_E), stacked.shape
        return stacked.view(experts, rows // experts, columns).mT

    def product(self, rows_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return the product ``[R, O]`` of each row, sorted by expert, with its expert's matrix."""
        if self.stored is not None:
            return self.stored.grouped(rows_RI, self, ends_E)
        return grouped_gemm(rows_RI, self.matrices(self.weight, ends_E), ends_E)

    def biased(self, rows_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return :meth:`product`, with the biases of this rank if there are any."""
        out_RO = self.product(rows_RI, ends_E)
        return out_RO if self.bias is None else add_expert_bias(out_RO, self.bias, ends_E, self.first_column)


class Experts(nn.Module):
    """The experts that a rank holds: networks whose products are grouped.

    Their number follows from the rows of the stacked matrices, of which a rank may hold some experts, or some widths.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "experts of a dense model"
        self.number = moe.experts
        self.activation = ACTIVATIONS[config.activation]
        self.gated = config.gated
        self.combine: Combine | None = combined(config)
        """Function that computes the activation of gate and up at once; None means act(gate) · up by torch."""
        shape = (moe.experts, moe.ffn_hidden, config.hidden, config.init_std)
        if config.gated:
            self.gate = Stacked(*shape, bias=moe.bias)
        self.up = Stacked(*shape, bias=moe.bias)
        self.down = Stacked(moe.experts, config.hidden, moe.ffn_hidden, config.init_std, bias=moe.bias)

    def stacked(self) -> Iterator[tuple[str, Stacked]]:
        """Yield (name, matrices) of each projection."""
        return ((name, child) for name, child in self.named_children() if isinstance(child, Stacked))

    def forward(self, rows_RH: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Map rows ``[R, H]``, sorted by expert, to ``[R, H]``; ``ends_E`` is the index after each expert's rows."""
        up_RF = self.up.biased(rows_RH, ends_E)
        if not self.gated:
            return self.down.biased(self.activation(up_RF), ends_E)
        gate_RF = self.gate.biased(rows_RH, ends_E)
        inner_RF = self.activation(gate_RF) * up_RF if self.combine is None else self.combine(gate_RF, up_RF)
        return self.down.biased(inner_RF, ends_E)


class Division(Protocol):
    """How tensor ranks divide the work of a layer of experts."""

    joined: bool
    """Whether shared experts work on the routed tokens, and their result is added before :meth:`leave`."""

    def enter(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the tokens that this rank routes."""

    def leave(self, out_BSH: torch.Tensor, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the result for the layer's inputs ``x_BSH`` from the results of the routed tokens."""


class Undivided:
    """:class:`Division` of one rank."""

    joined = True

    def enter(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """See :class:`Division`."""
        return x_BSH

    def leave(self, out_BSH: torch.Tensor, x_BSH: torch.Tensor) -> torch.Tensor:
        """See :class:`Division`."""
        del x_BSH
        return out_BSH


class Dispatch(Protocol):
    """How tokens get to their experts, and the results back."""

    def __call__(
        self, layer: MixtureOfExperts, x_TH: torch.Tensor, choices: Choices, beside: Beside | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weighted sum of each token's experts, ``[T, H]``, and the result of ``beside``, if given."""


def dispatch_here(
    layer: MixtureOfExperts, x_TH: torch.Tensor, choices: Choices, beside: Beside | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:class:`Dispatch` of a rank that holds all experts, or its part of the widths of all."""
    routing = route(choices.experts, layer.number)
    rows_RH = layer.experts(permute(x_TH, routing), routing.ends)
    return unpermute(rows_RH, routing, choices.weights), None if beside is None else beside()


class ResultWeights(nn.Linear):
    """The weights of a token's routed and of its shared experts: a softmax of two logits, in float32 or wider."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config.hidden, 2)
        nn.init.normal_(self.weight, std=config.init_std)
        nn.init.zeros_(self.bias)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Return the two weights of each token, ``[B, S, 2]``, in the type of ``x_BSH``."""
        wide = wide_dtype(x_BSH.dtype)
        logits_BS2 = F.linear(x_BSH.to(wide), self.weight.to(wide), self.bias.to(wide))
        return logits_BS2.softmax(dim=-1).to(x_BSH.dtype)


class MixtureOfExperts(nn.Module):
    """A router, its experts, and shared experts that every token uses, which are one wider network."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None, "experts of a dense model"
        self.number = moe.experts
        self.router = Router(config)
        self.experts = Experts(config)
        self.division: Division = Undivided()
        """How tensor ranks divide the layer's work."""
        self.dispatch: Dispatch = dispatch_here
        """Brings tokens to their experts; expert parallelism exchanges them between ranks."""
        self.shared: FeedForward | None = None
        if moe.shared_experts:
            self.shared = FeedForward(config.model_copy(update=_shared(config, moe.shared_experts * moe.ffn_hidden)))
        self.coefficients = ResultWeights(config) if moe.residual else None
        """The weights of routed and shared experts; None if their results are added."""

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """Map ``[B, S, H]`` to ``[B, S, H]``."""
        inner_BSH, joined = self.division.enter(x_BSH), self.division.joined
        beside = None if self.shared is None else partial(self.shared, inner_BSH if joined else x_BSH)
        out_BSH, of_shared_BSH = self.mixed(inner_BSH, beside)
        if of_shared_BSH is None:
            return self.division.leave(out_BSH, x_BSH)
        if self.coefficients is not None:
            return self._weighed(self.coefficients(inner_BSH), out_BSH, of_shared_BSH, x_BSH)
        if joined:
            return self.division.leave(out_BSH + of_shared_BSH, x_BSH)
        return self.division.leave(out_BSH, x_BSH) + of_shared_BSH

    def _weighed(
        self, weights_BS2: torch.Tensor, out_BSH: torch.Tensor, of_shared_BSH: torch.Tensor, x_BSH: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of both results; ``weights_BS2`` are those of the tokens that this rank routes.

        Each rank multiplies what it computed itself, so that the gradients of its weights are a part of the sum over
        tensor ranks, as those of the router are.
        """
        routed_BSH = out_BSH * weights_BS2[..., :1]
        if self.division.joined:
            return self.division.leave(routed_BSH + of_shared_BSH * weights_BS2[..., 1:], x_BSH)
        # Shared experts have results of all tokens here, so the weights of all tokens travel with the routed results.
        every_BSh = self.division.leave(torch.cat([routed_BSH, weights_BS2[..., 1:]], dim=-1), x_BSH)
        return every_BSh[..., :-1] + of_shared_BSH * every_BSh[..., -1:]

    def mixed(self, x_BSH: torch.Tensor, beside: Beside | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the tokens' results of routed experts, and the result of ``beside``, which may run meanwhile."""
        x_TH = x_BSH.flatten(0, 1)
        choices = self.router(x_TH, len(x_BSH))
        out_TH, other = self.dispatch(self, x_TH, choices, beside)
        return out_TH.view_as(x_BSH), other


def _shared(config: ModelConfig, width: int) -> dict[str, object]:
    """Return the fields of the network of shared experts; it has no biases, as experts have none."""
    return {"ffn_hidden": width, "ffn_bias": False}
