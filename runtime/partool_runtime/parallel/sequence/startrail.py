"""StarTrail: teams that share queries, and several small rings for keys (arXiv 2407.00611, sections 3 and 4).

In a team of C ranks, each rank computes attention of the whole team's queries to 1/C of all keys; then the team merges
its members' results. In the paper, a team gathers its keys and sends them to the ring that starts with these keys; the
backward pass sends queries around the ring. Here each rank sends its keys directly to the ring that starts with them.
Both passes send keys around the ring, because keys are often smaller than queries: several query heads share a key
head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from partool.layout.sequence import Spans, tokens
from partool.layout.startrail import Trails
from partool.plan.layout import Layout
from partool_runtime.model.attention import AttentionLayout
from partool_runtime.model.blocks import BlockPair, Returned, Seen
from partool_runtime.model.decoder import Block
from partool_runtime.model.kernels import wide
from partool_runtime.parallel.sequence.halo import WithHalo
from partool_runtime.parallel.sequence.op import ExchangeAttend, Post, send
from partool_runtime.parallel.sequence.types import SequenceTeam


def put(blocks: Sequence[Block], team: SequenceTeam, layout: Layout) -> None:
    """Make layers attend in teams and rings; layers with windows fetch only keys that their queries see."""
    attend = attend_in(team, Trails(team.ranks, layout.sequence.teams, layout.sequence.inside))
    for block in blocks:
        block.attention.core = attend


def attend_in(team: SequenceTeam, trails: Trails) -> ExchangeAttend:
    """Return the function by which one rank attends with StarTrail."""
    return ExchangeAttend(WithHalo(team, StarTrail(team, trails)))


class ShareRows(NamedTuple):
    """A stretch of a team's tokens that is a range of rows in one member's share."""

    place: int
    """Position of the stretch's first token in the sequence."""
    member: int
    first: int
    past: int


