"""Sizes that each schedule takes, stage times, and a simulation that shares no code with the one under test."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from partool.schedule import COMPUTE, Action, Schedule, StageTimes, generate, peer
from partool.strategies.schedules import SCHEDULES

CHUNKS = {"interleaved": (1, 2, 3), "zb-v": (2,), "hanayo": (2, 4), "weipipe": (1, 2)}
"""Allowed stages per rank; 1 for schedules not listed."""
ROUNDED = {"interleaved", "weipipe", "weipipe-naive", "weipipe-zb"}
"""Schedules whose number of micro-batches is a multiple of the ranks."""
SEARCHED = ("hanayo", "zb-v")
NAMES = tuple(sorted(SCHEDULES))
ACTIVATIONS = tuple(name for name in NAMES if SCHEDULES[name].moves == "activations")
WEIGHTS = tuple(name for name in NAMES if SCHEDULES[name].moves == "weights")


def made(name: str, ranks: int, count: int, which: int = 0, cap: int = 0) -> Schedule:
    """Return a schedule of ``count`` micro-batches, rounded up if needed, and the ``which``-th allowed chunk count."""
    chunks = CHUNKS.get(name, (1,))
    count = -(-count // ranks) * ranks if name in ROUNDED else count
    return generate(name, ranks, count, chunks[which % len(chunks)], cap if SCHEDULES[name].capped else 0)


def schedules(names: Sequence[str] = NAMES, ranks: int = 5, count: int = 12) -> st.SearchStrategy[Schedule]:
    """Return a strategy for schedules of at most so many ranks and micro-batches."""
    return st.builds(
        made,
        st.sampled_from(list(names)),
        st.integers(1, ranks),
        st.integers(1, count),
        st.integers(0, 5),
        st.sampled_from((0, 0, ranks, 2 * ranks)),
    )


def times_of(schedule: Schedule, seed: int, send: float = 0.3) -> StageTimes:
    """Return uneven times of stages, of their backward halves and of links."""
    rng = random.Random(seed)
    backward = [rng.uniform(0.5, 4.0) for _ in schedule.placement]
    weight = [rng.uniform(0.1, 0.8) * whole for whole in backward]
    pairs = [(a, b) for a in range(schedule.ranks) for b in range(schedule.ranks)]
    return StageTimes(
        [rng.uniform(0.2, 2.0) for _ in backward],
        backward,
        weight,
        {pair: rng.uniform(0.0, 2 * send) for pair in pairs},
        [rng.uniform(0.1, 2.0) for _ in backward],
        gradient_send_s={pair: rng.uniform(0.0, 2 * send) for pair in pairs},
    )


def changed(schedule: Schedule, rank: int, actions: Sequence[Action]) -> Schedule:
    """Return a schedule with one rank's list of actions replaced."""
    lists = list(schedule.lists)
    lists[rank] = tuple(actions)
    return replace(schedule, lists=tuple(lists))


def oracle(schedule: Schedule, times: StageTimes) -> tuple[dict[Action, tuple[float, float]], float]:
    """Return when each compute action runs, and the end of the step, by repeating a simple rule until nothing changes.

    The rule follows the definition: a rank's compute actions run in order, and each also waits for its inputs; a send
    starts when its rank has done the actions before it and, where weights travel, when its data have arrived and the
    rank's previous send to the same peer has arrived.
    """
    stop: dict[Action, float] = {}
    start: dict[Action, float] = {}
    there: dict[tuple[int, Action], float] = {}
    sends, gradients = times.send_s, times.gradient_send_s
    assert isinstance(sends, dict)
    assert isinstance(gradients, dict)
    weights = schedule.moves == "weights"
    for _ in range(10_000):
        before = (dict(stop), dict(there))
        for rank, actions in enumerate(schedule.lists):
            now, busy = 0.0, dict.fromkeys(range(schedule.ranks), 0.0)
            brought: dict[tuple[bool, int], float] = {}
            for action in actions:
                kind, stage, batch = action
                if kind in COMPUTE:
                    begin = max(now, brought.get((False, stage), 0.0) if kind != "W" else 0.0)
                    if not weights:
                        begin = max(
                            begin, there.get((rank, Action(f"RECV_{'F' if kind == 'F' else 'B'}", stage, batch)), 0.0)
                        )
                    start[action], stop[action] = begin, begin + times.of(action)
                    now = stop[action]
                    continue
                other, end = peer(schedule, rank, action)
                if kind.startswith("SEND"):
                    took = (gradients if kind == "SEND_G" else sends)[rank, other]
                    leaves = now
                    if weights:
                        leaves = max(leaves, brought.get((kind == "SEND_G", stage), 0.0), busy[other])
                        busy[other] = leaves + took
                    there[other, end] = leaves + took
                elif weights:
                    brought[kind == "RECV_G", stage] = there.get((rank, action), 0.0)
        if before == (stop, there):
            end_s = max([*stop.values(), *(there.values() if weights else ())], default=0.0)
            return {action: (start[action], stop[action]) for action in stop}, end_s
    raise AssertionError("no fixed point")
