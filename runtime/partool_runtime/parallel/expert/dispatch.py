"""Sends tokens to the ranks that hold their experts, and the experts' results back (GShard, arXiv 2006.16668).

Each rank holds the same number of consecutive experts, or neighbouring ranks hold one part each of their inner widths.
As an expert works on each inner element alone, its result is the sum of its parts' results: a part is treated as an
expert of its own, which gets the same tokens with the same weights as the others. First the ranks exchange how many
rows they will send, then the rows, sorted by expert; both are all-to-alls of the ranks that share the experts. Every
rank takes part, even without tokens, or with experts that no token chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from partool_kernels.moe.op import Routing, permute, route, unpermute
from partool_runtime.model.moe import Beside, MixtureOfExperts
from partool_runtime.model.routing import Choices
from partool_runtime.parallel.comm import EXPERT
from partool_runtime.torch_internals.collectives import finished, start_exchange

Read = Callable[[torch.Tensor, Callable[[], list[int]]], list[int]]
"""Function that returns the numbers of rows in a tensor. The function that it is given computes what the numbers would
be if every expert got the same number of rows."""


def read_rows(totals: torch.Tensor, balanced: Callable[[], list[int]]) -> list[int]:
    """Read the numbers of rows from the device, for which the host waits; see :data:`Read`."""
    del balanced
    row_counts: list[int] = totals.tolist()
    return row_counts


def balanced_choices(tokens: Sequence[int], choices: int, place: int) -> list[list[int]]:
    """Return how many choices each rank's tokens make of each rank's experts, if all experts get the same number.

    ``tokens`` are the ranks' tokens of a sequence, and ``choices`` those that the tokens of the rank at ``place`` make.
    """
    ranks, mine = len(tokens), max(tokens[place], 1)
    of_ranks = [choices * each // mine for each in tokens]
    return [[each * (to + 1) // ranks - each * to // ranks for to in range(ranks)] for each in of_ranks]


@dataclass(frozen=True, slots=True)
class ExpertTeam:
    """The ranks that share the experts of each layer."""

    waits: ClassVar[bool] = True
    group_name: str
    place: int
    """Place of this rank in the group."""
    tokens: tuple[int, ...]
    """Number of tokens of a sequence that each rank routes."""
    read: Read
    parts: int = 1
    """Number of neighbouring ranks that hold parts of the same experts."""

    @property
    def ranks(self) -> int:
        """Number of ranks that share the experts."""
        return len(self.tokens)

    def rows(self, totals: torch.Tensor, choices: int) -> ExchangedRows:
        """Return the numbers of rows to and from each rank, of which ``totals`` is on the device."""
        row_counts = self.read(totals, partial(self._balanced, choices))
        return ExchangedRows(row_counts[: self.ranks], row_counts[self.ranks :], self.group_name)

    def _balanced(self, choices: int) -> list[int]:
        parts = balanced_choices(self.tokens, choices, self.place)
        return [*parts[self.place], *(of_rank[self.place] for of_rank in parts)]

    def __call__(
        self, layer: MixtureOfExperts, x_TH: torch.Tensor, choices: Choices, beside: Beside | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`~partool_runtime.model.moe.Dispatch`; ``beside`` runs while rows travel."""
        return routed(layer, self, x_TH, choices, beside)


@dataclass(frozen=True, slots=True)
class ExchangedRows:
    """Numbers of rows that this rank sends to each rank, and receives from each."""

    sent: list[int]
    received: list[int]
    group_name: str

    @property
    def back(self) -> ExchangedRows:
        """The numbers of the way back."""
        return ExchangedRows(self.received, self.sent, self.group_name)


