"""Faults planted into the traces of ranks that agree. Each changes what a rank exchanges, never only its words."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from partool.plan.rank_trace import COMPUTE, Collective, RankTrace
from partool.verify.findings import MESSAGES, Channel, kind

List = list[Collective | None]
"""A rank's exchanges in order; None stands for operators between them."""
Lists = dict[int, List]


class Planted(NamedTuple):
    """Traces with a fault."""

    rank: int
    """The rank that does the wrong thing."""
    codes: frozenset[str]
    """Codes of which at least one must be found."""
    traces: list[RankTrace]


def trace_of(rank: int, entries: Sequence[Collective | None]) -> RankTrace:
    """Return the trace of a rank that issues these exchanges."""
    vocabulary: dict[Collective, int] = {}
    order = [COMPUTE if each is None else vocabulary.setdefault(each, len(vocabulary)) for each in entries]
    return RankTrace(rank=rank, vocabulary=tuple(vocabulary), order=tuple(order), operators=0, seconds=0.0)


def entries_of(trace: RankTrace) -> List:
    """Return what :func:`trace_of` was given."""
    return [None if index == COMPUTE else trace.vocabulary[index] for index in trace.order]


def plant(fault: str, traces: Sequence[RankTrace], rng: random.Random) -> Planted | None:
    """Return traces with a fault at a random place; None if the fault fits nowhere."""
    places = [
        (trace.rank, at)
        for trace in traces
        for at, each in enumerate(entries_of(trace))
        if each is not None and len(each.group) > 1
    ]
    rng.shuffle(places)
    for rank, at in places:
        lists = {trace.rank: entries_of(trace) for trace in traces}
        codes = FAULTS[fault](lists, rank, at, rng)
        if codes:
            return Planted(rank, frozenset(codes.split()), [trace_of(rank, mine) for rank, mine in lists.items()])
    return None


def _at(lists: Lists, rank: int, at: int) -> Collective:
    found = lists[rank][at]
    assert found is not None
    return found


def _skip_collective(lists: Lists, rank: int, at: int, _: random.Random) -> str:
    if _at(lists, rank, at).kind in MESSAGES:
        return ""
    del lists[rank][at]
    return "PT592"


def _skip_several(lists: Lists, rank: int, at: int, rng: random.Random) -> str:
    channel = Channel.of(_at(lists, rank, at), rank)
    mine = [i for i, each in enumerate(lists[rank]) if each is not None and Channel.of(each, rank) == channel]
    gone = set(mine[mine.index(at) :][: rng.randint(2, 4)])
    lists[rank] = [each for i, each in enumerate(lists[rank]) if i not in gone]
    return "PT592 PT593 PT594 PT595"


def _skip_message(of: str) -> Callable[[Lists, int, int, random.Random], str]:
    def fault(lists: Lists, rank: int, at: int, _: random.Random) -> str:
        if _at(lists, rank, at).kind != of:
            return ""
        del lists[rank][at]
        return "PT594"

    return fault


def _extra(lists: Lists, rank: int, at: int, rng: random.Random) -> str:
    issued = _at(lists, rank, at)
    lists[rank].insert(rng.randint(0, len(lists[rank])), issued)
    # At another place it may stand before one of other sizes.
    return "PT594 PT595" if issued.kind in MESSAGES else "PT592 PT593"


def _size(lists: Lists, rank: int, at: int, rng: random.Random) -> str:
    issued = _at(lists, rank, at)
    if kind(issued) == "all_to_all":
        there = [place for place, other in enumerate(issued.group) if other != rank]
        sent = list(issued.sent)
        sent[rng.choice(there)] += 1
        lists[rank][at] = issued._replace(sent=tuple(sent))
        return "PT593"
    elements = list(issued.elements)
    elements[rng.randrange(len(elements))] += rng.choice((-1, 1, 7))
    lists[rank][at] = issued._replace(elements=tuple(elements))
    return "PT595" if issued.kind in MESSAGES else "PT593"


def _dtype(lists: Lists, rank: int, at: int, rng: random.Random) -> str:
    issued = _at(lists, rank, at)
    types = [each for each in ("bfloat16", "float32", "float64", "int64") if each != issued.dtype]
    lists[rank][at] = issued._replace(dtype=rng.choice(types))
    return "PT595" if issued.kind in MESSAGES else "PT593"


def _kind(lists: Lists, rank: int, at: int, _: random.Random) -> str:
    issued = _at(lists, rank, at)
    if issued.kind in MESSAGES:
        return ""
    lists[rank][at] = issued._replace(kind="broadcast_")
    return "PT593"


