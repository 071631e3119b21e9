"""What every method of sequence parallelism is made of."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from partool.layout.sequence import Spans, index, tokens
from partool.plan.layout import Layout
from partool_runtime.model.attention import AttentionLayout, Tokens
from partool_runtime.model.decoder import Block
from partool_runtime.model.operator import Exchange as Exchange  # noqa: PLC0414 - part of what methods are made of
from partool_runtime.parallel.comm import SEQUENCE


@dataclass(frozen=True, slots=True)
class SequenceTeam:
    """The ranks that share sequences, and which tokens each of them holds."""

    group: dist.ProcessGroup
    rank: int
    """Place of this rank among them."""
    shares: tuple[Spans, ...]
    """Tokens of each of them, in order."""
    everyone: tuple[tuple[int, ...], ...]
    """The ranks of the world that form each such group, this one's among them; all ranks know them in this order."""

    @property
    def ranks(self) -> int:
        """How many they are."""
        return len(self.shares)

    @property
    def sizes(self) -> list[int]:
        """Tokens of each."""
        return [tokens(spans) for spans in self.shares]

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return sum(self.sizes)

    def index(self, rank: int) -> list[int]:
        """Return the places in the sequence of a rank's tokens."""
        return index(self.shares[rank])


def open_groups(team: SequenceTeam, sets: Iterable[Sequence[int]]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Return this rank's group of each set of places in the team that it is in, by the set.

    A collective of all ranks of the world, which open the groups of all teams in the same order.
    """
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    mine = dist.get_rank()
    for places in sets:
        for members in team.everyone:
            ranks = [members[place] for place in places]
            group = dist.new_group(ranks, group_desc=SEQUENCE)
            if mine in ranks:
                found[tuple(places)] = group
    return found


def method_named(name: str) -> Put:
    """Return what cuts a model's attention by a method: ``put`` of the module of its name; raises ImportError."""
    put: Put = importlib.import_module(f"partool_runtime.parallel.sequence.{name}").put
    return put


class Attend(Protocol):
    """A replacement of :func:`partool_runtime.model.attend` (``SelfAttention.core``)."""

    def __call__(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        tokens: Tokens | None,
    ) -> torch.Tensor:
        """Return the attention of this rank's queries to all keys that they see, ``[B, N, S, D]``.

        S are this rank's tokens, N and K the heads of its tensor rank; keys see by ``tokens.index_S``, windows of
        ``layout`` and ``tokens.documents_BL``.
        """
        ...


class Put(Protocol):
    """The function ``put`` of a method's module, which puts the method into layers of a model."""

    def __call__(self, blocks: Sequence[Block], team: SequenceTeam, layout: Layout) -> None:
        """Let these layers attend, in place; ``layout`` is the plan's. A collective of all ranks of the world.

        Most set ``block.attention.core`` to an :class:`Attend`.
        """
        ...
