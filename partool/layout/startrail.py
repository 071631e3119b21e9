"""Where the ranks of StarTrail stand: teams that share queries, and rings through which keys and values travel.

StarTrail (arXiv 2407.00611, first named WallFacer) lets a team of C ranks work on the queries of all of them. Each of
them meets the keys of one Cth of the teams only, which travel in a ring of R = ranks / C² ranks; together they meet
all. The ranks form C groups of R teams. The rings and teams of a group are its own; only the keys that each ring begins
with come from everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from partool.layout.sequence import Spans, tokens
from partool.spec.parallel import Inside


def fits(ranks: int, teams: int) -> bool:
    """Return True if so many ranks can form teams of ``teams``."""
    return ranks % teams**2 == 0


class Trails(NamedTuple):
    """The places of the ranks of one sequence-parallel group."""

    ranks: int
    members: int
    """Ranks of a team (C)."""
    inside: Inside = "teams"
    """The groups whose ranks follow each other; ranks of the other groups are as far apart as these are long."""

    @property
    def length(self) -> int:
        """Ranks of a ring (R), and teams of a group."""
        return self.ranks // self.members**2

    @property
    def teams(self) -> int:
        """Number of teams."""
        return self.ranks // self.members

    def place(self, rank: int) -> tuple[int, int]:
        """Return the team of a rank and its place in it."""
        group, within = divmod(rank, self.length * self.members)
        if self.inside == "teams":
            step, member = divmod(within, self.members)
        else:
            member, step = divmod(within, self.length)
        return group * self.length + step, member

    def rank(self, team: int, member: int) -> int:
        """Return who stands there."""
        group, step = divmod(team, self.length)
        within = step * self.members + member if self.inside == "teams" else member * self.length + step
        return group * self.length * self.members + within

    def team(self, number: int) -> list[int]:
        """Return the ranks of a team, in their order."""
        return [self.rank(number, member) for member in range(self.members)]

    def ring(self, rank: int) -> list[int]:
        """Return the ranks of a rank's ring; each sends to the next one, and the last one to the first."""
        team, member = self.place(rank)
        first = team // self.length * self.length
        return [self.rank(first + step, member) for step in range(self.length)]

    def block(self, rank: int, step: int = 0) -> int:
        """Return the team whose keys a rank meets at a step of its ring.

        A ring begins with every Cth team, as in the paper, so that where tokens see near ones only, near teams are met
        by different members.
        """
        team, member = self.place(rank)
        return (team - step) % self.length * self.members + member

    def readers(self, rank: int, step: int = 0) -> list[int]:
        """Return the ranks that meet the keys of a rank's team at a step of their rings, one of each group."""
        first, member = divmod(self.place(rank)[0], self.members)
        place = (first + step) % self.length
        return [self.rank(group * self.length + place, member) for group in range(self.members)]

    def by_rank(self, shares: Sequence[Spans]) -> tuple[Spans, ...]:
        """Return shares of tokens by rank, given in the order of the sequence: those of a team belong together."""
        found = []
        for rank in range(self.ranks):
            team, member = self.place(rank)
            found.append(shares[team * self.members + member])
        return tuple(found)

    def sizes(self, shares: Sequence[Spans]) -> list[int]:
        """Return the tokens of each team, of shares by rank."""
        return [sum(tokens(shares[rank]) for rank in self.team(team)) for team in range(self.teams)]
