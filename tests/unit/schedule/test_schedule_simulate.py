"""The simulator against a fixed-point iteration, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from _schedules import ACTIVATIONS, NAMES, WEIGHTS, changed, made, oracle, schedules, times_of
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import Action, Schedule, StageTimes, generate, peer, simulate, span_s
from partool.schedule.transform import without_backward
from partool.schedule.weipipe import weipipe


@settings(max_examples=120, deadline=None, derandomize=True)
@given(schedules(), st.integers(0, 2**32))
def test_simulation_is_the_least_fixed_point(schedule: Schedule, seed: int) -> None:
    times = times_of(schedule, seed)
    expected, end_s = oracle(schedule, times)
    timeline = simulate(schedule, times)
    found = {event.action: (event.start_s, event.stop_s) for event in timeline.events}
    assert found.keys() == expected.keys()
    for action, (start, stop) in expected.items():
        assert found[action] == pytest.approx((start, stop), rel=1e-12)
    assert timeline.makespan_s == pytest.approx(end_s, rel=1e-12)
    assert span_s(schedule, times) == pytest.approx(end_s, rel=1e-12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules(), st.integers(0, 2**32))
def test_no_schedule_is_quicker_than_its_critical_paths(schedule: Schedule, seed: int) -> None:
    """Critical paths: each rank's own work, and one micro-batch's path through all stages and back."""
    times = times_of(schedule, seed)
    sends = times.send_s
    assert isinstance(sends, dict)
    timeline = simulate(schedule, times)
    assert timeline.makespan_s >= max(timeline.busy_s) - 1e-9
    way = sum(times.forward_s)
    split = any(event.action.kind == "I" for event in timeline.events)
    assert times.input_s is not None
    way += sum(times.input_s if split else times.backward_s)
    if schedule.moves == "activations":
        for here, there in zip(schedule.placement, schedule.placement[1:], strict=False):
            way += sends[here, there] + sends[there, here] if here != there else 0.0
    assert timeline.makespan_s >= way - 1e-9


def test_links_of_their_own_time() -> None:
    """Two ranks, f = 1, b = 2; transfer forward 0.5, backward 3: 1 + 0.5 + 1 + 2 + 3 + 2."""
    schedule = generate("1f1b", 2, 1)
    times = StageTimes([1.0] * 2, [2.0] * 2, send_s={(0, 1): 0.5, (1, 0): 3.0})
    assert simulate(schedule, times).makespan_s == 9.5
    with pytest.raises(ValueError, match="from rank 1 to rank 0"):
        simulate(schedule, replace(times, send_s={(0, 1): 0.5}))


def test_shared_links_carry_one_message_at_a_time() -> None:
    """GPipe's three activations leave at 1, 2, 3 and take 4 each: the last arrives at 7, or one by one at 13."""
    schedule = generate("gpipe", 2, 3)
    times = StageTimes([1.0] * 2, [2.0] * 2, send_s=4.0)
    arrivals = {shared: simulate(schedule, replace(times, shared_links=shared)).transfers for shared in (False, True)}
    assert [event.stop_s for event in arrivals[False] if event.rank == 0] == [5.0, 6.0, 7.0]
    assert [(event.start_s, event.stop_s) for event in arrivals[True] if event.rank == 0] == [(1, 5), (5, 9), (9, 13)]
    # The last forward pass ends at 14, backward passes at 16, 18, 20; gradients arrive at 20, 24, 28: 28 + 2.
    assert simulate(schedule, replace(times, shared_links=True)).makespan_s == 30.0
    assert span_s(schedule, replace(times, shared_links=True)) == 30.0
    assert simulate(schedule, times).makespan_s == 14 - 6 + 2 * 3 + 4 + 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules(ACTIVATIONS), st.integers(0, 2**32))
def test_what_holds_ranks_or_messages_up_never_saves_time(schedule: Schedule, seed: int) -> None:
    times = times_of(schedule, seed)
    free = simulate(schedule, times)
    shared = simulate(schedule, replace(times, shared_links=True))
    assert shared.makespan_s >= free.makespan_s - 1e-9
    blocking = simulate(schedule, times, blocking=True)
    assert blocking.makespan_s >= shared.makespan_s - 1e-9
    wires: dict[tuple[int, int], float] = {}
    for event in shared.transfers:
        pair = event.rank, peer(schedule, event.rank, event.action)[0]
        assert event.start_s >= wires.get(pair, 0.0) - 1e-9
        wires[pair] = event.stop_s
    for timeline in (shared, blocking):
        assert timeline.busy_s == free.busy_s
        assert sorted(event.action for event in timeline.transfers) == sorted(event.action for event in free.transfers)


