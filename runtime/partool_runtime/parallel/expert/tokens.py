"""Which tokens of a sequence each rank routes, where ranks share sequences or tensor ranks share their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

from partool.layout.mesh import shard_rows
from partool.layout.sequence import index
from partool.plan.types import Plan


@dataclass(frozen=True)
class TokenShares:
    """The places in the sequence of the tokens that each rank routes, in the order in which the rank holds them."""

    places: tuple[tuple[int, ...], ...]
    """For each of the ranks that hold the same sequences, the sequence axis before the tensor axis."""
    rank: int
    """Index of this rank among them."""

    @classmethod
    def of(cls, plan: Plan, sequence_place: int, tensor_place: int, *, tensor: int) -> TokenShares:
        """Return the shares of a plan, whose ``tensor`` ranks divide the tokens of their rank of the sequence axis."""
        places = []
        length = plan.training.sequence_length
        for spans in plan.shares or [((0, length),)]:
            positions = index(spans)
            places += [tuple(positions[slice(*shard_rows(len(positions), tensor, rank))]) for rank in range(tensor)]
        return cls(tuple(places), sequence_place * tensor + tensor_place)

    @property
    def most(self) -> int:
        """Largest number of tokens of a rank."""
        return max(len(positions) for positions in self.places)

    def padded(self, x_BSK: torch.Tensor) -> torch.Tensor:
        """Return this rank's values with zeros up to the largest number of tokens of a rank."""
        return F.pad(x_BSK, (0, 0, 0, self.most - x_BSK.shape[1]))

    def joined(self, of_ranks: torch.Tensor) -> torch.Tensor:
        """Return the values ``[B, S, K]`` of whole sequences from those of all ranks, ``[ranks, B, most, K]``."""
        flat = of_ranks.transpose(0, 1).flatten(1, 2)
        return flat[:, self._order.to(flat.device)]

    def mine(self, x_BSK: torch.Tensor) -> torch.Tensor:
        """Return this rank's values of those of whole sequences."""
        return x_BSK[:, torch.tensor(self.places[self.rank], dtype=torch.int64, device=x_BSK.device)]

    @cached_property
    def _order(self) -> torch.Tensor:
        """Index of each place of the sequence among the padded values of all ranks."""
        index_of = {
            place: rank * self.most + at
            for rank, positions in enumerate(self.places)
            for at, place in enumerate(positions)
        }
        return torch.tensor([index_of[place] for place in sorted(index_of)])