def _direction(lists: Lists, rank: int, at: int, _: random.Random) -> str:
    issued = _at(lists, rank, at)
    if issued.kind not in MESSAGES:
        return ""
    lists[rank][at] = issued._replace(kind=MESSAGES[issued.kind == "send"])
    return "PT594 PT595"


def _swapped_in_a_channel(lists: Lists, rank: int, at: int, _: random.Random) -> str:
    mine, issued = lists[rank], _at(lists, rank, at)
    channel = Channel.of(issued, rank)
    later = [i for i in range(at + 1, len(mine)) if (each := mine[i]) is not None and Channel.of(each, rank) == channel]
    if kind(issued) == "all_to_all":  # two of them may differ in sizes that only other pairs of ranks see
        return ""
    differing = [i for i in later if _signature(mine[i]) != _signature(issued)]
    if not differing:
        return ""
    mine[at], mine[differing[0]] = mine[differing[0]], issued
    return "PT594 PT595" if issued.kind in MESSAGES else "PT592 PT593"


def _swapped_groups(lists: Lists, rank: int, at: int, _: random.Random) -> str:
    """Swap two collectives of groups that have another rank in common, which issues both in the old order."""
    mine, first = lists[rank], _at(lists, rank, at)
    after = next((i for i in range(at + 1, len(mine)) if mine[i] is not None), None)
    if after is None or first.kind in MESSAGES:
        return ""
    second = _at(lists, rank, after)
    channels = Channel.of(first, rank), Channel.of(second, rank)
    if second.kind in MESSAGES or channels[0] == channels[1] or not (set(first.group) & set(second.group)) - {rank}:
        return ""
    mine[at], mine[after] = second, first
    return "PT597"


def _peer(lists: Lists, rank: int, at: int, rng: random.Random) -> str:
    issued = _at(lists, rank, at)
    if issued.kind not in MESSAGES:
        return ""
    others = [each for each in issued.group if each != issued.peer] + [max(lists) + 1]
    lists[rank][at] = issued._replace(peer=rng.choice(others))
    return "PT594 PT595 PT596"


def _smaller_group(lists: Lists, rank: int, at: int, rng: random.Random) -> str:
    issued = _at(lists, rank, at)
    if issued.kind in MESSAGES or len(issued.group) < 3:
        return ""
    gone = rng.choice([each for each in issued.group if each != rank])
    group = tuple(each for each in issued.group if each != gone)
    lists[rank][at] = issued._replace(group=group)
    return "PT592"


def _foreign_group(lists: Lists, rank: int, at: int, _: random.Random) -> str:
    issued = _at(lists, rank, at)
    group = tuple(each for each in lists if each != rank)
    lists[rank][at] = issued._replace(group=group)
    return "PT596"


def _no_group(lists: Lists, rank: int, at: int, _: random.Random) -> str:
    issued = _at(lists, rank, at)
    same = (issued.group, issued.purpose)
    lists[rank] = [each for each in lists[rank] if each is None or (each.group, each.purpose) != same]
    return "PT592 PT594"


def _purpose(lists: Lists, rank: int, at: int, _: random.Random) -> str:
    issued = _at(lists, rank, at)
    lists[rank][at] = issued._replace(purpose=f"{issued.purpose} of others")
    return "PT594" if issued.kind in MESSAGES else "PT592"


def _signature(issued: Collective | None) -> object:
    return None if issued is None else (kind(issued), issued.elements, issued.dtype)


FAULTS: dict[str, Callable[[Lists, int, int, random.Random], str]] = {
    "skipped collective": _skip_collective,
    "several skipped": _skip_several,
    "receive nobody posts": _skip_message("recv_"),
    "send nobody makes": _skip_message("send"),
    "additional exchange": _extra,
    "other size": _size,
    "other type": _dtype,
    "other kind": _kind,
    "send for receive": _direction,
    "swapped in a channel": _swapped_in_a_channel,
    "swapped groups": _swapped_groups,
    "wrong peer": _peer,
    "group without a member": _smaller_group,
    "group of others": _foreign_group,
    "group missing": _no_group,
    "wrong purpose": _purpose,
}
"""Name → function that changes the lists around an entry of a rank; returns the codes, of which one must be found, or
an empty text if the fault does not fit there."""


def mutants(traces: Sequence[RankTrace], seeds: int) -> Iterator[tuple[str, int, Planted]]:
    """Yield (fault, seed, traces with it) for each fault that fits the traces."""
    for fault in FAULTS:
        for seed in range(seeds):
            if (planted := plant(fault, traces, random.Random(f"{fault} {seed}"))) is not None:
                yield fault, seed, planted
