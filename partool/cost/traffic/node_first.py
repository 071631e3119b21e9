"""Bytes that a rank sends where tokens cross to each node once, inside nodes and between them."""

from __future__ import annotations

from typing import NamedTuple


class LevelBytes(NamedTuple):
    """Bytes that a rank sends to others."""

    inside: float
    """To the ranks of its node."""
    between: float
    """To ranks of other nodes, all of them along its rail."""


class NodeExchange(NamedTuple):
    """What a rank exchanges for one layer and micro-batch."""

    tokens: float
    """Tokens that the rank routes."""
    choices: int
    """Experts of a token, with all their parts."""
    experts: int
    """Experts of the layer, with all their parts."""
    nodes: int
    inside: int
    """Ranks of a node."""
    visited: float
    """Nodes with experts of a token, on average (:func:`partool.cost.traffic.node_visits.nodes_of_token`)."""
    row_bytes: int
    weight_bytes: int
    """Bytes of the weight of a choice."""
    summed: bool
    kept: float = 1.0
    """Share of the choices that no capacity drops."""

    def sent(self, forward: int, backward: int, numbers: int) -> LevelBytes:
        """Return the bytes of so many forward and backward passes, of which ``numbers`` exchange numbers of rows.

        A row crosses for each token and node, with all weights of the token, and the others have none. Inside the node
        a row goes to each choice, and one comes back. Numbers of rows are int64, choices of two bytes each.
        """
        crossing = self.tokens * self.visited * (self.nodes - 1) / self.nodes
        weights_bytes = crossing * self.choices * self.weight_bytes
        returning = self.tokens * self.kept * self.choices * (self.nodes - 1) / self.nodes
        of_node = self.experts // self.nodes
        heads: float = (1 + of_node) * (self.nodes - 1) * _COUNT_BYTES
        heads += crossing * self.choices * (_CHOICE_BYTES if of_node < 2**15 else 2 * _CHOICE_BYTES)
        if self.summed:
            each = 2 * crossing * self.row_bytes + weights_bytes
            between = (forward + backward) * each
        else:
            between = (forward + backward) * (crossing + returning) * self.row_bytes + backward * weights_bytes
        spread = self.tokens * self.kept * self.choices * (self.inside - 1) / self.inside
        inside = (forward + backward) * 2 * spread * self.row_bytes
        heads_inside = self.experts // self.inside * (self.inside - 1) * _COUNT_BYTES
        return LevelBytes(inside + numbers * heads_inside, between + numbers * heads)


_COUNT_BYTES = 8
_CHOICE_BYTES = 2
