"""Fast timing and counting of schedules against their simulation, at every length."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from _schedules import ACTIVATIONS, CHUNKS, NAMES, SEARCHED, WEIGHTS, changed, made, schedules, times_of
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import Schedule, StageTimes, from_text, generate, in_flight, makespan, simulate, span_s, to_text
from partool.schedule import graph as graphs
from partool.schedule.generators import order
from partool.schedule.graph import base, graph, growth, longest, repeating
from partool.schedule.makespan import layers_in_flight
from partool.schedule.simulate import peak_held
from partool.strategies.schedules import SCHEDULES

PATTERNED = tuple(name for name in ACTIVATIONS if name not in SEARCHED)
"""Schedules whose longer lists repeat the middle of shorter ones."""


def sized(caps: bool = True) -> st.SearchStrategy[tuple[str, int, int, int, int]]:
    """Return (name, ranks, micro-batches, chunks, cap); many micro-batches if the lists repeat."""

    def fitted(name: str, ranks: int, count: int, which: int, cap: int) -> tuple[str, int, int, int, int]:
        count = count if name in PATTERNED else 1 + count % (3 * ranks)
        schedule = made(name, ranks, count, which)
        cap = cap * ranks if caps and SCHEDULES[name].capped else 0
        return name, ranks, schedule.micro_batches, schedule.chunks, cap

    return st.builds(
        fitted,
        st.sampled_from(NAMES),
        st.integers(1, 6),
        st.integers(1, 150),
        st.integers(0, 5),
        st.sampled_from((0, 1, 2)),
    )


def as_arrays(times: StageTimes) -> dict[str, Any]:
    names = ("forward_s", "backward_s", "weight_s", "input_s")
    return {
        **{name: np.array(getattr(times, name)) for name in names},
        "send_s": times.send_s,
        "gradient_send_s": times.gradient_send_s,
    }


@settings(max_examples=80, deadline=None, derandomize=True)
@given(sized())
def test_in_flight_is_that_of_the_lists(size: tuple[str, int, int, int, int]) -> None:
    assert in_flight(*size) == tuple(peak_held(actions) for actions in order(*size))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sized(), st.integers(0, 2**32 - 1))
def test_layers_in_flight_are_those_of_the_lists(size: tuple[str, int, int, int, int], seed: int) -> None:
    pick = random.Random(seed)
    lists = order(*size)
    stages = 1 + max(stage for actions in lists for _, stage, _ in actions)
    layers = tuple(pick.randint(1, 5) for _ in range(stages))
    wanted = [peak_held(actions, layers) / peak_held(actions) for actions in lists]
    assert list(layers_in_flight(size, layers)) == pytest.approx(wanted)
    assert layers_in_flight(size, (3,) * stages) == (3.0,) * len(lists)


def test_larger_stages_that_run_first_hold_more_layers() -> None:
    """Of two ranks, the first holds most micro-batches of its first stage, which here is the larger one."""
    forward = [("F", 0, batch) for batch in (0, 1)] + [("F", 2, 0)]
    backward = [("B", 2, 0), ("B", 0, 0), ("B", 0, 1)]
    assert peak_held([*forward, *backward]) == 3
    assert peak_held([*forward, *backward], (5, 1, 2)) == 12


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sized(), st.integers(0, 2**32 - 1))
def test_makespan_is_that_of_the_simulation(size: tuple[str, int, int, int, int], seed: int) -> None:
    """The fast graph is built from the order of compute actions, while the simulation follows the lists."""
    schedule = generate(*size)
    times = times_of(schedule, seed)
    exact = simulate(schedule, times).makespan_s
    parts = as_arrays(times)
    fast = makespan(*size, **parts)
    assert fast == pytest.approx(exact, rel=1e-9)
    twice = {
        name: np.stack([parts[name], 2 * parts[name]]) for name in ("forward_s", "backward_s", "weight_s", "input_s")
    }
    sends = {
        name: {pair: np.array([one, 2 * one]) for pair, one in parts[name].items()}
        for name in ("send_s", "gradient_send_s")
    }
    assert makespan(*size, **twice, **sends) == pytest.approx([fast, 2 * fast], rel=1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(schedules(ranks=4, count=9), st.integers(0, 2**32 - 1))
def test_span_of_any_list_is_that_of_its_name(schedule: Schedule, seed: int) -> None:
    """A list read from a file has the same cost as the generated one."""
    read = from_text(to_text(schedule))
    times = times_of(schedule, seed)
    assert span_s(read, times) == pytest.approx(simulate(schedule, times).makespan_s, rel=1e-12)


def test_many_cases_at_once() -> None:
    """More cases than fit into one block; each against its own simulation."""
    rng = np.random.default_rng(5)
    for name in NAMES:
        schedule = made(name, 3, 6)
        shape = (1500, schedule.stages)
        forward, backward = 1 + rng.random(shape), 1 + rng.random(shape)
        weight, send = 0.4 * backward, rng.random(1500)
        args = (name, 3, schedule.micro_batches, schedule.chunks)
        found = makespan(*args, forward_s=forward, backward_s=backward, weight_s=weight, send_s=send)
        assert found.shape == (1500,)
        for row in (0, 1023, 1024, 1499):
            times = StageTimes(list(forward[row]), list(backward[row]), list(weight[row]), float(send[row]))
            assert found[row] == pytest.approx(simulate(schedule, times).makespan_s, rel=1e-12)


@pytest.mark.parametrize("name", [*SEARCHED, *WEIGHTS])
def test_very_long_schedules_keep_their_pace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is set low, so that the whole list can be compared with."""
    chunks = CHUNKS.get(name, (1,))[0]
    times = times_of(generate(name, 3, 48, chunks), 3)
    exact = makespan(name, 3, 48, chunks, **as_arrays(times))
    held = in_flight(name, 3, 48, chunks)
    monkeypatch.setattr(graphs, "_WHOLE", 24 * 3 * chunks * 3)
    monkeypatch.setattr(graphs, "_WHOLE_ROUND", 24 * 3 * chunks * 3)
    in_flight.cache_clear()
    try:
        assert longest(name, 3, chunks) < 48
        assert makespan(name, 3, 48, chunks, **as_arrays(times)) == pytest.approx(
            exact, rel=0.03 if name == "hanayo" else 1e-9
        )
        assert all(now >= then - 1 for now, then in zip(in_flight(name, 3, 48, chunks), held, strict=True))
    finally:
        in_flight.cache_clear()