class TeamBlock:
    """The tokens of a team, in the order of the sequence."""

    def __init__(self, shares: Sequence[Spans]) -> None:
        self.sizes = [tokens(spans) for spans in shares]
        """Number of tokens of each member."""
        pieces = []
        for member, spans in enumerate(shares):
            past = list(accumulate((stop - start for start, stop in spans), initial=0))
            pieces += [ShareRows(start, member, *row) for (start, _), row in zip(spans, pairwise(past), strict=True)]
        self._pieces = sorted(pieces)
        self.spans: Spans = tuple((piece.place, piece.place + piece.past - piece.first) for piece in self._pieces)

    @cached_property
    def size(self) -> int:
        """Number of tokens of all members."""
        return sum(self.sizes)

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return all members' rows in sequence order; tokens are the last dimension but one."""
        rows = [parts[p.member][..., p.first : p.past, :] for p in self._pieces]
        return torch.cat(rows, dim=-2) if rows else parts[0]

    def parts(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return each member's rows, given all members' rows in sequence order."""
        by_member: list[list[torch.Tensor]] = [[] for _ in self.sizes]
        row = 0
        rows: dict[ShareRows, int] = {}
        for piece in self._pieces:
            rows[piece] = row
            row += piece.past - piece.first
        for piece in sorted(self._pieces, key=lambda piece: (piece.member, piece.first)):
            by_member[piece.member].append(x[..., rows[piece] : rows[piece] + piece.past - piece.first, :])
        return [torch.cat(stretches, dim=-2) if stretches else x[..., :0, :] for stretches in by_member]


class StarTrail:
    """The :class:`Exchange` of StarTrail: makes one rank's transfers and merges the results of the rank's team."""

    def __init__(self, team: SequenceTeam, trails: Trails) -> None:
        self._group, self._rank, self._trails = team.group, team.rank, trails
        self._blocks = [TeamBlock([team.shares[rank] for rank in trails.team(n)]) for n in range(trails.teams)]
        number, self._member = trails.place(team.rank)
        self._mates = trails.team(number)
        self._team_block = self._blocks[number]
        ring = trails.ring(team.rank)
        place = ring.index(team.rank)
        self._next, self._before = ring[(place + 1) % len(ring)], ring[place - 1]

    def forward(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`."""
        (q_BNTD,), kv = self._begin([q_BNSD], k_BKSD, v_BKSD)
        seen, width = Seen(q_BNTD), k_BKSD.shape[3]
        for step in range(self._trails.length):
            post, following = self._pass_on(kv, step)
            seen.meet(*_pair(kv, width), self._meeting(step, layout, documents_BL))
            post.wait()
            kv = following
        out_BNTD, lse_BNT = seen.result()
        outs = self._from_mates(self._team_block.parts(out_BNTD))
        lses = self._from_mates(self._team_block.parts(lse_BNT[..., None]))
        mine = Seen(q_BNSD)
        for out, lse in zip(outs, lses, strict=True):
            mine.merge((0, q_BNSD.shape[2]), out, lse[..., 0])
        return mine.result()

    def backward(
        self,
        grad_BNSD: torch.Tensor,
        saved: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        layout: AttentionLayout,
        documents_BL: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`Exchange`."""
        q_BNSD, k_BKSD, v_BKSD, out_BNSD, lse_BNS = saved
        (q, grad, out, lse), kv = self._begin([q_BNSD, grad_BNSD, out_BNSD, lse_BNS[..., None]], k_BKSD, v_BKSD)
        returned, width = Returned(q, grad, out, lse[..., 0]), k_BKSD.shape[3]
        came: torch.Tensor | None = None
        travels: Post | None = None
        for step in range(self._trails.length):
            post, following = self._pass_on(kv, step)
            dkv = torch.zeros_like(kv, dtype=wide(kv.dtype))
            returned.meet(_pair(kv, width), _pair(dkv, width), self._meeting(step, layout, documents_BL))
            if travels is not None and came is not None:
                travels.wait()
                dkv += came
            if step + 1 < self._trails.length:
                came = self._room(kv, step + 1, dkv.dtype)
                travels = send([(self._next, dkv)], [(self._before, came)], self._group)
            post.wait()
            kv = following
        dk_BKSD, dv_BKSD = _pair(self._home(dkv), width)
        parts = self._from_mates(self._team_block.parts(returned.dq_BNQD.to(q_BNSD.dtype)))
        return _sum(parts, wide(q_BNSD.dtype)), dk_BKSD, dv_BKSD

    def _meeting(self, step: int, layout: AttentionLayout, documents_BL: torch.Tensor | None) -> BlockPair:
        keys = self._blocks[self._trails.block(self._rank, step)].spans
        return BlockPair(self._team_block.spans, keys, layout, documents_BL)

    def _begin(
        self, shared: list[torch.Tensor], k_BKSD: torch.Tensor, v_BKSD: torch.Tensor
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return the ``shared`` tensors of the whole team, and the first keys and values of this rank's ring.

        Keys and values are one tensor ``[B, K, S, D + V]``.
        """
        letters, wanted, rooms = self._to_mates(shared)
        kv = torch.cat((k_BKSD, v_BKSD), dim=-1)
        letters += [(reader, kv) for reader in self._trails.readers(self._rank) if reader != self._rank]
        first = self._trails.block(self._rank)
        owners, parts = self._trails.team(first), []
        for owner, size in zip(owners, self._blocks[first].sizes, strict=True):
            parts.append(kv if owner == self._rank else kv.new_empty(*kv.shape[:-2], size, kv.shape[-1]))
            if owner != self._rank:
                wanted.append((owner, parts[-1]))
        send(letters, wanted, self._group).wait()
        return [self._team_block.joined(room) for room in rooms], self._blocks[first].joined(parts)

    def _to_mates(
        self, shared: list[torch.Tensor]
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]], list[list[torch.Tensor]]]:
        """Return the sends to team mates, the receives from mates, and for each shared tensor all members' tensors."""
        letters, wanted, rooms = [], [], []
        for x in shared:
            room = [
                x if member == self._member else x.new_empty(*x.shape[:-2], size, x.shape[-1])
                for member, size in enumerate(self._team_block.sizes)
            ]
            rooms.append(room)
            for member, mate in enumerate(self._mates):
                if member != self._member:
                    letters.append((mate, x))
                    wanted.append((mate, room[member]))
        return letters, wanted, rooms

    def _from_mates(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send ``parts[member]`` to each member of the team, and return the parts received from the members."""
        mine = parts[self._member]
        rooms = [mine if member == self._member else mine.new_empty(mine.shape) for member in range(len(parts))]
        others = [(member, mate) for member, mate in enumerate(self._mates) if member != self._member]
        letters = [(mate, parts[member]) for member, mate in others]
        send(letters, [(mate, rooms[member]) for member, mate in others], self._group).wait()
        return rooms

    def _room(self, kv: torch.Tensor, step: int, dtype: torch.dtype) -> torch.Tensor:
        size = self._blocks[self._trails.block(self._rank, step)].size
        return kv.new_empty(*kv.shape[:-2], size, kv.shape[-1], dtype=dtype)

    def _pass_on(self, kv: torch.Tensor, step: int) -> tuple[Post, torch.Tensor]:
        """Start to pass keys and values on in the ring; return the transfer and the next step's keys and values."""
        if step + 1 == self._trails.length:
            return send([], [], self._group), kv
        following = self._room(kv, step + 1, kv.dtype)
        return send([(self._next, kv)], [(self._before, following)], self._group), following

    def _home(self, dkv: torch.Tensor) -> torch.Tensor:
        """Send the gradients of the last step's keys to their owners, and return the gradients of this rank's keys."""
        last = self._trails.length - 1
        number = self._trails.block(self._rank, last)
        owners = self._trails.team(number)
        parts = dict(zip(owners, self._blocks[number].parts(dkv), strict=True))
        size = self._team_block.sizes[self._member]
        rooms = {
            reader: parts[self._rank] if reader == self._rank else dkv.new_empty(*dkv.shape[:-2], size, dkv.shape[-1])
            for reader in self._trails.readers(self._rank, last)
        }
        letters = [(owner, part) for owner, part in parts.items() if owner != self._rank]
        wanted = [(reader, room) for reader, room in rooms.items() if reader != self._rank]
        send(letters, wanted, self._group).wait()
        return _sum(rooms.values(), dkv.dtype)


def _pair(both: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values from one tensor, in which keys have ``width`` columns."""
    return both[..., :width], both[..., width:]


def _sum(parts: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of the tensors ``parts``, added up in their order and in the type ``dtype``."""
    first, *others = parts
    total = first.to(dtype, copy=True)
    for part in others:
        total += part
    return total
