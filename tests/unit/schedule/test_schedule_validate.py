"""The validator: sound lists pass, and every planted fault is found."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace

import pytest
from _schedules import ACTIVATIONS, NAMES, SEARCHED, WEIGHTS, changed, made, schedules, times_of
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import (
    COMPUTE,
    Action,
    Order,
    Schedule,
    after,
    from_text,
    generate,
    peer,
    problems,
    receive_depth,
    remap,
    simulate,
    to_text,
    validate,
    with_transfers,
)
from partool.schedule.actions import SHIFTS
from partool.schedule.steps import wire
from partool.schedule.transform import forward_only, without_backward


@settings(max_examples=150, deadline=None, derandomize=True)
@given(schedules(count=16))
def test_every_schedule_is_sound(schedule: Schedule) -> None:
    assert validate(schedule) == []
    depth = receive_depth(schedule)
    assert validate(schedule, room=depth) == []
    if depth > 1:
        assert "cannot finish with room for" in validate(schedule, room=depth - 1)[0]


def faults(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Yield every list with one action dropped or doubled, with two messages of a wire swapped, renamed or late."""
    for rank, actions in enumerate(schedule.lists):
        for at, action in enumerate(actions):
            name = f"rank {rank}, {at}: {tuple(action)}"
            rest = (*actions[:at], *actions[at + 1 :])
            yield f"dropped {name}", changed(schedule, rank, rest)
            for to in (at, len(actions)):
                yield f"doubled {name} at {to}", changed(schedule, rank, (*actions[:to], action, *actions[to:]))
            for other in ((action.micro_batch + 1) % schedule.micro_batches, schedule.micro_batches):
                if other != action.micro_batch:
                    named = action._replace(micro_batch=other)
                    yield f"renamed {name}", changed(schedule, rank, (*actions[:at], named, *actions[at + 1 :]))
            elsewhere = action._replace(stage=(action.stage + 1) % (schedule.stages + 1))
            yield f"moved {name}", changed(schedule, rank, (*actions[:at], elsewhere, *actions[at + 1 :]))
            if action.kind not in COMPUTE:
                yield from swaps(schedule, rank, at)


def swaps(schedule: Schedule, rank: int, at: int) -> Iterator[tuple[str, Schedule]]:
    """Yield lists in which a transfer has changed places with a later one over the same wire."""
    actions = schedule.lists[rank]
    for then in range(at + 1, len(actions)):
        ends = actions[at], actions[then]
        if ends[1].kind not in COMPUTE and wire(schedule, rank, ends[0]) == wire(schedule, rank, ends[1]):
            lists = list(actions)
            lists[at], lists[then] = lists[then], lists[at]
            yield f"swapped rank {rank}, {at} and {then}", changed(schedule, rank, lists)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_single_fault_is_found(name: str, ranks: int) -> None:
    """Dropped, doubled, renamed and moved actions, swapped messages: all of them, anywhere in the lists."""
    schedule = made(name, ranks, ranks + 1)
    assert validate(schedule) == []
    tried = 0
    for what, faulty in faults(schedule):
        tried += 1
        assert validate(faulty), what
    assert tried > 100


@settings(max_examples=150, deadline=None, derandomize=True)
@given(schedules(count=10), st.integers(0, 10**6))
def test_faults_in_any_schedule_are_found(schedule: Schedule, which: int) -> None:
    rank = which % schedule.ranks
    actions = schedule.lists[rank]
    at = which // schedule.ranks % len(actions)
    assert validate(changed(schedule, rank, (*actions[:at], *actions[at + 1 :])))
    assert validate(changed(schedule, rank, (*actions[:at], actions[at], *actions[at:])))
    if actions[at].kind not in COMPUTE:
        for what, faulty in swaps(schedule, rank, at):
            assert validate(faulty), what


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules(ACTIVATIONS, count=6), st.integers(0, 10**6))
def test_both_ends_of_a_message_dropped_are_found(schedule: Schedule, which: int) -> None:
    """Both wires stay in step; one rank waits for ever."""
    sends = [action for actions in schedule.lists for action in actions if action.kind.startswith("SEND")]
    if not sends:
        return
    action = sends[which % len(sends)]
    kind, stage, batch = action
    there = Action("RECV_F", stage + 1, batch) if kind == "SEND_F" else Action("RECV_B", stage - 1, batch)
    lists = tuple(tuple(one for one in actions if one not in (action, there)) for actions in schedule.lists)
    assert "cannot finish" in validate(replace(schedule, lists=lists))[0]


