"""Sends a token once to each node that holds experts of its choice, and spreads it there (DeepEP's way).

A token's row crosses along the rail, to the rank of the other node that has the sender's place, together with the
choices of that node; the slow links carry one row per token and node instead of one per token and expert. That rank
sends one row per choice to the ranks of its node: a row per token and rank would save little where experts are spread
over many ranks, need a second list of choices, and results come back one per choice anyway (DeepSeek-V3, arXiv
2412.19437, section 3.2.2; https://github.com/deepseek-ai/DeepEP).

Results come back in one of two forms. Not summed, each returns to the token's rank, which sums in the order of a single
exchange of all ranks (:mod:`partool_runtime.parallel.expert.dispatch`): all values, also the gradients, have the bits
of that exchange. Summed, weights travel with the tokens, and each node returns one row per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from partool_kernels.moe.op import Routing, permute, unpermute
from partool_runtime.model.moe import Beside, MixtureOfExperts
from partool_runtime.model.routing import Choices
from partool_runtime.parallel.comm import EXPERT
from partool_runtime.parallel.expert.dispatch import choices_of_parts
from partool_runtime.parallel.expert.node_routes import NodeTeam, Numbers, Routes, RowCounts, find_routes
from partool_runtime.torch_internals.collectives import finished, start_exchange


class NodeFirst:
    """:class:`~partool_runtime.model.moe.Dispatch` by which a token crosses to each node once."""

    waits = True

    def __init__(self, team: NodeTeam) -> None:
        self.team = team

    def __call__(
        self, layer: MixtureOfExperts, x_TH: torch.Tensor, choices: Choices, beside: Beside | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`~partool_runtime.model.moe.Dispatch`; ``beside`` runs while rows cross between nodes."""
        team = self.team
        choices = choices_of_parts(choices, layer.number, team.ranks, team.parts)
        routes, numbers = find_routes(team, choices.experts, layer.number * team.parts)
        flight = _NodeFlight(team, numbers)
        travelling: torch.Tensor = _Crossed.apply(x_TH, flight, *routes)  # type: ignore[no-untyped-call]
        other = None if beside is None else beside()
        rows_LH: torch.Tensor = _Spread.apply(travelling, flight, *routes)  # type: ignore[no-untyped-call]
        results_LH = layer.experts(rows_LH, routes.local.ends)
        returned = _ReturnedSums if team.summed else _Returned
        out_TH: torch.Tensor = returned.apply(results_LH, choices.weights, flight, *routes)  # type: ignore[no-untyped-call]
        return out_TH, other


