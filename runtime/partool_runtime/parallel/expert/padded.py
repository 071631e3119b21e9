"""Sends each rank the same number of rows, so that neither host nor compiler needs to know how many experts get.

Every rank sends every rank ``rows`` rows: a multiple of what they would be if all ranks got the same number (Megatron's
``moe_expert_rank_capacity_factor`` limits ranks likewise). Rows that no choice fills travel all the same, and
are left out of the experts' products; choices beyond the last row are dropped, the later tokens of an expert first.
Sizes follow from the shapes of the inputs, so layers with this exchange are compiled, and can be captured in graphs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd.function import FunctionCtx

from partool_kernels.moe.op import permute, route, unpermute
from partool_runtime.model.moe import Beside, MixtureOfExperts
from partool_runtime.model.norm import wide_dtype
from partool_runtime.model.routing import Choices
from partool_runtime.parallel.comm import EXPERT
from partool_runtime.parallel.expert.dispatch import ExchangedRows, choices_of_parts, exchange_rows
from partool_runtime.torch_internals.collectives import finished, start_exchange


class Slots(NamedTuple):
    """Placement of the K choices of T tokens in R = ranks · rows rows, ``rows`` for each rank in order."""

    of_choices: torch.Tensor
    """Row of each choice, int64 ``[T, K]``; 0 for a choice without a row."""
    kept: torch.Tensor
    """Whether each choice has a row, bool ``[T, K]``."""
    tokens: torch.Tensor
    """Token of each row, int64 ``[R]``; 0 for an empty row."""
    experts: torch.Tensor
    """Expert of each row among those of the rank that gets the row, int64 ``[R]``; −1 for an empty row."""
    choices: torch.Tensor
    """Index of each row's choice among all ``T · K``, int64 ``[R]``; ``T · K`` for an empty row."""


def rows_to_each(choices: int, tokens: tuple[int, ...], place: int, capacity: float) -> int:
    """Return how many rows each rank sends to each rank, of which the rank at ``place`` makes ``choices``.

    ``tokens`` are the ranks' tokens of a sequence; all ranks send as many rows as the one with the most. Nothing is
    dropped with a ``capacity`` of the number of ranks.
    """
    most = choices * max(tokens) // max(tokens[place], 1)
    return min(math.ceil(capacity * most / len(tokens)), most)


