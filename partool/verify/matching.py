"""Matches the exchanges of ranks with one another: each must meet the same one, in the same order, on its peers.

Collectives of a group are compared over all of its executed ranks: kind, type, numbers of elements and order. An
all-to-all may be uneven; what one rank sends to another must then be what the other one expects. The n-th message
from one rank to another must be the n-th one that the receiver takes. Of ranks that were not executed nothing is
judged. Operations of reductions and roots are not compared, as traces do not hold them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

from partool.plan.layout import Mesh
from partool.plan.rank_trace import Collective, RankTrace
from partool.plan.types import Plan
from partool.verify.findings import MESSAGES, Channel, ExchangeFinding, kind, places, ranks_in_words, words

_COMPARED = 16
"""Entries after a gap that must agree."""
_LONGEST = 64
"""Most entries that a gap may have if the rest of the lists differs, too."""
Issued = dict[Channel, dict[int, list[Collective]]]
"""Channel → rank → what it issued there, in order."""


def mismatches(plan: Plan, traces: Sequence[RankTrace]) -> list[ExchangeFinding]:
    """Return the first disagreement of each pair of ranks in each group, and exchanges outside of a rank's groups.

    ``traces`` are those of some of the plan's ranks or all. Findings are in the order of groups.
    """
    executed = {trace.rank for trace in traces}
    findings: list[ExchangeFinding] = []
    for channel, lists in sorted(by_channel(traces).items()):
        compared = _Compared(channel, lists, plan.layout.mesh)
        findings += compared.strangers()
        members = [rank for rank in dict.fromkeys(channel.members) if rank in executed]
        if len(members) == len(channel.members) or (channel.sender < 0 and len(members) > 1):
            findings += compared.differences(members)
    return findings


def by_channel(traces: Sequence[RankTrace]) -> Issued:
    """Return what each rank issued in each channel."""
    issued: Issued = {}
    for trace in traces:
        add: list[Callable[[Collective], None]] = []
        for each in trace.vocabulary:
            add.append(issued.setdefault(Channel.of(each, trace.rank), {}).setdefault(trace.rank, []).append)
        add.append(deque[Collective](maxlen=0).append)  # index COMPUTE, the last one
        vocabulary = [*trace.vocabulary, Collective("", (), "", (), "", -1)]
        for index in trace.order:
            add[index](vocabulary[index])
    return {channel: ranks for channel, ranks in issued.items() if any(ranks.values())}


class _Compared:
    """One channel, and what each rank issued in it."""

    def __init__(self, channel: Channel, issued: dict[int, list[Collective]], mesh: Mesh) -> None:
        self._channel, self._issued, self._mesh = channel, issued, mesh
        self._messages = channel.sender >= 0

    def strangers(self) -> Iterator[ExchangeFinding]:
        """Yield a finding for each rank that uses a group without being in it, or messages whose ends are not in it."""
        channel = self._channel
        for rank, mine in sorted(self._issued.items()):
            outside = [each for each in (rank, *channel.members) if each not in channel.group]
            self_sent = channel.sender == channel.receiver >= 0
            if mine and (outside or self_sent):
                group = ranks_in_words(channel.group)
                why = "to itself" if self_sent else f"but rank {outside[0]} is not in the group of ranks {group}"
                yield self._finding("PT596", f"rank {rank} issues {words(mine[0])}, {why}", (rank,), 0)

    def differences(self, members: Sequence[int]) -> Iterator[ExchangeFinding]:
        """Yield the first difference of each member from the list that most of them have."""
        lists = {rank: self._issued.get(rank, []) for rank in members}
        numbers: dict[tuple[object, ...], int] = {}
        coded = {
            rank: tuple([numbers.setdefault(_signature(each), len(numbers)) for each in mine])
            for rank, mine in lists.items()
        }
        (usual, _), *others = Counter(coded.values()).most_common()
        if not others:
            yield from self._uneven(lists)
            return
        first = next(rank for rank, mine in coded.items() if mine == usual)
        for rank, mine in coded.items():
            if (gap := divergence(usual, mine)) is None:
                continue
            if gap.missing:
                one, other = (first, rank) if gap.missing > 0 else (rank, first)
                yield self._skipped(one, other, gap.at, abs(gap.missing))
            else:
                first_words, other_words = words(lists[first][gap.at]), words(lists[rank][gap.at])
                code = "PT595" if self._messages else "PT593"
                yield self._finding(
                    code, f"rank {first} issues {first_words}, rank {rank} issues {other_words}", (first, rank), gap.at
                )

    def _skipped(self, one: int, other: int, at: int, count: int) -> ExchangeFinding:
        """Return the finding that the rank ``other`` lacks ``count`` exchanges of the rank ``one``."""
        issued = self._issued[one][at]
        more = f" and {count - 1} more" * (count > 1)
        if not self._messages:
            nothing = "; it issues none at all in this group" * (not self._issued.get(other))
            text = f"rank {other} skips {words(issued)}{more}, which rank {one} issues{nothing}"
            return self._finding("PT592", text, (one, other), at)
        lack = "has no receive for it" if issued.kind == "send" else "sends nothing for it"
        return self._finding("PT594", f"rank {one} issues {words(issued)}{more}, rank {other} {lack}", (one, other), at)

    def _uneven(self, lists: dict[int, list[Collective]]) -> Iterator[ExchangeFinding]:
        """Yield, per pair of ranks, the first all-to-all in which one sends what the other one does not expect."""
        place = {rank: self._channel.group.index(rank) for rank in lists if not self._messages}
        reported: set[tuple[int, ...]] = set()
        seen: set[tuple[Collective, ...]] = set()
        for at, together in enumerate(zip(*lists.values(), strict=True)):
            if kind(together[0]) != "all_to_all" or together in seen:
                continue
            seen.add(together)
            for (one, given), (other, taken) in permutations(zip(lists, together, strict=True), 2):
                sent, expected = given.sent[place[other]], taken.received[place[one]]
                if sent != expected and (pair := tuple(sorted((one, other)))) not in reported:
                    reported.add(pair)
                    text = (
                        f"in an all_to_all rank {one} sends {sent} elements to rank {other}, which expects {expected}"
                    )
                    yield self._finding("PT593", text, pair, at)

    def _finding(self, code: str, message: str, ranks: tuple[int, ...], at: int) -> ExchangeFinding:
        channel = self._channel
        where = places([channel.members], self._mesh)
        text = f"{message} (exchange {at + 1} of {channel.words})"
        return ExchangeFinding(code, text, where, tuple(sorted(ranks)), channel.group, channel.purpose, at + 1)


def _signature(issued: Collective) -> tuple[object, ...]:
    """Return what must be equal on all ranks of a collective, or at both ends of a message."""
    if issued.kind in MESSAGES:
        return issued.elements, issued.dtype
    name = kind(issued)
    if name == "all_to_all":
        return name, issued.dtype
    elements, ranks = issued.elements, len(issued.group)
    if len(elements) == 1 and name == "all_gather":  # functional operators return the output, which others take first
        elements = elements[0] * ranks, elements[0]
    elif len(elements) == 1 and name == "reduce_scatter":
        elements = elements[0] // ranks, elements[0]
    return name, issued.dtype, elements


class Divergence(NamedTuple):
    """First difference of two lists."""

    at: int
    """Index of the difference."""
    missing: int
    """Entries that the second list lacks; negative: that the first list lacks; 0: the entries at ``at`` differ."""


def divergence(a: Sequence[object], b: Sequence[object]) -> Divergence | None:
    """Return where two lists first differ; None if they are equal.

    A list lacks entries where it agrees with the other one once these are removed. If the whole rest agrees in no way,
    the next 16 entries decide.
    """
    if a == b:
        return None
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if at == len(b):
        return Divergence(at, len(a) - at)
    if at == len(a):
        return Divergence(at, at - len(b))
    longer = len(a) - len(b)
    if a[at + max(longer, 0) + (not longer) :] == b[at + max(-longer, 0) + (not longer) :]:
        return Divergence(at, longer)
    for gap in range(1, _LONGEST + 1):
        if _lacks(a, b, at, gap):
            return Divergence(at, gap)
        if _lacks(b, a, at, gap):
            return Divergence(at, -gap)
    return Divergence(at, 0)


def _lacks(a: Sequence[object], b: Sequence[object], at: int, gap: int) -> bool:
    """Return whether ``b`` is ``a`` without the ``gap`` entries from ``at``, as far as is compared."""
    after = at + gap
    return after <= len(a) and a[after : after + _COMPARED] == b[at : at + _COMPARED]