class _NodeFlight:
    """One layer's exchange: its numbers of rows, and gradients in flight between two functions of a backward pass."""

    def __init__(self, team: NodeTeam, numbers: Numbers) -> None:
        self.team, self.numbers = team, numbers
        self.gradients: torch.Tensor | None = None

    def cross(self, x_RH: torch.Tensor) -> torch.Tensor:
        """Start to send rows to the nodes of their tokens' experts."""
        return self._start(x_RH, self.numbers.crossing)

    def cross_back(self, x_AH: torch.Tensor) -> torch.Tensor:
        """Start to return one row for each row that crossed."""
        return self._start(x_AH, _back(self.numbers.crossing))

    def choices_back(self, x_CH: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Start to return one row for each choice."""
        return self._start(x_CH.index_select(0, routes.returning), self.numbers.returning)

    def spread(self, x_CH: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Send a row of each choice to the rank of its expert; return this rank's rows, sorted by expert."""
        way = self.numbers.spreading
        return permute(finished(start_exchange(x_CH, way.sent, way.received, self.team.node), EXPERT), routes.local)

    def gather(self, x_LH: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Send rows back inside the node; return a row for each choice that has spread."""
        way, rows = _back(self.numbers.spreading), unpermute(x_LH, routes.local)
        return finished(start_exchange(rows, way.sent, way.received, self.team.node), EXPERT)

    def _start(self, x_RH: torch.Tensor, way: RowCounts) -> torch.Tensor:
        return start_exchange(x_RH.contiguous(), way.sent, way.received, self.team.rail)


def _back(way: RowCounts) -> RowCounts:
    return RowCounts(way.received, way.sent)


def _sum_of_rows(rows_RH: torch.Tensor, routing: Routing, weights_TK: torch.Tensor | None = None) -> torch.Tensor:
    """Return the (weighted) sum of each token's rows, of which places without a row are at the end."""
    return unpermute(F.pad(rows_RH, (0, 0, 0, routing.places.numel() - len(rows_RH))), routing, weights_TK)


def _sum_of_choices(rows_CH: torch.Tensor, routes: Routes, weights_AK: torch.Tensor | None = None) -> torch.Tensor:
    """Return the (weighted) sum of the choices' rows of each row that has arrived, in the order of the choices.

    All places without a row share one row of zeros, as most of them have none.
    """
    places_AK = routes.spread_places.clamp(max=len(rows_CH))
    padded = F.pad(rows_CH, (0, 0, 0, 1))
    sums: torch.Tensor = torch.ops.partool.moe_unpermute(padded, places_AK, routes.spread_ends, weights_AK, "auto")
    return sums


def _row_weights(weights_TK: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Return the weights that travel with each row: those of the choices of its node."""
    return weights_TK[routes.tokens].masked_fill(~routes.chosen, 0)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


_NO_ROUTES = (None,) * len(Routes._fields)


class _Crossed(torch.autograd.Function):
    """Start of the crossing of one row per token and node; backward passes end the return of their gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_TH: torch.Tensor, flight: _NodeFlight, *tensors: torch.Tensor) -> torch.Tensor:
        routes = Routes(*tensors)
        ctx.flight = flight  # type: ignore[attr-defined]
        ctx.save_for_backward(*routes)
        return flight.cross(x_TH.index_select(0, routes.tokens))

    @staticmethod
    def backward(ctx: Any, grad_AH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        del grad_AH  # a placeholder: the gradients themselves are in flight
        routes, flight = Routes(*ctx.saved_tensors), ctx.flight
        gradients, flight.gradients = flight.gradients, None
        routing = routes.crossing if flight.team.summed else routes.by_expert
        return _sum_of_rows(finished(gradients, EXPERT), routing), None, *_NO_ROUTES


class _Spread(torch.autograd.Function):
    """End of the crossing and spread inside the node; backward passes begin the return of the gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, x_AH: torch.Tensor, flight: _NodeFlight, *tensors: torch.Tensor) -> torch.Tensor:
        routes = Routes(*tensors)
        ctx.flight, ctx.shape = flight, x_AH.shape  # type: ignore[attr-defined]
        ctx.save_for_backward(*routes)
        arrived_AH = finished(x_AH, EXPERT)
        return flight.spread(arrived_AH.index_select(0, _row(routes)), routes)

    @staticmethod
    def backward(ctx: Any, grad_LH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        routes, flight = Routes(*ctx.saved_tensors), ctx.flight
        grad_CH = flight.gather(grad_LH, routes)
        if flight.team.summed:
            flight.gradients = flight.cross_back(_sum_of_choices(grad_CH, routes))
        else:
            flight.gradients = flight.choices_back(grad_CH, routes)
        return grad_LH.new_zeros(()).expand(ctx.shape), None, *_NO_ROUTES


def _row(routes: Routes) -> torch.Tensor:
    """Return the arrived row of each choice that spreads in the node."""
    return routes.choices // routes.spread_places.shape[1]


class _Returned(torch.autograd.Function):
    """Return of every choice's result to its token's rank, which sums them.

    In backward passes a token's gradient crosses once to each node, with the weights of its choices there.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_LH: torch.Tensor, weights_TK: torch.Tensor, flight: _NodeFlight, *tensors: torch.Tensor
    ) -> torch.Tensor:
        routes = Routes(*tensors)
        returned_RH = finished(flight.choices_back(flight.gather(x_LH, routes), routes), EXPERT)
        # Dropped choices come after the rows of all experts, and have no results.
        returned_RH = F.pad(returned_RH, (0, 0, 0, routes.places.numel() - len(returned_RH)))
        ctx.flight = flight  # type: ignore[attr-defined]
        ctx.save_for_backward(returned_RH, weights_TK, *routes)
        return unpermute(returned_RH, routes.by_expert, weights_TK)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        returned_RH, weights_TK, *tensors = ctx.saved_tensors
        routes, flight = Routes(*tensors), ctx.flight
        crossing = flight.cross(grad_TH.index_select(0, routes.tokens))
        weights_A = finished(flight.cross(_row_weights(weights_TK, routes)), EXPERT).flatten()
        # The operator's gradient of the rows is that of the ranks of the experts, which get it from less traffic.
        _, grad_TK = torch.ops.partool.moe_unpermute_backward(
            grad_TH, returned_RH, routes.places, routes.ends, weights_TK, "auto"
        )
        upper_CH = _wide(finished(crossing, EXPERT).index_select(0, _row(routes)))
        weights_C1 = weights_A.index_select(0, routes.choices)[:, None]
        grad_CH = upper_CH.mul_(weights_C1.to(upper_CH.dtype)).to(grad_TH.dtype)
        return flight.spread(grad_CH, routes), grad_TK, None, *_NO_ROUTES


class _ReturnedSums(torch.autograd.Function):
    """Weighted sums of the choices' results in each node, their return to the tokens' ranks, and the sums of these."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_LH: torch.Tensor, weights_TK: torch.Tensor, flight: _NodeFlight, *tensors: torch.Tensor
    ) -> torch.Tensor:
        routes = Routes(*tensors)
        crossing = flight.cross(_row_weights(weights_TK, routes))
        results_CH = flight.gather(x_LH, routes)
        weights_AK = finished(crossing, EXPERT)
        returned_RH = finished(flight.cross_back(_sum_of_choices(results_CH, routes, weights_AK)), EXPERT)
        ctx.flight = flight  # type: ignore[attr-defined]
        ctx.save_for_backward(results_CH, weights_AK, *routes)
        return _sum_of_rows(returned_RH, routes.crossing)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        results_CH, weights_AK, *tensors = ctx.saved_tensors
        routes, flight = Routes(*tensors), ctx.flight
        arrived_AH = finished(flight.cross(grad_TH.index_select(0, routes.tokens)), EXPERT)
        upper_CH = _wide(arrived_AH.index_select(0, _row(routes)))
        grad_A = torch.zeros_like(weights_AK).flatten()
        grad_A.scatter_(0, routes.choices, (upper_CH * _wide(results_CH)).sum(dim=-1).to(grad_A.dtype))
        crossing = flight.cross_back(grad_A.view_as(weights_AK))
        weights_C1 = weights_AK.flatten().index_select(0, routes.choices)[:, None]
        grad_CH = upper_CH.mul_(weights_C1.to(upper_CH.dtype)).to(grad_TH.dtype)
        grad_LH = flight.spread(grad_CH, routes)
        # A choice's gradient is in one of its token's rows, and zero in the others.
        return grad_LH, _sum_of_rows(finished(crossing, EXPERT), routes.crossing), None, *_NO_ROUTES
