"""Types shared by all methods of sequence parallelism."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import torch.distributed as dist

from partool.layout.sequence import Spans, index, tokens
from partool.plan.layout import Layout
from partool_runtime.groups import Groups
from partool_runtime.model.decoder import Block
from partool_runtime.model.operator import Exchange as Exchange  # noqa: PLC0414 - re-exported for the methods
from partool_runtime.parallel.comm import SEQUENCE


@dataclass(frozen=True, slots=True)
class SequenceTeam:
    """Ranks that share sequences, and the tokens that each rank holds."""

    opened: dist.ProcessGroup | None
    """Process group of the team; None if the method exchanges nothing among exactly the ranks of the team."""
    rank: int
    """Place of this rank in the team."""
    shares: tuple[Spans, ...]
    """Tokens of each rank, in the order of the team."""
    everyone: tuple[tuple[int, ...], ...]
    """World ranks of every team, this team included; the list is the same on all ranks."""
    groups: Groups = field(default_factory=Groups)
    """Opens groups of other sets of ranks; a run passes those of its :class:`~partool_runtime.mesh.Ranks`."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the team, for methods that exchange among all its ranks."""
        assert self.opened is not None, "the method opens groups of its own"
        return self.opened

    @property
    def ranks(self) -> int:
        """Number of ranks in the team."""
        return len(self.shares)

    @property
    def sizes(self) -> list[int]:
        """Number of tokens of each rank."""
        return [tokens(spans) for spans in self.shares]

    @property
    def length(self) -> int:
        """Number of tokens of a whole sequence."""
        return sum(self.sizes)

    def index(self, rank: int) -> list[int]:
        """Return the positions of a rank's tokens in the sequence."""
        return index(self.shares[rank])


def open_sets(team: SequenceTeam, sets: Iterable[Sequence[int]]) -> dist.ProcessGroup:
    """Return the process group of that one of ``sets`` (of places in the team) which contains this rank's place.

    The sets are disjoint, and each has several places. A collective of all ranks of the world, which open the groups of
    all teams.
    """
    group = team.groups.of(of_teams(team, sets), SEQUENCE)
    assert group is not None, "every rank is in a set"
    return group


def of_teams(team: SequenceTeam, sets: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the world ranks of sets of places, for every team."""
    sets = list(sets)
    return tuple(tuple(members[place] for place in places) for members in team.everyone for places in sets)


def method_named(name: str) -> Put:
    """Return the function ``put`` that applies a method. Raises ImportError if the method has no module."""
    return cast(Put, importlib.import_module(f"partool_runtime.parallel.sequence.{name}").put)


class Put(Protocol):
    """Type of the function ``put`` of a method's module."""

    def __call__(self, blocks: Sequence[Block], team: SequenceTeam, layout: Layout) -> None:
        """Apply the method to ``blocks``, in place; ``layout`` is the plan's. A collective of all ranks of the world.

        Most methods set ``block.attention.core`` to an :class:`~partool_runtime.model.attention.Attend`.
        """
        ...