def replayed(schedule: Schedule) -> str:
    """Run the lists with labels for data, over unlabelled wires; return "right", "wrong" or "stuck"."""
    wires: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
    has: list[dict[Action, Action]] = [{} for _ in schedule.lists]
    at, moved, right = [0] * schedule.ranks, True, True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.lists):
            while at[rank] < len(actions):
                action = kind, stage, batch = actions[at[rank]]
                gradient = "I" if Action("I", stage, batch) in actions else "B"
                if kind.startswith("SEND"):
                    made = action._replace(kind="F" if kind == "SEND_F" else gradient)
                    if made not in has[rank]:
                        break
                    wires[rank, peer(schedule, rank, action)[0]].append(has[rank][made])
                elif kind.startswith("RECV"):
                    there, _ = peer(schedule, rank, action)
                    if not wires[there, rank]:
                        break
                    has[rank][action] = wires[there, rank].popleft()
                else:
                    wanted = wants(schedule, action, rank)
                    if any(name not in has[rank] for name in wanted):
                        break
                    right &= all(has[rank][name] == label for name, label in wanted.items())
                    has[rank][action] = action
                at[rank] += 1
                moved = True
    if any(place < len(schedule.lists[rank]) for rank, place in enumerate(at)):
        return "stuck"
    return "right" if right else "wrong"


def wants(schedule: Schedule, action: Action, rank: int) -> dict[Action, Action]:
    """Return the names of an action's inputs, each with the data it must hold."""
    kind, stage, batch = action
    own = {made: made for made in [Action("I" if kind == "W" else "F", stage, batch)]}
    forward = kind == "F"
    there = stage - 1 if forward else stage + 1
    if kind == "W" or not 0 <= there < schedule.stages:
        return {} if forward else own
    made = Action("F" if forward else kind, there, batch)
    away = schedule.placement[there] != rank
    beside = {Action("RECV_F" if forward else "RECV_B", stage, batch) if away else made: made}
    return beside if forward else {**own, **beside}


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    schedules(ACTIVATIONS, ranks=4, count=6), st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 6)), max_size=3)
)
def test_sound_is_what_ends_with_the_right_data(schedule: Schedule, moves: list[tuple[int, int]]) -> None:
    """Actions are swapped at random: the validator passes exactly the lists that compute on the right data."""
    lists = [list(actions) for actions in schedule.lists]
    for where, distance in moves:
        actions = lists[where % len(lists)]
        here = where // len(lists) % len(actions)
        there = (here + distance) % len(actions)
        actions[here], actions[there] = actions[there], actions[here]
    mixed = replace(schedule, lists=tuple(map(tuple, lists)))
    assert (validate(mixed) == []) == (replayed(mixed) == "right")


def received_when_needed(schedule: Schedule) -> Order:
    """Move each receive to just before the action that needs it, as other runtimes do to receive late."""
    moved = []
    for actions in schedule.lists:
        found: list[Action] = []
        for action in actions:
            if action.kind == "F":
                found += [one for one in actions if one == action._replace(kind="RECV_F")]
            elif action.kind in ("B", "I"):
                found += [one for one in actions if one == action._replace(kind="RECV_B")]
            if not action.kind.startswith("RECV"):
                found.append(action)
        moved.append(tuple(found))
    return tuple(moved)


@pytest.mark.parametrize("name", SEARCHED)
def test_receives_put_off_until_they_are_needed_are_found(name: str) -> None:
    """Such reordering gave wrong gradients in another runtime: activations and gradients have the same shape."""
    for chunks in (2, 4) if name == "hanayo" else (2,):
        schedule = generate(name, 4, 8, chunks)
        late = replace(schedule, lists=received_when_needed(schedule))
        if late.lists == schedule.lists:
            continue
        found = validate(late)
        assert any("where it is sent" in problem for problem in found)
        return
    raise AssertionError("no list in which it makes a difference")


def test_receives_put_off_in_order_are_sound() -> None:
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved"):
        schedule = made(name, 4, 8, 1)
        assert validate(replace(schedule, lists=received_when_needed(schedule))) == []


def test_an_activation_taken_for_a_gradient_is_found() -> None:
    """The same number of messages each way; only their order differs."""
    schedule = generate("hanayo", 2, 2, 2)
    rank, at = next(
        (rank, at)
        for rank, actions in enumerate(schedule.lists)
        for at, action in enumerate(actions)
        if action.kind == "RECV_B" and any(one.kind == "RECV_F" for one in actions[:at])
    )
    actions = list(schedule.lists[rank])
    before = max(i for i in range(at) if actions[i].kind == "RECV_F")
    actions[at], actions[before] = actions[before], actions[at]
    (problem, *_) = problems(changed(schedule, rank, actions))
    assert "where it is sent" in problem.message
    assert (problem.rank, actions[problem.at].kind[:4]) == (rank, "RECV")


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("cap", [3, 4, 6])
def test_memory_caps(name: str, cap: int) -> None:
    schedule = generate(name, 3, 9, 2, cap)
    assert validate(schedule, cap=cap) == []
    peak = max(simulate(schedule, times_of(schedule, 0)).in_flight)
    tight = (peak - 1) // 2
    assert any("more than" in problem for problem in validate(schedule, cap=tight))


