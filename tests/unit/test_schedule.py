"""Pipeline schedules: by hand, for every size, with planted faults, and fast against exact timing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    StageTimes,
    check,
    generate,
    in_flight,
    makespan,
    simulate,
    validate,
)

sizes = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))


def made(name: str, ranks: int, rounds: int, chunks: int) -> Schedule:
    chunks = chunks if name == "interleaved" else 1
    batches = ranks * rounds if name == "interleaved" else ranks + rounds
    return generate(name, ranks, batches, chunks)


def equal(schedule: Schedule, forward: float = 1.0, backward: float = 2.0, send: float = 0.0) -> StageTimes:
    return StageTimes([forward] * schedule.stages, [backward] * schedule.stages, send_s=send)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sizes, st.floats(0.0, 0.5))
def test_every_schedule_is_sound(size: tuple[str, int, int, int], send: float) -> None:
    schedule = made(*size)
    assert validate(schedule) == []
    timeline = simulate(schedule, equal(schedule, send=send))
    work = 3.0 * schedule.micro_batches * schedule.chunks
    assert timeline.busy_s == pytest.approx((work,) * schedule.ranks)
    assert timeline.makespan_s >= work - 1e-9
    assert 0.0 <= timeline.bubble < 1.0
    by_rank: dict[int, float] = {}
    for event in sorted(timeline.events, key=lambda event: (event.rank, event.start_s)):
        assert event.start_s >= by_rank.get(event.rank, 0.0) - 1e-9
        by_rank[event.rank] = event.stop_s


@pytest.mark.parametrize(
    ("name", "chunks", "idle"),
    [
        ("gpipe", 1, 3 * 3.0),
        ("1f1b", 1, 3 * 3.0),
        ("interleaved", 2, 3 * 3.0),
        ("interleaved", 4, 3 * 3.0),
        ("zb-h1", 1, 3.0),
    ],
)
def test_idle_time_by_hand(name: str, chunks: int, idle: float) -> None:
    """Four ranks, f = i = w = 1: (p-1)(f+b); interleaved the same of chunks, that is 1/v; ZB-H1 (p-1)(f+i-w)."""
    schedule = generate(name, 4, 12, chunks)
    timeline = simulate(schedule, equal(schedule))
    assert timeline.makespan_s == pytest.approx(12 * 3 * chunks + idle)


def test_in_flight_by_hand() -> None:
    assert in_flight("gpipe", 4, 9) == (9, 9, 9, 9)
    assert in_flight("1f1b", 4, 9) == (4, 3, 2, 1)
    assert in_flight("1f1b", 4, 2) == (2, 2, 2, 1)
    assert in_flight("zb-h1", 4, 9) == (4, 4, 4, 4)
    assert in_flight("interleaved", 4, 8, 2) == (11, 9, 7, 5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes, st.integers(0, 40))
def test_in_flight_is_that_of_the_lists(size: tuple[str, int, int, int], more: int) -> None:
    name, ranks, rounds, chunks = size
    schedule = made(name, ranks, rounds + more, chunks)
    found = in_flight(name, ranks, schedule.micro_batches, schedule.chunks)
    assert found == simulate(schedule, equal(schedule)).in_flight


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes, st.integers(0, 40), st.integers(0, 2**32 - 1))
def test_makespan_is_that_of_the_simulation(size: tuple[str, int, int, int], more: int, seed: int) -> None:
    schedule = made(size[0], size[1], size[2] + more, size[3])
    rng = np.random.default_rng(seed)
    forward, backward = 1 + 0.2 * rng.random(schedule.stages), 2 + 0.4 * rng.random(schedule.stages)
    weight = 0.45 * backward
    exact = simulate(schedule, StageTimes(list(forward), list(backward), list(weight), 0.05)).makespan_s
    args = (schedule.name, schedule.ranks, schedule.micro_batches, schedule.chunks)
    fast = makespan(*args, forward_s=forward, backward_s=backward, weight_s=weight, send_s=0.05)
    assert fast == pytest.approx(exact, rel=5e-3)
    short = schedule.micro_batches <= 32
    assert not short or fast == pytest.approx(exact, rel=1e-12)
    named = {"forward_s": forward, "backward_s": backward, "weight_s": weight}
    twice = {name: np.stack([part, 2 * part]) for name, part in named.items()}
    assert makespan(*args, **twice, send_s=np.array([0.05, 0.1])) == pytest.approx([fast, 2 * fast], rel=1e-9)


def test_faster_stages_never_take_longer() -> None:
    forward, backward = np.full(8, 1.0), np.full(8, 2.0)
    args: Any = ("1f1b", 8, 32, 1)
    slow = makespan(*args, forward_s=forward, backward_s=backward, weight_s=backward / 2, send_s=0.1)
    for stage in range(8):
        quick = forward.copy()
        quick[stage] = 0.5
        assert makespan(*args, forward_s=quick, backward_s=backward, weight_s=backward / 2, send_s=0.1) <= slow


def test_sizes_that_cannot_be() -> None:
    assert check("1f1b", 4, 8, 1) is None
    assert "multiple of the 4" in (check("interleaved", 4, 6, 2) or "")
    assert "one stage per rank" in (check("zb-h1", 4, 8, 2) or "")
    assert "no schedule 'dualpipe'" in (check("dualpipe", 4, 8, 1) or "")
    assert check("1f1b", 0, 8, 1)
    for bad in (("interleaved", 4, 6, 2), ("gpipe", 4, 8, 2), ("none", 1, 1, 1)):
        with pytest.raises(ValueError, match=r"\w"):
            generate(*bad)


def changed(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = list(schedule.lists)
    lists[rank] = tuple(actions)
    return replace(schedule, lists=tuple(lists))


def test_planted_faults_are_found() -> None:
    schedule = generate("1f1b", 3, 5)
    middle = list(schedule.lists[1])
    receives = [index for index, action in enumerate(middle) if action.kind == "RECV_F"]

    swapped = list(middle)
    swapped[receives[0]], swapped[receives[1]] = swapped[receives[1]], swapped[receives[0]]
    assert any("message 0" in problem for problem in validate(changed(schedule, 1, swapped)))

    dropped = [action for action in middle if action != Action("B", 1, 2)]
    assert any("runs 0 times" in problem for problem in validate(changed(schedule, 1, dropped)))
    assert any("runs 2 times" in problem for problem in validate(changed(schedule, 1, [*middle, Action("F", 1, 0)])))
    assert any("not its own" in problem for problem in validate(changed(schedule, 1, [*middle, Action("F", 0, 0)])))
    assert any("unknown" in problem for problem in validate(changed(schedule, 1, [*middle, Action("F", 1, 99)])))

    lost = [action for action in middle if action != Action("SEND_F", 1, 4)]
    assert any("rank 1 to 2" in problem for problem in validate(changed(schedule, 1, lost)))

    early = list(middle)
    first = early.index(Action("B", 1, 0))
    early.insert(0, early.pop(first))
    assert any("cannot finish" in problem for problem in validate(changed(schedule, 1, early)))
    with pytest.raises(ValueError, match="cannot go on"):
        simulate(changed(schedule, 1, early), equal(schedule))
