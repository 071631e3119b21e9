"""The ways of rows where each token crosses to a node once: indices on the device, and numbers that the host reads.

A *rail* is the ranks that have the same place in their nodes. Rows travel between nodes along rails only, and spread
from there to the ranks of the node.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from partool_kernels.moe.op import Routing, route
from partool_runtime.parallel.comm import EXPERT
from partool_runtime.parallel.expert.dispatch import Read, balanced_choices
from partool_runtime.torch_internals.collectives import finished, start_exchange


@dataclass(frozen=True, slots=True)
class NodeTeam:
    """The ranks that share the experts of each layer, which are all ranks of several nodes or as many of each node."""

    rail: str
    """Name of the group of the ranks with this rank's place in their nodes."""
    node: str
    """Name of the group of the ranks of this node."""
    place: int
    """Place of this rank among the ranks that share the experts, node after node."""
    inside: int
    """Number of these ranks in each node."""
    tokens: tuple[int, ...]
    """Number of tokens of a sequence that each rank routes."""
    read: Read
    parts: int = 1
    """Number of neighbouring ranks that hold parts of the same experts."""
    summed: bool = False
    """Whether the results for a token are summed in each node before they return."""

    @property
    def ranks(self) -> int:
        """Number of ranks that share the experts."""
        return len(self.tokens)

    @property
    def nodes(self) -> int:
        """Number of nodes of these ranks."""
        return len(self.tokens) // self.inside

    def numbers(self, totals: torch.Tensor, choices: int, experts: int, chosen: int) -> Numbers:
        """Return the numbers of rows on both levels, which ``totals`` has on the device.

        ``choices`` is the number of this rank's choices, ``chosen`` that of each token, of so many ``experts``.
        """
        counts = self.read(totals, partial(self._balanced, choices, experts, chosen))
        nodes, inside = self.nodes, self.inside
        ends = [nodes, 2 * nodes, 3 * nodes, 4 * nodes, 4 * nodes + inside]
        parts = [counts[start:stop] for start, stop in zip([0, *ends], [*ends, None], strict=True)]
        return Numbers(RowCounts(parts[0], parts[1]), RowCounts(parts[3], parts[2]), RowCounts(parts[4], parts[5]))

    def _balanced(self, choices: int, experts: int, chosen: int) -> list[int]:
        """Return the numbers if every expert got as many rows, and tokens chose their experts at random."""
        parts = balanced_choices(self.tokens, choices, self.place)
        inside, nodes = self.inside, range(self.nodes)
        here, place = divmod(self.place, inside)
        missing = _missing(experts, experts // self.nodes, chosen)

        def at_node(source: int, node: int) -> int:
            return sum(parts[source][node * inside : (node + 1) * inside])

        def crossing(source: int, node: int) -> int:
            expected, most = round(sum(parts[source]) / max(chosen, 1) * (1.0 - missing)), at_node(source, node)
            return min(max(expected, -(-most // max(chosen, 1))), most)

        def spread(source: int, to: int) -> int:
            return sum(parts[node * inside + source][here * inside + to] for node in nodes)

        return [
            *(crossing(self.place, node) for node in nodes),
            *(crossing(node * inside + place, here) for node in nodes),
            *(at_node(self.place, node) for node in nodes),
            *(at_node(node * inside + place, here) for node in nodes),
            *(spread(place, to) for to in range(inside)),
            *(spread(source, place) for source in range(inside)),
        ]


def _missing(experts: int, of_node: int, chosen: int) -> float:
    """Return the probability that a token, which draws different experts, has none of a node's."""
    missing = 1.0
    for drawn in range(min(chosen, experts)):
        missing *= max(experts - of_node - drawn, 0) / (experts - drawn)
    return missing


class RowCounts(NamedTuple):
    """Numbers of rows that this rank sends to each rank of a group, and receives from each."""

    sent: list[int]
    received: list[int]


class Numbers(NamedTuple):
    """Numbers of rows that travel."""

    crossing: RowCounts
    """Along the rail: one row per token and node."""
    returning: RowCounts
    """Along the rail, on the way back: one row per choice."""
    spreading: RowCounts
    """Inside the node: one row per choice."""


class Routes(NamedTuple):
    """Indices of rows; K is the number of choices of a token.

    R rows of this rank's T tokens cross, A rows arrive here along the rail, and C of their choices spread in the node.
    """

    places: torch.Tensor
    """``[T, K]``: place of each of this rank's choices, sorted by expert, as in :class:`Routing`."""
    ends: torch.Tensor
    crossing_places: torch.Tensor
    """``[T, K]``: place of the row of each token and node, at the token's first choice of an expert of this node."""
    crossing_ends: torch.Tensor
    tokens: torch.Tensor
    """``[R]``: token of each row that crosses."""
    chosen: torch.Tensor
    """``[R, K]``: which of the token's choices are of the row's node."""
    spread_places: torch.Tensor
    """``[A, K]``: place of the choices of rows that have arrived, sorted by the node's experts."""
    spread_ends: torch.Tensor
    choices: torch.Tensor
    """``[C]``: choice, of the A · K, of each row that spreads in the node."""
    returning: torch.Tensor
    """``[C]``: order in which results return along the rail, by source, and for each in the order of its choices."""
    local_places: torch.Tensor
    """``[L, 1]``: place of each row that this rank's experts get, sorted by expert and by the rank of its token."""
    local_ends: torch.Tensor

    @property
    def by_expert(self) -> Routing:
        """Placement of this rank's choices, by expert."""
        return Routing(self.places, self.ends)

    @property
    def crossing(self) -> Routing:
        """Placement of the rows that cross, by node."""
        return Routing(self.crossing_places, self.crossing_ends)

    @property
    def local(self) -> Routing:
        """Placement of the rows of this rank's experts."""
        return Routing(self.local_places, self.local_ends)


def find_routes(team: NodeTeam, experts_TK: torch.Tensor, number: int) -> tuple[Routes, Numbers]:
    """Return the ways of rows to ``number`` experts, of which the tokens choose ``experts_TK``; -1 was dropped.

    Ranks first tell each other along rails, and then inside nodes, how many rows each expert will get; the host waits
    for all numbers once. Then the choices of an arriving row follow as small integers.
    """
    of_node, choices = number // team.nodes, experts_TK.shape[1]
    by_expert = route(experts_TK, number)
    nodes_TK = torch.where(experts_TK < 0, -1, experts_TK // of_node)
    repeated_TK = (nodes_TK[:, :, None] == nodes_TK[:, None, :]).tril(-1).any(dim=-1)
    crossing = route(nodes_TK.masked_fill(repeated_TK, -1), team.nodes)
    totals, arriving_PGe = _announced(team, crossing.counts, by_expert.counts)
    numbers = team.numbers(totals, experts_TK.numel(), number, choices)

    order_R = _inverse(crossing.places)[: sum(numbers.crossing.sent)]
    token_R, node_R1 = order_R // choices, nodes_TK.flatten()[order_R][:, None]
    chosen_RK = nodes_TK[token_R] == node_R1
    lists_RK = torch.where(chosen_RK, experts_TK[token_R] - node_R1 * of_node, -1)
    lists_AK = _lists_exchanged(lists_RK, numbers.crossing, of_node, team.rail)
    spread = route(lists_AK, of_node)
    choice_C = _inverse(spread.places)[: sum(numbers.spreading.sent)]
    sources_A = _repeated(torch.tensor(numbers.crossing.received, device=choice_C.device), len(lists_AK))
    # The rows of a source stay in the order of experts and tokens, which is that of the source's choices.
    returning_C = torch.sort(sources_A[choice_C // choices], stable=True).indices
    local = _by_expert_and_rank(arriving_PGe, sum(numbers.spreading.received))
    return Routes(*by_expert, *crossing, token_R, chosen_RK, *spread, choice_C, returning_C, *local), numbers


def _announced(team: NodeTeam, counts_G: torch.Tensor, counts_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of rows of :meth:`NodeTeam.numbers`, and of the rows that this rank's experts get.

    ``counts_G`` are the numbers of this rank's rows that cross to each node, ``counts_E`` of choices of each expert.
    The rows of this rank's experts ``e`` are counted by the rank P of this node that sends them, and by the node G of
    their tokens.
    """
    inside, nodes = team.inside, team.nodes
    sent_GX = torch.cat([counts_G[:, None], counts_E.view(nodes, -1)], dim=1)
    received_GX = _exchanged(sent_GX, RowCounts([1] * nodes, [1] * nodes), team.rail)
    spread_PGe = received_GX[:, 1:].reshape(nodes, inside, -1).transpose(0, 1).contiguous()
    arriving_PGe = _exchanged(spread_PGe, RowCounts([1] * inside, [1] * inside), team.node)
    each = (counts_G, received_GX[:, 0], sent_GX[:, 1:].sum(dim=1), received_GX[:, 1:].sum(dim=1))
    return torch.cat([*each, spread_PGe.sum(dim=(1, 2)), arriving_PGe.sum(dim=(1, 2))]), arriving_PGe


def _exchanged(x: torch.Tensor, way: RowCounts, group_name: str) -> torch.Tensor:
    return finished(start_exchange(x.contiguous(), way.sent, way.received, group_name), EXPERT)


def _lists_exchanged(lists_RK: torch.Tensor, way: RowCounts, experts: int, rail: str) -> torch.Tensor:
    """Exchange the choices of rows as integers of two bytes, or of four in nodes of more experts than two can say."""
    small = torch.int16 if experts < 2**15 else torch.int32
    # Gloo and NCCL send no integers of two bytes, but they send bytes.
    sent = lists_RK.to(small).contiguous().view(torch.uint8)
    return _exchanged(sent, way, rail).view(small).to(torch.int64)


def _inverse(places: torch.Tensor) -> torch.Tensor:
    """Return the index of the choice at each place."""
    flat = places.reshape(-1)
    return torch.empty_like(flat).scatter_(0, flat, torch.arange(len(flat), device=flat.device))


def _repeated(counts: torch.Tensor, rows: int) -> torch.Tensor:
    """Return for each of ``rows`` rows, which come in runs of ``counts``, the index of its run."""
    runs = torch.arange(len(counts), device=counts.device)
    return torch.repeat_interleave(runs, counts, output_size=rows)


def _by_expert_and_rank(arriving_PGe: torch.Tensor, rows: int) -> Routing:
    """Return the placement of rows that came from each rank of the node, sorted by expert and then by node.

    Rows of an expert get the order of the ranks of their tokens, in which one exchange of all ranks delivers them.
    """
    inside, nodes, here = arriving_PGe.shape
    counts = arriving_PGe.transpose(1, 2).reshape(-1)
    run = _repeated(counts, rows)
    peer, expert, node = run // (here * nodes), run // nodes % here, run % nodes
    ranks = nodes * inside
    by_run = route((expert * ranks + node * inside + peer)[:, None], here * ranks)
    return Routing(by_run.places, by_run.ends.view(here, ranks)[:, -1].contiguous())