@pytest.mark.parametrize("name", WEIGHTS)
def test_memory_caps_where_weights_travel(name: str) -> None:
    """A rank's share is all stages of its own micro-batches."""
    schedule = made(name, 3, 6)
    assert validate(schedule, cap=2) == []
    assert validate(replace(schedule, lists=made("gpipe", 3, 6).lists), cap=2)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules(ACTIVATIONS, count=8), st.integers(0, 10**6))
def test_frozen_stages_and_evaluations(schedule: Schedule, which: int) -> None:
    first = which % (schedule.stages + 1)
    frozen = without_backward(schedule, first)
    assert validate(frozen) == []
    assert validate(forward_only(schedule, 1 + which % 7)) == []
    if first:
        assert validate(replace(schedule, trained_from=first))
        assert validate(replace(frozen, trained_from=first - 1))
        rank = schedule.placement[first - 1]
        extra = (*frozen.lists[rank], Action("B", first - 1, 0))
        assert any("has no backward pass" in problem for problem in validate(changed(frozen, rank, extra)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schedules(ACTIVATIONS, count=6), st.integers(0, 10**6), st.integers(0, 10**6))
def test_the_rest_of_a_schedule_on_other_ranks(schedule: Schedule, steps: int, shift: int) -> None:
    total = sum(len(actions) for actions in schedule.lists)
    counts = after(schedule, steps % total)
    done = [action for actions, count in zip(schedule.lists, counts, strict=True) for action in actions[:count]]
    places = [(rank + shift) % schedule.ranks for rank in schedule.placement]
    rest = remap(schedule, counts, places)
    assert validate(rest, executed=done) == []
    assert receive_depth(rest, done) >= 1
    if any(action.kind in COMPUTE for action in done):
        assert validate(rest)


def test_halves_and_whole_backward_passes_may_be_mixed() -> None:
    schedule = generate("1f1b", 2, 3)
    halved: list[Action] = []
    for action in schedule.lists[0]:
        split = action == Action("B", 0, 1)
        halved += [action._replace(kind="I"), action._replace(kind="W")] if split else [action]
    assert validate(changed(schedule, 0, halved)) == []
    whole = [action for action in halved if action.kind != "I"]
    assert validate(changed(schedule, 0, whole)) == ["0I1 is missing"]
    both = [*halved, Action("B", 0, 1)]
    assert validate(changed(schedule, 0, both)) == ["0B1: a backward pass is whole or in halves, not both"]


def test_room_that_lists_need() -> None:
    """Rank 0 sends all activations of its first chunk before it receives one: the wire must hold all of them."""
    for count in (2, 4, 6):
        order = tuple(
            tuple(Action("F", stage, batch) for stage in (rank, rank + 2) for batch in range(count))
            + tuple(Action("B", stage, batch) for stage in (rank + 2, rank) for batch in range(count))
            for rank in range(2)
        )
        schedule = replace(generate("interleaved", 2, count, 2), lists=with_transfers(order, (0, 1, 0, 1)))
        needed = receive_depth(schedule)
        assert needed == max(1, count // 2)
        assert validate(schedule, room=needed) == validate(schedule) == []


def test_shape_faults_are_said() -> None:
    schedule = generate("1f1b", 2, 2)
    assert "1 lists for 2 ranks" in validate(replace(schedule, lists=schedule.lists[:1]))
    assert "stage 1 is on rank 7, which is not one of 2" in validate(replace(schedule, placement=(0, 7)))
    assert validate(replace(schedule, placement=(0, -1)))
    assert validate(replace(schedule, trained_from=3))
    assert validate(replace(schedule, micro_batches=0))
    assert any("not on rank" in problem for problem in validate(replace(schedule, placement=(1, 0))))


def test_a_flood_of_faults_is_told_in_few_lines() -> None:
    """Similar faults are counted, and only the first five different ones are reported."""
    schedule = generate("gpipe", 2, 200)
    found = validate(replace(schedule, micro_batches=500))
    assert found == [
        f"{stage}{kind}200, {stage}{kind}201 and 298 more are missing" for stage in (0, 1) for kind in "FB"
    ]
    wide = generate("gpipe", 8, 4)
    found = validate(replace(wide, micro_batches=5))
    assert (len(found), found[0], found[-1]) == (6, "0F4 is missing", "and 11 more")


@pytest.mark.parametrize(
    ("right", "wrong", "expected"),
    [
        ("1F2", "1F9", [("1F9: there are only micro-batches 0 to 3", 1, 9), ("1F2 is missing", 1, -1)]),
        ("1RECV_F2", "1RECV_F9", [("1RECV_F9: there are only micro-batches 0 to 3", 1, 8),
                                  ("1RECV_F2 is missing: rank 0 sends 0SEND_F2", 1, -1)]),
        ("1F2", "1B2", [("1B2 is there 2 times", 1, 10), ("1F2 is missing", 1, -1)]),
        ("1RECV_F2", "1RECV_F1", [("1RECV_F1 is there 2 times", 1, 8),
                                  ("1RECV_F2 is missing: rank 0 sends 0SEND_F2", 1, -1)]),
        ("0SEND_F1,", "", [("0SEND_F1 is missing: rank 1 waits at 1RECV_F1", 0, -1)]),
        ("0SEND_F1,0RECV_B0,0B0,0F2,0SEND_F2,", "0SEND_F2,0RECV_B0,0B0,0F2,0SEND_F1,",
         [("from rank 0 to 1: message 2 is 0SEND_F2 where it is sent, 1RECV_F1 where it is received", 1, 4)]),
    ],
)  # fmt: skip
def test_one_slip_of_the_pen_is_told_as_one(right: str, wrong: str, expected: list[tuple[str, int, int]]) -> None:
    """Messages show cells, not tuples; the faulty cell comes first, and its consequences are not reported."""
    text = to_text(generate("1f1b", 2, 4))
    assert right in text
    assert problems(from_text(text.replace(right, wrong, 1))) == expected


def test_a_row_that_was_deleted_is_one_fault() -> None:
    rows = to_text(generate("1f1b", 4, 8)).splitlines(keepends=True)
    (problem,) = problems(from_text("".join(rows[:3])))
    assert problem == ("2SEND_F0, 2SEND_F1 and 14 more: there is no stage 3", 2, 2)


def test_problems_name_rank_and_place() -> None:
    schedule = generate("1f1b", 2, 2)
    actions = list(schedule.lists[1])
    actions.append(Action("F", 1, 9))
    (problem,) = problems(changed(schedule, 1, actions))
    assert (problem.rank, problem.at) == (1, len(actions) - 1)
    actions[-1:] = []
    del actions[actions.index(Action("B", 1, 1))]
    assert problems(changed(schedule, 1, actions))[0].rank == 1


@pytest.mark.parametrize("name", WEIGHTS)
def test_faults_of_travelling_weights_in_words(name: str) -> None:
    """Both ends of a shift have the same fault, so that the wires stay in step."""
    schedule = made(name, 3, 3)
    ends = sorted(
        {action._replace(kind=action.kind[5:]) for a in schedule.lists for action in a if action.kind in SHIFTS}
    )  # type: ignore[arg-type]
    words = {"FW": "without the weights", "BW": "without the weights", "G": "gradients of"}
    for kind, stage, turn in ends:
        gone = {Action(f"{end}_{kind}", stage, turn) for end in ("SEND", "RECV")}  # type: ignore[arg-type]
        lists = tuple(tuple(one for one in actions if one not in gone) for actions in schedule.lists)
        found = validate(replace(schedule, lists=lists))
        # Weights received for forward passes also serve backward passes.
        assert found or kind == "BW"
        assert all(words[kind] in problem or "a gradient of" in problem for problem in found)
    assert any("that rank 0 has begun" in problem for problem in validate(replace(
        schedule, lists=(schedule.lists[0], (*schedule.lists[1], Action("F", 0, 0)), schedule.lists[2])
    )))  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_gradients_counted_twice_are_found(name: str) -> None:
    """The owner's rank passes its sum on, and the sum returns a second time."""
    schedule = made(name, 2, 2)
    lists = [list(actions) for actions in schedule.lists]
    sent = next(action for action in lists[0] if action.kind == "SEND_G")
    lists[0].append(sent._replace(micro_batch=99))
    lists[1].append(Action("RECV_G", sent.stage, 99))
    assert any(
        "without a gradient" in problem for problem in validate(replace(schedule, lists=tuple(map(tuple, lists))))
    )


def test_activations_do_not_move_where_weights_do() -> None:
    schedule = made("weipipe", 2, 2)
    lists = ((*schedule.lists[0], Action("SEND_F", 0, 0)), (*schedule.lists[1], Action("RECV_F", 1, 0)))
    assert any("moves what stays" in problem for problem in validate(replace(schedule, lists=lists)))
    plain = generate("1f1b", 2, 2)
    shifted = ((*plain.lists[0], Action("SEND_FW", 0, 0)), (*plain.lists[1], Action("RECV_FW", 0, 0)))
    assert any("moves what stays" in problem for problem in validate(replace(plain, lists=shifted)))
