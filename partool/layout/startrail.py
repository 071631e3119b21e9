"""Placement of ranks in StarTrail: teams that share queries, and rings through which keys and values are passed.

In StarTrail (arXiv 2407.00611, first named WallFacer) the C ranks of a team all work on the team's queries. Each member
attends to the keys of one Cth of the teams. These keys are passed around a ring of R = ranks / C² ranks; together the
members of a team cover all keys. The ranks form C groups of R teams. Each ring and each team lies within one group;
only the keys with which a ring starts come from all groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from partool.layout.sequence import Spans, tokens
from partool.spec.parallel import Inside


def fits(ranks: int, teams: int) -> bool:
    """Return True if ``ranks`` ranks can form teams of ``teams`` ranks each."""
    return ranks % teams**2 == 0


class Trails(NamedTuple):
    """The team and the ring of each rank of one sequence-parallel group."""

    ranks: int
    members: int
    """Number of ranks in a team (C)."""
    inside: Inside = "teams"
    """Kind of group (teams or rings) whose ranks are consecutive. In groups of the other kind, ranks are strided."""

    @property
    def length(self) -> int:
        """R: the number of ranks in a ring, which equals the number of teams in a group."""
        return self.ranks // self.members**2

    @property
    def teams(self) -> int:
        """Number of teams."""
        return self.ranks // self.members

    def place(self, rank: int) -> tuple[int, int]:
        """Return (number of the rank's team, index of the rank in the team)."""
        group, within = divmod(rank, self.length * self.members)
        if self.inside == "teams":
            step, member = divmod(within, self.members)
        else:
            member, step = divmod(within, self.length)
        return group * self.length + step, member

    def rank(self, team: int, member: int) -> int:
        """Return the rank with index ``member`` in a team; the inverse of :meth:`place`."""
        group, step = divmod(team, self.length)
        within = step * self.members + member if self.inside == "teams" else member * self.length + step
        return group * self.length * self.members + within

    def team(self, number: int) -> list[int]:
        """Return the ranks of a team, in the order of their index in the team."""
        return [self.rank(number, member) for member in range(self.members)]

    def ring(self, rank: int) -> list[int]:
        """Return the ranks of a rank's ring in order; each rank sends to the next, and the last rank to the first."""
        team, member = self.place(rank)
        first = team // self.length * self.length
        return [self.rank(first + step, member) for step in range(self.length)]

    def block(self, rank: int, step: int = 0) -> int:
        """Return the team whose keys a rank attends to at a step of its ring.

        A ring starts with every Cth team, as in the paper, so that with windowed attention different members of a team
        attend to neighbouring teams.
        """
        team, member = self.place(rank)
        return (team - step) % self.length * self.members + member

    def readers(self, rank: int, step: int = 0) -> list[int]:
        """Return the one rank of each group that, at ring step ``step``, attends to the keys of ``rank``'s team."""
        first, member = divmod(self.place(rank)[0], self.members)
        place = (first + step) % self.length
        return [self.rank(group * self.length + place, member) for group in range(self.members)]

    def by_rank(self, shares: Sequence[Spans]) -> tuple[Spans, ...]:
        """Return ``shares``, which are in the order of the sequence (team after team), in the order of ranks."""
        ordered = []
        for rank in range(self.ranks):
            team, member = self.place(rank)
            ordered.append(shares[team * self.members + member])
        return tuple(ordered)

    def sizes(self, shares: Sequence[Spans]) -> list[int]:
        """Return the number of tokens of each team; ``shares`` are in the order of ranks."""
        return [sum(tokens(shares[rank]) for rank in self.team(team)) for team in range(self.teams)]
