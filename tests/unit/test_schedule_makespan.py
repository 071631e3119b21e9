"""Fast timing and counting of schedules against their simulation, at every length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import SCHEDULES, Schedule, StageTimes, generate, in_flight, makespan, simulate
from partool.schedule.graph import base, graph, growth, repeating

sizes = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 45), st.integers(1, 4))


def made(size: tuple[str, int, int, int]) -> Schedule:
    name, ranks, rounds, chunks = size
    return generate(
        name, ranks, ranks * rounds if name == "interleaved" else rounds, chunks if name == "interleaved" else 1
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes)
def test_in_flight_is_that_of_the_lists(size: tuple[str, int, int, int]) -> None:
    schedule = made(size)
    found = in_flight(schedule.name, schedule.ranks, schedule.micro_batches, schedule.chunks)
    assert found == simulate(schedule, StageTimes([1.0] * schedule.stages, [2.0] * schedule.stages)).in_flight


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes, st.integers(0, 2**32 - 1))
def test_makespan_is_that_of_the_simulation(size: tuple[str, int, int, int], seed: int) -> None:
    schedule = made(size)
    rng = np.random.default_rng(seed)
    forward, backward = 1 + 0.2 * rng.random(schedule.stages), 2 + 0.4 * rng.random(schedule.stages)
    weight = 0.45 * backward
    exact = simulate(schedule, StageTimes(list(forward), list(backward), list(weight), 0.05)).makespan_s
    args = (schedule.name, schedule.ranks, schedule.micro_batches, schedule.chunks)
    fast = makespan(*args, forward_s=forward, backward_s=backward, weight_s=weight, send_s=0.05)
    assert fast == pytest.approx(exact, rel=1e-9)
    named = {"forward_s": forward, "backward_s": backward, "weight_s": weight}
    twice = {name: np.stack([part, 2 * part]) for name, part in named.items()}
    assert makespan(*args, **twice, send_s=np.array([0.05, 0.1])) == pytest.approx([fast, 2 * fast], rel=1e-9)


def uneven(schedule: Schedule, spread: float, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    backward = 2 + 2 * spread * rng.random(schedule.stages)
    forward = 1 + spread * rng.random(schedule.stages)
    return {"forward_s": forward, "backward_s": backward, "input_s": 0.7 * backward, "weight_s": 0.4 * backward}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.05, 5.0])
@pytest.mark.parametrize("send", [0.0, 0.5, 4.0])
def test_long_schedules_are_exact(name: str, spread: float, send: float) -> None:
    """Also where two stages are nearly as slow as each other, and one overtakes the other only late."""
    schedule = generate(name, 5, 120, 2 if name == "interleaved" else 1)
    times = uneven(schedule, spread)
    exact = simulate(schedule, StageTimes(**{key: list(part) for key, part in times.items()}, send_s=send)).makespan_s
    args = (name, 5, 120, schedule.chunks)
    assert makespan(*args, **times, send_s=send) == pytest.approx(exact, rel=1e-9)
    many = {key: np.stack([part] * 7) for key, part in times.items()}
    assert makespan(*args, **many, send_s=send) == pytest.approx([exact] * 7, rel=1e-9)


def test_huge_schedules_take_their_slowest_rank_and_a_fill() -> None:
    """A million micro-batches; the slowest stage is twice as slow, so that its work alone is the slope."""
    forward, backward = np.ones(8), np.full(8, 2.0)
    forward[3], backward[3] = 2.0, 4.0
    count = 10**6
    for name in ("1f1b", "zb-h1", "gpipe"):
        took = makespan(name, 8, count, 1, forward_s=forward, backward_s=backward, weight_s=backward / 2, send_s=0.0)
        assert 6.0 * count <= took <= 6.0 * count + 7 * 3.0
    # Nearly equal stages: the slowest sets the pace in the end.
    near = {"forward_s": 1 + 1e-6 * np.arange(8), "backward_s": backward * 0 + 2.0, "weight_s": backward * 0 + 1.0}
    took = makespan("1f1b", 8, count, 1, **near, send_s=0.0)
    assert took == pytest.approx(count * (3 + 7e-6), rel=1e-5)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"gpipe"}))
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_the_repeating_stretch_rebuilds_the_whole_graph(name: str, ranks: int) -> None:
    chunks = 3 if name == "interleaved" else 1
    count = ranks * 9
    short = base(name, ranks, count, chunks)
    cut = repeating(name, ranks, short, chunks)
    assert cut is not None
    times = (count - short) // growth(name, ranks, count, chunks)
    assert times > 0
    assert (*cut.before, *cut.stretch * times, *cut.after) == graph(name, ranks, count, chunks).before
    assert cut.ends == graph(name, ranks, count, chunks).ends


def test_gpipe_grows_in_two_places() -> None:
    assert repeating("gpipe", 4, 12, 1) is None


def test_faster_stages_never_take_longer() -> None:
    forward, backward = np.full(8, 1.0), np.full(8, 2.0)
    args: Any = ("1f1b", 8, 32, 1)
    slow = makespan(*args, forward_s=forward, backward_s=backward, weight_s=backward / 2, send_s=0.1)
    for stage in range(8):
        quick = forward.copy()
        quick[stage] = 0.5
        assert makespan(*args, forward_s=quick, backward_s=backward, weight_s=backward / 2, send_s=0.1) <= slow