def test_links_without_a_time_are_named() -> None:
    parts = as_arrays(times_of(generate("1f1b", 2, 2), 0))
    with pytest.raises(ValueError, match="from rank 1 to rank 0"):
        makespan("1f1b", 2, 2, 1, **{**parts, "send_s": {(0, 1): 1.0}})


def test_lists_that_wait_in_a_circle_have_no_span() -> None:
    schedule = generate("1f1b", 2, 2)
    with pytest.raises(ValueError, match="cannot go on"):
        span_s(changed(schedule, 0, schedule.lists[0][::-1]), StageTimes([1.0] * 2, [2.0] * 2))


def uneven(schedule: Schedule, spread: float, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    backward = 2 + 2 * spread * rng.random(schedule.stages)
    forward = 1 + spread * rng.random(schedule.stages)
    return {"forward_s": forward, "backward_s": backward, "input_s": 0.7 * backward, "weight_s": 0.4 * backward}


@pytest.mark.parametrize("name", PATTERNED)
@pytest.mark.parametrize("spread", [0.0, 1e-4, 0.05, 5.0])
@pytest.mark.parametrize("send", [0.0, 0.5, 4.0])
def test_long_schedules_are_exact(name: str, spread: float, send: float) -> None:
    """Exact also if two stages are nearly equally slow, and one becomes the bottleneck only late."""
    schedule = generate(name, 5, 120, 2 if name == "interleaved" else 1)
    times = uneven(schedule, spread)
    exact = simulate(schedule, StageTimes(**{key: list(part) for key, part in times.items()}, send_s=send)).makespan_s
    args = (name, 5, 120, schedule.chunks)
    assert makespan(*args, **times, send_s=send) == pytest.approx(exact, rel=1e-9)
    many = {key: np.stack([part] * 7) for key, part in times.items()}
    assert makespan(*args, **many, send_s=send) == pytest.approx([exact] * 7, rel=1e-9)


def test_huge_schedules_take_their_slowest_rank_and_a_fill() -> None:
    """A million micro-batches; the slowest stage is twice as slow, so that its work alone sets the slope."""
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


@pytest.mark.parametrize("name", sorted(set(PATTERNED) - {"gpipe"}))
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
