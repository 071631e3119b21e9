"""Exchanges of keys: ranks may wait for their whole device anywhere.

The runtime's own exchanges run for every rank, with transfers and attention that only record what they wait for. A
rank posts the sends and receives of an exchange together. All complete once every peer has posted the other ends.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from _ring_waits import Operations, Recorder, Waits

from partool.layout.sequence import Spans, contiguous, tokens, zigzag
from partool.layout.startrail import Trails
from partool_runtime.model.blocks import Returned, Seen
from partool_runtime.model.visibility import AttentionLayout
from partool_runtime.parallel.sequence import op
from partool_runtime.parallel.sequence.halo import Halo
from partool_runtime.parallel.sequence.ring import KeyRing
from partool_runtime.parallel.sequence.startrail import StarTrail
from partool_runtime.parallel.sequence.types import SequenceTeam

Made = Callable[[SequenceTeam], Any]
CASES: dict[str, tuple[int, Made, int | None]] = {
    "ring of 2": (2, KeyRing, None),
    "ring of 5": (5, KeyRing, None),
    "window": (5, Halo, 9),
    "startrail": (4, lambda team: StarTrail(team, Trails(4, 2)), None),
    "startrail in rings": (8, lambda team: StarTrail(team, Trails(8, 2, "rings")), None),
}
"""Name → number of ranks, exchange, window."""
Ends = list[tuple[int, str, int]]
"""(Exchange, isend or irecv, peer) of one rank, in the order of posting."""


@pytest.mark.parametrize("order", [contiguous, zigzag])
@pytest.mark.parametrize("name", CASES)
def test_devices_may_wait_anywhere(name: str, order: Callable[[int, int], tuple[Spans, ...]]) -> None:
    """Before every step of every rank, before none, and before random parts."""
    ranks, make, window = CASES[name]
    shares, rng = order(4 * ranks + 1, ranks), random.Random(name)
    assert stuck(shares, make, window, lambda *_: False) == []
    assert stuck(shares, make, window, lambda *_: True) == []
    for _ in range(5):
        chosen = {(rank, number) for rank in range(ranks) for number in range(40) if rng.random() < 0.3}
        assert stuck(shares, make, window, lambda *step, chosen=chosen: step in chosen) == []  # type: ignore[misc]


def test_the_model_finds_circles() -> None:
    """Two ranks that send in one exchange and receive in a later one hang where they wait between the two."""

    class Apart:
        def __init__(self, team: SequenceTeam) -> None:
            self._team = team

        def forward(self, q: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
            other = 1 - self._team.rank
            op.send([(other, q)], [], self._team.group)
            Seen.meet(None, None, None, None)  # type: ignore[arg-type]
            op.send([], [(other, q)], self._team.group).wait()
            return q, q[..., 0]

        def backward(self, *_: Any) -> None:
            pass

    shares = contiguous(8, 2)
    assert stuck(shares, Apart, None, lambda *_: True) == [0, 1]


def stuck(shares: Sequence[Spans], make: Made, window: int | None, waits: Waits) -> list[int]:
    """Return the ranks that wait for ever in a forward and a backward pass of two layers."""
    operations = Operations()
    ranks, ends = [], []
    for rank in range(len(shares)):
        one = Recorder(operations, rank, waits)
        ends.append(_record(one, make, tuple(shares), AttentionLayout(window)))
        ranks.append(one)
    letters: defaultdict[tuple[int, int, str], list[int]] = defaultdict(list)
    for rank, mine in enumerate(ends):
        for exchange, kind, peer in mine:
            letters[rank, peer, kind].append(exchange)
    for (rank, peer, kind), mine in letters.items():
        theirs = letters[peer, rank, "irecv" if kind == "isend" else "isend"]
        for here, there in zip(mine, theirs, strict=True):
            operations.needs[ranks[rank].completions[here]].append(ranks[peer].starts[there])
    assert sum(map(len, ends)) > 0
    last = [one.finish() for one in ranks]
    complete = operations.complete()
    return [rank for rank, end in enumerate(last) if end not in complete]


def _record(one: Recorder, make: Made, shares: tuple[Spans, ...], layout: AttentionLayout) -> Ends:
    group: Any = "sequence"
    exchange = make(SequenceTeam(group, one.rank, shares, ()))
    x_BNSD = torch.zeros(1, 2, tokens(shares[one.rank]), 4)
    ends: Ends = []
    with _recording(one, ends):
        for _ in range(2):
            exchange.forward(x_BNSD, x_BNSD, x_BNSD, layout, None)
        for _ in range(2):
            exchange.backward(x_BNSD, (x_BNSD, x_BNSD, x_BNSD, x_BNSD, x_BNSD[..., 0]), layout, None)
    return ends


@contextmanager
def _recording(one: Recorder, ends: Ends) -> Iterator[None]:
    counts: Counter[str] = Counter()

    def post(operations: Sequence[tuple[str, int]]) -> list[Any]:
        number = counts["exchanges"]
        counts["exchanges"] += 1
        completion = one.post("sequence", number)
        ends.extend((number, kind, peer) for kind, peer in operations)
        return [SimpleNamespace(wait=lambda: one.queue("compute", completion))]

    dist = SimpleNamespace(
        P2POp=lambda kind, _tensor, *, group, group_peer: (kind, group_peer),
        isend="isend",
        irecv="irecv",
        batch_isend_irecv=post,
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(op, "dist", dist))
        for kind in (Seen, Returned):
            stack.enter_context(mock.patch.object(kind, "meet", side_effect=lambda *_: one.compute()))
        yield
