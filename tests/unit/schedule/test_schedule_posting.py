"""Receives are posted so that ranks may wait for their whole device at any action."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from _device_waits import ahead, on_demand, stuck
from _schedules import ACTIVATIONS, WEIGHTS, made, schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import COMPUTE, Action, Schedule, after, generate, peer, remap, with_transfers
from partool.schedule.posting import Posts, posts
from partool.schedule.transform import forward_only

LARGE = [
    ("gpipe", 4, 8, 0), ("gpipe", 8, 16, 0), ("gpipe", 2, 4, 0),
    ("1f1b", 4, 8, 0), ("1f1b", 8, 16, 0), ("1f1b", 2, 4, 0),
    ("interleaved", 4, 8, 1), ("interleaved", 8, 16, 1), ("interleaved", 2, 4, 1),
    ("zb-h1", 4, 8, 0), ("zb-h1", 8, 16, 0), ("zb-h1", 2, 4, 0),
    ("zb-v", 4, 8, 0), ("zb-v", 8, 16, 0), ("zb-v", 2, 4, 0),
    ("hanayo", 4, 8, 0), ("hanayo", 8, 16, 0), ("hanayo", 2, 4, 0),
]  # fmt: skip


def check(schedule: Schedule, found: tuple[Posts, ...], done: tuple[Action, ...] = ()) -> None:
    """Check that every receive is posted once, in the order of sending, and before what needs it."""
    for rank, actions in enumerate(schedule.lists):
        receives = [action for action in actions if action.kind.startswith("RECV")]
        order = [action for _, some in sorted(found[rank].items()) for action in some]
        assert sorted(order) == sorted(receives)
        senders = {peer(schedule, rank, action)[0] for action in receives}
        for sender in senders:
            mine = [action for action in receives if peer(schedule, rank, action)[0] == sender]
            assert [action for action in order if peer(schedule, rank, action)[0] == sender] == mine
    assert stuck(schedule, found, lambda _rank, _place: True, done) == []


@settings(max_examples=150, deadline=None, derandomize=True)
@given(schedules(ACTIVATIONS, count=14), st.integers(0, 10**6))
def test_devices_may_wait_anywhere(schedule: Schedule, seed: int) -> None:
    """At every action of every rank, at none, at a random part, or at a single one."""
    found, rng = posts(schedule), random.Random(seed)
    check(schedule, found)
    chosen = {(rank, at) for rank, actions in enumerate(schedule.lists) for at in range(len(actions))}
    some = {place for place in chosen if rng.random() < 0.3}
    one = rng.choice(sorted(chosen))
    for waits in (set(), some, {one}):
        assert stuck(schedule, found, lambda rank, at, waits=waits: (rank, at) in waits) == []  # type: ignore[misc]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(schedules(ACTIVATIONS, count=8), st.integers(0, 10**6))
def test_devices_may_wait_in_shuffled_lists(schedule: Schedule, seed: int) -> None:
    """Lists whose independent actions are swapped at random are lists that a user's file may hold."""
    rng = random.Random(seed)
    order = [[action for action in actions if action.kind in COMPUTE] for actions in schedule.lists]
    for _ in range(30):
        actions = rng.choice(order)
        at = rng.randrange(len(actions))
        if at + 1 < len(actions) and actions[at][1:] != actions[at + 1][1:]:
            actions[at], actions[at + 1] = actions[at + 1], actions[at]
    shuffled = replace(schedule, lists=with_transfers(tuple(map(tuple, order)), schedule.placement))
    try:
        found = posts(shuffled)
    except ValueError as error:
        assert "cannot finish" in str(error)  # noqa: PT017 - both outcomes are checked.
    else:
        check(shuffled, found)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules(ACTIVATIONS, count=6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_devices_may_wait_in_evaluations_and_rests(schedule: Schedule, steps: int, shift: int) -> None:
    forward = forward_only(schedule, 1 + steps % 7)
    check(forward, posts(forward))
    counts = after(schedule, steps % sum(len(actions) for actions in schedule.lists))
    done = tuple(action for actions, count in zip(schedule.lists, counts, strict=True) for action in actions[:count])
    rest = remap(schedule, counts, [(rank + shift) % schedule.ranks for rank in schedule.placement])
    check(rest, posts(rest, done), tuple(action for action in done if action.kind in COMPUTE))


@pytest.mark.parametrize(("name", "ranks", "count", "which"), LARGE)
def test_receives_far_ahead_close_circles(name: str, ranks: int, count: int, which: int) -> None:
    """Two receives per sender, posted from the start, hang where the first forward pass waits for the device."""
    schedule = made(name, ranks, count, which)
    assert stuck(schedule, ahead(schedule, 2), lambda _rank, at: schedule.lists[_rank][at].kind == "F" and at < 3)
    check(schedule, posts(schedule))


def test_posting_on_demand_is_not_enough() -> None:
    """Sends occupy their device, too: where a rank waits after a send, its receiver has to have posted in time."""
    hang = [
        name
        for name, which in (("gpipe", 0), ("1f1b", 0), ("interleaved", 1), ("zb-h1", 0), ("zb-v", 0), ("hanayo", 0))
        if stuck(made(name, 4, 8, which), on_demand(made(name, 4, 8, which)), lambda _rank, _place: True)
    ]
    assert {"interleaved", "zb-v", "hanayo"} <= set(hang)


def test_posts_by_hand() -> None:
    """Two ranks of 1F1B: the second posts its first receive at the start, as the first rank computes for it alone."""
    schedule = generate("1f1b", 2, 2)
    first, second = posts(schedule)
    assert second[0] == (Action("RECV_F", 1, 0),)
    gradient = next(at for at, some in first.items() if Action("RECV_B", 0, 0) in some)
    assert schedule.lists[0][gradient] == Action("B", 0, 0)


@pytest.mark.parametrize("name", WEIGHTS)
def test_travelling_weights_have_no_posts(name: str) -> None:
    with pytest.raises(ValueError, match="passes weights round"):
        posts(made(name, 2, 4))
