"""Findings about the exchanges of ranks, and the words that all of them share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from partool.layout.mesh import coordinates
from partool.plan.layout import Mesh
from partool.plan.rank_trace import Collective

SECTIONS = {
    "pp": ("parallel", "pipeline"),
    "dp_replicate": ("parallel", "data"),
    "dp_shard": ("parallel", "data"),
    "cp": ("parallel", "sequence"),
    "tp": ("parallel", "tensor"),
}
"""Axis of the mesh → section of the spec that sets its size."""
MESSAGES = ("send", "recv_")
"""Kinds with one sender and one receiver; all others take every rank of their group."""
KINDS = {
    "allreduce_": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "recv_": "receive",
}
"""Name of an operator → kind of exchange, where they differ. Operators of one kind match each other."""
_UNNAMED = ("", "undefined", "default_pg")
"""Purposes that torch gives to groups without one."""
_MOST = 6
"""Most ranks that a message lists."""


class ExchangeFinding(NamedTuple):
    """Something that is wrong with the exchanges of a step."""

    code: str
    """Rule code, PT592 to PT597."""
    message: str
    places: tuple[tuple[str, ...], ...]
    """Sections of the spec that make the group, such as ``(("parallel", "tensor"),)``."""
    ranks: tuple[int, ...]
    """Global ranks that the finding is about: two that disagree, or all of a circle."""
    group: tuple[int, ...]
    """Global ranks of the group; of a circle, those of its first exchange."""
    purpose: str
    """Description of the group."""
    number: int
    """Number of the exchange among those of the group, or of the pair of ranks, in a step; from 1."""


class Channel(NamedTuple):
    """Exchanges whose order counts: the collectives of a group, or its messages from one rank to another."""

    group: tuple[int, ...]
    purpose: str
    sender: int = -1
    """Rank that sends; -1 for collectives."""
    receiver: int = -1

    @classmethod
    def of(cls, issued: Collective, rank: int) -> Channel:
        """Return the channel of what a rank issued."""
        if issued.kind not in MESSAGES:
            return cls(issued.group, issued.purpose)
        ends = (rank, issued.peer) if issued.kind == "send" else (issued.peer, rank)
        return cls(issued.group, issued.purpose, *ends)

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that have to issue each exchange."""
        return self.group if self.sender < 0 else (self.sender, self.receiver)

    @property
    def words(self) -> str:
        """The channel in words."""
        purpose = "" if self.purpose in _UNNAMED else f" ({self.purpose})"
        if self.sender < 0:
            return f"the group of ranks {ranks_in_words(self.group)}{purpose}"
        return f"the messages from rank {self.sender} to rank {self.receiver}{purpose}"


def places(groups: Collection[Sequence[int]], mesh: Mesh) -> tuple[tuple[str, ...], ...]:
    """Return the sections of the spec that make groups: those of all axes along which ranks of one group differ."""
    sections: dict[tuple[str, ...], None] = {}
    for group in groups:
        inside = [coordinates(rank, mesh) for rank in group if 0 <= rank < mesh.world_size]
        for axis, along in zip(mesh._fields, zip(*inside, strict=True), strict=False):
            if len(set(along)) > 1:
                sections[SECTIONS[axis]] = None
    return tuple(sections)


def kind(issued: Collective) -> str:
    """Return the kind of exchange, which several operators may share."""
    return KINDS.get(issued.kind, issued.kind)


def words(issued: Collective) -> str:
    """Return what a rank issued, in words: kind, numbers of elements, type and peer."""
    text = f"{kind(issued)} of {'/'.join(map(str, issued.elements)) or 'no'} elements"
    if issued.dtype:
        text += f" of {issued.dtype}"
    if issued.kind in MESSAGES:
        text += f" {'to' if issued.kind == 'send' else 'from'} rank {issued.peer}"
    return text


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return ranks as a list; of many ranks the first ones and the last one."""
    if len(ranks) <= _MOST:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: _MOST - 2]))} … {ranks[-1]} ({len(ranks)} ranks)"
