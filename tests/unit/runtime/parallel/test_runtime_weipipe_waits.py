"""WeiPipe's transfers are posted so that ranks may wait for their whole device anywhere."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from _ring_waits import sent_ahead, steps, stuck
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import Schedule
from partool.schedule.weipipe import VARIANTS, weipipe


def made(name: str, ranks: int, rounds: int, chunks: int, frozen: int) -> Schedule:
    """Return a schedule for training whose first ``frozen`` stages, at most, run forward only."""
    return weipipe(name, ranks, ranks * rounds, chunks, min(frozen, ranks * chunks - 1))


trained = st.builds(
    made, st.sampled_from(sorted(VARIANTS)), st.integers(2, 6), st.integers(1, 4), st.integers(1, 2), st.integers(0, 11)
)
evaluated = st.builds(
    lambda ranks, count, chunks: weipipe("weipipe", ranks, count, chunks, ranks * chunks),
    st.integers(2, 6),
    st.integers(1, 14),
    st.integers(1, 2),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(trained | evaluated, st.integers(0, 10**6))
def test_devices_may_wait_anywhere(schedule: Schedule, seed: int) -> None:
    """Before every step of every host, before none, before a random part, or before a single one."""
    rng, every = random.Random(seed), steps(schedule)
    some = {step for step in every if rng.random() < 0.3}
    one = rng.choice(every)
    for waits in (set(every), set(), some, {one}):
        assert stuck(schedule, lambda rank, number, waits=waits: (rank, number) in waits) == []  # type: ignore[misc]


@pytest.mark.parametrize("name", VARIANTS)
def test_weights_sent_far_ahead_close_circles(name: str) -> None:
    """Owners that send weights to rank 0 as many passes earlier as there are ranks hang where a single rank waits."""
    schedule = weipipe(name, 4, 8)
    early = replace(schedule, lists=sent_ahead(schedule, 4))
    every = steps(early)
    assert stuck(early, lambda *_: False) == []
    assert stuck(early, lambda *_: True) == [0, 1, 2, 3]
    assert any(stuck(early, lambda *step, one=one: step == one) for one in every)  # type: ignore[misc]
