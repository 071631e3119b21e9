"""Routers: each token's experts, their weights, and the losses that keep the load even.

Scores are a softmax over the experts, or a sigmoid of each (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). A selection
bias changes which experts are chosen, and never their weights (arXiv 2408.15664). All of it is computed in float32, or
wider.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from partool.spec.experts import Moe
from partool.spec.model import ModelConfig
from partool_runtime.model.norm import wide_dtype


class Choices(NamedTuple):
    """The experts of T tokens."""

    experts: torch.Tensor
    """Indices of the K chosen experts of each token, int64 ``[T, K]``; −1 for a choice that was dropped."""
    weights: torch.Tensor
    """Weights of the experts' results, ``[T, K]`` in float32 or wider."""


class Observer(Protocol):
    """Follows the load of a layer's experts, and limits it."""

    def counted(
        self, experts_TK: torch.Tensor, scores_TE: torch.Tensor, sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Count the choices of a training pass, and how undecided the scores are.

        The tokens are those of ``sequences`` sequences, one after the other. Returns the choices, on which all that
        follows must depend, as a compiler drops a count whose result nobody reads; and the factor of each token's share
        of each expert in the load-balancing loss, ``[sequences or 1, E]``, None if there is no such loss.
        """

    def kept(self, experts_TK: torch.Tensor, sequences: int) -> torch.Tensor:
        """Return the choices with −1 for those that exceed an expert's capacity."""

    def without_row(self, experts_TK: torch.Tensor, kept_TK: torch.Tensor, parts: int) -> torch.Tensor:
        """Count choices that an exchange drops, those of experts that are not ``kept_TK``; return ``kept_TK``.

        Each choice of an expert stands there once for each of its ``parts``.
        """

    def loss_weight(self) -> torch.Tensor:
        """Return the factor of a token's losses in the gradient of a step, a scalar."""


class Router(nn.Module):
    """A matrix of one row per expert, whose products with a token are the token's logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None, "a router of a dense model"
        self.moe = config.moe
        self.weight = nn.Parameter(torch.empty(self.moe.experts, config.hidden))
        nn.init.normal_(self.weight, std=config.init_std)
        self.bias: nn.Parameter | None = None
        if self.moe.bias_rate is not None:
            self.bias = nn.Parameter(torch.zeros(self.moe.experts), requires_grad=False)
        self.logit_bias = nn.Parameter(torch.zeros(self.moe.experts)) if self.moe.bias else None
        """Added to the logits, and trained as the matrix is; None without."""
        self.observer: Observer | None = None
        """Follows the load; without one all choices are kept, and no loss is added."""

    def forward(self, x_TH: torch.Tensor, sequences: int) -> Choices:
        """Return the choices of tokens ``[T, H]``, which are those of ``sequences`` sequences, one after the other."""
        wide = wide_dtype(x_TH.dtype)
        bias_E = None if self.logit_bias is None else self.logit_bias.to(wide)
        logits_TE = F.linear(x_TH.to(wide), self.weight.to(wide), bias_E)
        softmax = self.moe.scores == "softmax"
        scores_TE = logits_TE.softmax(dim=-1) if softmax else logits_TE.sigmoid()
        experts_TK = choose(scores_TE.detach(), self.bias, self.moe)
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.moe.normalise:
            weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + _LEAST)
        weights_TK = weights_TK * self.moe.scaling_factor
        if self.observer is None:
            return Choices(experts_TK, weights_TK)
        if torch.is_grad_enabled():
            experts_TK, factors_BE = self.observer.counted(experts_TK, scores_TE.detach(), sequences)
            loss = self._loss(logits_TE, scores_TE, factors_BE)
            if loss is not None:
                weights_TK = _WithLoss.apply(weights_TK, loss, self.observer.loss_weight)  # type: ignore[no-untyped-call]
        return Choices(self.observer.kept(experts_TK, sequences), weights_TK)

    def _loss(
        self, logits_TE: torch.Tensor, scores_TE: torch.Tensor, factors_BE: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return the sum over tokens of their losses, or None if the model has no such losses."""
        loss = None
        if factors_BE is not None and self.moe.aux_loss:
            shares_TE = scores_TE
            if self.moe.scores == "sigmoid":
                shares_TE = scores_TE / (scores_TE.sum(dim=-1, keepdim=True) + _LEAST)
            of_sequences = shares_TE.view(len(factors_BE), -1, self.moe.experts).sum(dim=1)
            loss = self.moe.aux_loss * (of_sequences * factors_BE).sum()
        if self.moe.z_loss:
            squares = self.moe.z_loss * logits_TE.logsumexp(dim=-1).square().sum()
            loss = squares if loss is None else loss + squares
        return loss


_LEAST = 1e-20
"""Added to sums of scores before a division, so that scores of zero have weights of zero."""


class _WithLoss(torch.autograd.Function):
    """Identity, whose backward pass adds the gradient of a loss that was computed on the way."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: torch.Tensor, loss: torch.Tensor, weight: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        ctx.weight, ctx.dtype = weight, loss.dtype  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, ctx.weight().to(ctx.dtype), None


def choose(scores_TE: torch.Tensor, bias_E: torch.Tensor | None, moe: Moe) -> torch.Tensor:
    """Return the ``top_k`` experts of each token, int64 ``[T, K]``, the highest biased score first.

    With groups (DeepSeek-V2, arXiv 2405.04434, section 2.2.2), experts outside of a token's best groups are not chosen.
    """
    top2 = moe.group_score == "top2"
    groups = (moe.groups, moe.top_groups if moe.groups > 1 else 1)
    chosen: torch.Tensor = torch.ops.partool.moe_choose(scores_TE, bias_E, moe.top_k, *groups, top2)
    return balanced(chosen, moe.experts) if moe.routing == "balanced" else chosen


def balanced(chosen_TK: torch.Tensor, experts: int) -> torch.Tensor:
    """Return choices of the same shape that take all experts in turn."""
    return torch.arange(chosen_TK.numel(), device=chosen_TK.device).remainder(experts).view_as(chosen_TK)


# An operator of its own, so that recomputation keeps its result: a second pass uses the choices of the first.
@torch.library.custom_op(
    "partool::moe_choose",
    mutates_args=(),
    schema="(Tensor scores, Tensor? bias, int top_k, int groups, int top_groups, bool top2) -> Tensor",
)
def _choose(  # noqa: PLR0917
    scores: torch.Tensor, bias: torch.Tensor | None, top_k: int, groups: int, top_groups: int, top2: bool
) -> torch.Tensor:
    biased_TE = scores if bias is None else scores + bias.to(scores.dtype)
    if groups > 1:
        each = biased_TE.shape[1] // groups
        of_groups_TGE = biased_TE.view(-1, groups, each)
        best_TG = of_groups_TGE.topk(2, dim=-1).values.sum(dim=-1) if top2 else of_groups_TGE.amax(dim=-1)
        allowed_TG = torch.zeros_like(best_TG, dtype=torch.bool)
        allowed_TG.scatter_(1, best_TG.topk(top_groups, dim=-1).indices, True)
        biased_TE = of_groups_TGE.masked_fill(~allowed_TG[..., None], -torch.inf).flatten(1)
    return biased_TE.topk(top_k, dim=-1).indices


@_choose.register_fake
def _(  # noqa: PLR0917
    scores: torch.Tensor, bias: torch.Tensor | None, top_k: int, groups: int, top_groups: int, top2: bool
) -> torch.Tensor:
    return scores.new_empty((scores.shape[0], top_k), dtype=torch.int64)


CHOOSE: Any = torch.ops.partool.moe_choose.default
"""The operator of :func:`choose`."""