def slots_of(experts_TK: torch.Tensor, number: int, ranks: int, rows: int) -> Slots:
    """Return the rows of the choices ``experts_TK`` among ``number`` experts, ``number / ranks`` on each rank.

    A rank's rows are sorted by expert, and an expert's rows by token. Choices outside of the experts have no row.
    """
    here, device = number // ranks, experts_TK.device
    routing = route(experts_TK, number)
    ends_P = routing.ends[here - 1 :: here]
    begins_P = torch.cat([ends_P.new_zeros(1), ends_P[:-1]])
    ranks_TK = experts_TK.clamp(min=0) // here
    within_TK = routing.places - begins_P[ranks_TK]
    kept_TK = (experts_TK >= 0) & (within_TK < rows)
    slots_TK = torch.where(kept_TK, ranks_TK * rows + within_TK, ranks * rows)
    choices = torch.full((ranks * rows + 1,), experts_TK.numel(), dtype=torch.int64, device=device)
    choices = choices.scatter(0, slots_TK.flatten(), torch.arange(experts_TK.numel(), device=device))[:-1]
    filled_R = choices < experts_TK.numel()
    padded = torch.cat([experts_TK.flatten(), experts_TK.new_full((1,), -1)])[choices]
    tokens_R = torch.where(filled_R, choices // experts_TK.shape[1], 0)
    return Slots(
        torch.where(kept_TK, slots_TK, 0), kept_TK, tokens_R, torch.where(filled_R, padded % here, -1), choices
    )


@dataclass(frozen=True, slots=True)
class PaddedTeam:
    """The ranks that share the experts of each layer, and exchange rows of fixed numbers.

    See :class:`~partool_runtime.model.moe.Dispatch`.
    """

    waits: ClassVar[bool] = False
    group_name: str
    place: int
    """Place of this rank in the group."""
    tokens: tuple[int, ...]
    """Number of tokens of a sequence that each rank routes; each has at least one."""
    capacity: float
    """Rows from each rank to each, as a multiple of an even share of the choices."""
    parts: int = 1
    """Number of neighbouring ranks that hold parts of the same experts."""

    def __call__(
        self, layer: MixtureOfExperts, x_TH: torch.Tensor, choices: Choices, beside: Beside | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Dispatch tokens to experts on several ranks; ``beside`` runs while rows travel, unless it is compiled."""
        ranks = len(self.tokens)
        choices = choices_of_parts(choices, layer.number, ranks, self.parts)
        number = layer.number * self.parts
        rows = rows_to_each(choices.experts.numel(), self.tokens, self.place, self.capacity)
        slots = slots_of(choices.experts, number, ranks, rows)
        kept_TK = slots.kept
        if layer.router.observer is not None:
            kept_TK = layer.router.observer.without_row(choices.experts, kept_TK, self.parts)

        even = [rows] * ranks
        experts_R = finished(start_exchange(slots.experts, even, even, self.group_name), EXPERT)
        local = route(experts_R[:, None], number // ranks)
        arrived_RH, other = self._exchange(_spread(x_TH, slots, kept_TK), rows, beside)
        sorted_RH = permute(arrived_RH, local)
        del arrived_RH  # the experts' backward passes need the sorted rows only
        returned_RH, _ = self._exchange(unpermute(layer.experts(sorted_RH, local.ends), local), rows, None)
        weights_TK = choices.weights * kept_TK
        out_TH: torch.Tensor = _Summed.apply(returned_RH, weights_TK, slots)  # type: ignore[no-untyped-call]
        return out_TH, other

    def _exchange(
        self, x_RH: torch.Tensor, rows: int, beside: Beside | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        even = [rows] * len(self.tokens)
        if not torch.compiler.is_compiling():
            return exchange_rows(x_RH, ExchangedRows(even, even, self.group_name), beside)
        arrived_RH: torch.Tensor = _Exchanged.apply(x_RH, rows, len(self.tokens), self.group_name)  # type: ignore[no-untyped-call]
        return arrived_RH, None if beside is None else beside()


def _rows_summed(rows_RH: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    """Return the sum of each token's rows times their weights, in float32 or wider, one choice after the other."""
    wide = wide_dtype(rows_RH.dtype)
    sums_TH = rows_RH.new_zeros(len(slots_TK), rows_RH.shape[1], dtype=wide)
    for slots_T, weights_T in zip(slots_TK.unbind(1), weights_TK.to(wide).unbind(1), strict=True):
        sums_TH += rows_RH[slots_T] * weights_T[:, None]
    return sums_TH.to(rows_RH.dtype)


def _spread(x_TH: torch.Tensor, slots: Slots, kept_TK: torch.Tensor) -> torch.Tensor:
    """Return the rows ``[R, H]`` of tokens; empty rows repeat a token, whose gradient they do not change."""
    rows_RH: torch.Tensor = _Spread.apply(x_TH, slots.tokens, slots.of_choices, kept_TK)  # type: ignore[no-untyped-call]
    return rows_RH


class _Spread(torch.autograd.Function):
    """The rows of tokens; a token's gradient is the sum of its rows' gradients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_TH: torch.Tensor, tokens_R: torch.Tensor, slots_TK: torch.Tensor, kept_TK: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(slots_TK, kept_TK)
        if not len(x_TH):
            return x_TH.new_zeros(len(tokens_R), x_TH.shape[1])
        return x_TH[tokens_R]

    @staticmethod
    def backward(ctx: Any, grad_RH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        slots_TK, kept_TK = ctx.saved_tensors
        return _rows_summed(grad_RH, slots_TK, kept_TK), None, None, None


class _Summed(torch.autograd.Function):
    """The weighted sum of each token's rows; rows of choices that are not kept have a weight of zero."""

    @staticmethod
    def forward(ctx: FunctionCtx, rows_RH: torch.Tensor, weights_TK: torch.Tensor, slots: Slots) -> torch.Tensor:
        ctx.save_for_backward(rows_RH, weights_TK, slots.of_choices, slots.tokens, slots.choices)
        return _rows_summed(rows_RH, slots.of_choices, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows_RH, weights_TK, slots_TK, tokens_R, choices_R = ctx.saved_tensors
        wide = wide_dtype(rows_RH.dtype)
        weights_R = torch.cat([weights_TK.flatten(), weights_TK.new_zeros(1)])[choices_R].to(wide)
        grad_weights = [(grad_TH * rows_RH[slots_T]).sum(dim=-1, dtype=wide) for slots_T in slots_TK.unbind(1)]
        # Multiplied in place: products in the wide type would be the largest tensor of the layer.
        grad_rows = grad_TH[tokens_R].mul_(weights_R[:, None])
        return grad_rows, torch.stack(grad_weights, dim=1).to(weights_TK.dtype), None


class _Exchanged(torch.autograd.Function):
    """An all-to-all of equal parts, as compilers follow it; so are the gradients exchanged."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_RH: torch.Tensor, rows: int, ranks: int, group_name: str) -> torch.Tensor:
        ctx.way = [rows] * ranks, group_name  # type: ignore[attr-defined]
        return finished(start_exchange(x_RH.contiguous(), [rows] * ranks, [rows] * ranks, group_name), EXPERT)

    @staticmethod
    def backward(ctx: Any, grad_RH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        even, group_name = ctx.way
        return finished(start_exchange(grad_RH.contiguous(), even, even, group_name), EXPERT), None, None, None