def test_a_send_leaves_when_the_list_comes_to_it() -> None:
    """The first activation is sent only after the second forward pass: everything is one unit later."""
    schedule = generate("gpipe", 2, 2)
    late = list(schedule.lists[0])
    send = late.pop(late.index(Action("SEND_F", 0, 0)))
    late.insert(late.index(Action("F", 0, 1)) + 1, send)
    times = StageTimes([1.0] * 2, [2.0] * 2)
    assert span_s(changed(schedule, 0, late), times) == span_s(schedule, times) + 1.0


def test_weights_on_their_way_by_hand() -> None:
    """Two ranks, two stages, owners 1 and 0, one turn each: stage 0 reaches rank 0 at 1, stage 1 reaches rank 1 at 1.

    Forward and backward take 1 and 2. Rank 0 forwards stage 0 in [1, 2], stage 1 in [2, 3], backward in [3, 5] and
    [5, 7]; rank 1, the owner of stage 0, is a unit ahead of it. Gradients of stage 0 return to rank 1 from 7 to 8.
    """
    timeline = simulate(generate("weipipe", 2, 2), StageTimes([1.0] * 2, [2.0] * 2, send_s=1.0))
    first = {(event.rank, event.action.kind, event.action.stage): event.start_s for event in timeline.events}
    assert [first[0, "F", 0], first[0, "F", 1], first[0, "B", 1], first[0, "B", 0]] == [1.0, 2.0, 3.0, 5.0]
    assert [first[1, "F", 0], first[1, "F", 1], first[1, "B", 1], first[1, "B", 0]] == [0.0, 1.0, 2.0, 4.0]
    assert timeline.makespan_s == 8.0
    slow = simulate(generate("weipipe", 2, 2), StageTimes([1.0] * 2, [2.0] * 2, send_s=1.0, gradient_send_s=4.0))
    assert slow.makespan_s == 11.0


@pytest.mark.parametrize("name", NAMES)
def test_instant_links_leave_what_the_schedule_leaves(name: str) -> None:
    """With instant transfers, sending weights keeps every rank busy; sending activations leaves the known bubbles."""
    schedule = made(name, 4, 8)
    times = StageTimes([1.0] * schedule.stages, [2.0] * schedule.stages)
    bubble = simulate(schedule, times).bubble
    if name in WEIGHTS:
        assert bubble == pytest.approx(0.0)
    else:
        assert bubble > 0.05


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_frozen_stages_hold_no_activations(name: str) -> None:
    schedule = made(name, 3, 6)
    whole = simulate(schedule, times_of(schedule, 0))
    frozen = without_backward(schedule, schedule.stages - 1)
    timeline = simulate(frozen, times_of(frozen, 0))
    last = schedule.placement[-1]
    assert [count for rank, count in enumerate(timeline.in_flight) if rank != last] == [0] * (schedule.ranks - 1)
    assert 0 < timeline.in_flight[last] <= whole.in_flight[last]
    assert timeline.makespan_s < whole.makespan_s


def test_halves_and_whole_backward_passes_may_be_mixed() -> None:
    """Rank 1 splits only the first micro-batch's backward pass: activations are held until the weight-gradient half."""
    schedule = generate("1f1b", 2, 2)
    mixed = []
    for action in schedule.lists[1]:
        mixed.append(action._replace(kind="I") if action == Action("B", 1, 0) else action)
    mixed.append(Action("W", 1, 0))
    timeline = simulate(changed(schedule, 1, mixed), StageTimes([1.0] * 2, [2.0] * 2))
    assert timeline.in_flight == (2, 2)
    assert timeline.makespan_s == 9.0 - 1.0


def test_evaluation_of_travelling_weights_takes_any_number() -> None:
    schedule = weipipe("weipipe", 3, 4, 1, 3)
    timeline = simulate(schedule, times_of(schedule, 1))
    assert timeline.in_flight == (0, 0, 0)
    assert len(timeline.events) == 4 * 3