def routed(
    layer: MixtureOfExperts, team: ExpertTeam, x_TH: torch.Tensor, choices: Choices, beside: Beside | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dispatch tokens to experts on several ranks; ``beside`` runs while rows travel."""
    choices = choices_of_parts(choices, layer.number, team.ranks, team.parts)
    number = layer.number * team.parts
    routing = route(choices.experts, number)
    here = number // team.ranks
    sent_E = routing.counts
    received_E = finished(start_exchange(sent_E, [here] * team.ranks, [here] * team.ranks, team.group_name), EXPERT)
    totals = torch.stack([sent_E, received_E]).view(2, team.ranks, here).sum(dim=-1)
    rows = team.rows(totals.flatten(), choices.experts.numel())

    # Dropped choices come after the rows of all experts, and are not sent.
    arrived_RH, other = exchange_rows(permute(x_TH, routing)[: sum(rows.sent)], rows, beside)
    local = _by_expert(received_E, here, len(arrived_RH))
    sorted_RH = permute(arrived_RH, local)
    del arrived_RH  # the experts' backward passes need the sorted rows only
    returned_RH, _ = exchange_rows(unpermute(layer.experts(sorted_RH, local.ends), local), rows.back)
    if dropped := choices.experts.numel() - len(returned_RH):
        returned_RH = F.pad(returned_RH, (0, 0, 0, dropped))
    return unpermute(returned_RH, routing, choices.weights), other


def choices_of_parts(choices: Choices, number: int, ranks: int, parts: int) -> Choices:
    """Return the choices of experts' parts: each of ``number`` experts is chosen with all of its ``parts``.

    Parts are numbered by rank, as experts are: first one part of each of a few experts, then the next part of these.
    """
    if parts == 1:
        return choices
    here = number * parts // ranks
    experts_TK1 = choices.experts[..., None]
    first_TK1 = experts_TK1 // here * parts * here + experts_TK1 % here
    every_TKP = first_TK1 + here * torch.arange(parts, device=first_TK1.device)
    parts_TKP = torch.where(experts_TK1 < 0, experts_TK1, every_TKP)
    return Choices(parts_TKP.flatten(1), choices.weights.repeat_interleave(parts, dim=1))


def _by_expert(counts_E: torch.Tensor, here: int, rows: int) -> Routing:
    """Return the placement by expert of rows that came from every rank, sorted by expert for each rank."""
    experts_E = torch.arange(here, device=counts_E.device).repeat(len(counts_E) // here)
    return route(torch.repeat_interleave(experts_E, counts_E, output_size=rows)[:, None], here)


class _Flight:
    """An all-to-all of rows whose gradients are in flight between two functions of the backward pass."""

    def __init__(self, rows: ExchangedRows) -> None:
        self.rows = rows
        self.gradients: torch.Tensor | None = None


def exchange_rows(
    x_RH: torch.Tensor, rows: ExchangedRows, beside: Beside | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Exchange rows, and compute ``beside`` meanwhile, if given; the same happens with gradients in backward passes."""
    flight = _Flight(rows)
    travelling: torch.Tensor = _Started.apply(x_RH, flight)  # type: ignore[no-untyped-call]
    other = None if beside is None else beside()
    arrived: torch.Tensor = _Finished.apply(travelling, flight)  # type: ignore[no-untyped-call]
    return arrived, other


class _Started(torch.autograd.Function):
    """Begin of an all-to-all of rows; the backward pass completes the all-to-all of their gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_RH: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight  # type: ignore[attr-defined]
        rows = flight.rows
        return start_exchange(x_RH.contiguous(), rows.sent, rows.received, rows.group_name)

    @staticmethod
    def backward(ctx: Any, grad_RH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        del grad_RH  # a placeholder: the gradients themselves are in flight
        gradients, ctx.flight.gradients = ctx.flight.gradients, None
        return finished(gradients, EXPERT), None


class _Finished(torch.autograd.Function):
    """End of an all-to-all of rows; the backward pass begins the all-to-all of their gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_RH: torch.Tensor, flight: _Flight) -> torch.Tensor:
        ctx.flight = flight  # type: ignore[attr-defined]
        return finished(x_RH, EXPERT)

    @staticmethod
    def backward(ctx: Any, grad_RH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows = ctx.flight.rows
        ctx.flight.gradients = start_exchange(grad_RH.contiguous(), rows.received, rows.sent, rows.group_name)
        return grad_RH.new_zeros(()).expand(grad_RH.shape), None
