"""Pipeline schedules: by hand, for every size, with planted faults, and fast timing against exact timing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.cost import case
from partool.schedule import (
    Action,
    Schedule,
    StageTimes,
    check,
    generate,
    in_flight,
    nearest,
    order,
    rank_of,
    simulate,
    validate,
)
from partool.schedule.actions import Kind, with_transfers
from partool.strategies.schedules import SCHEDULES

sizes = st.tuples(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
staying = st.tuples(
    st.sampled_from(sorted(name for name in SCHEDULES if SCHEDULES[name].moves == "activations")),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 4),
)


def made(name: str, ranks: int, more: int, chunks: int) -> Schedule:
    """Return a schedule with the nearest sizes that it allows."""
    chunks = {"interleaved": chunks, "hanayo": 2 * (1 + chunks // 3), "zb-v": 2}.get(name, 1)
    batches = nearest(name, ranks, ranks + more, chunks)
    assert batches
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
    """Four ranks, f = i = w = 1: (p-1)(f+b); interleaved the same per chunk, i.e. 1/v of it; ZB-H1 (p-1)(f+i-w)."""
    schedule = generate(name, 4, 12, chunks)
    timeline = simulate(schedule, equal(schedule))
    assert timeline.makespan_s == pytest.approx(12 * 3 * chunks + idle)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bubbles_by_hand(ranks: int) -> None:
    """Idle over work: (p-1)/m for GPipe and 1F1B, 1/v of that interleaved, a third with split backward passes."""
    count, chunks = 4 * ranks, 4
    expected = (ranks - 1) / count
    for name, of, share in (
        ("gpipe", 1, 1.0),
        ("1f1b", 1, 1.0),
        ("interleaved", chunks, 1 / chunks),
        ("zb-h1", 1, 1 / 3),
    ):
        timeline = simulate(generate(name, ranks, count, of), equal(generate(name, ranks, count, of)))
        idle, busy = sum(timeline.idle_s), sum(timeline.busy_s)
        assert idle / busy == pytest.approx(share * expected)
        assert timeline.bubble == pytest.approx(idle / (idle + busy))


def test_warm_up_of_the_interleaved_schedule() -> None:
    """Megatron-LM: 2 (p - r - 1) + (v - 1) p forward passes, then forward and backward in turn."""
    for rank, actions in enumerate(order("interleaved", 4, 8, 2)):
        kinds = "".join(action.kind for action in actions)
        warm = 2 * (4 - rank - 1) + 4
        assert kinds == "F" * warm + "FB" * (16 - warm) + "B" * warm
    first = order("interleaved", 2, 4, 2)[0]
    assert [tuple(action) for action in first[:6]] == [
        ("F", 0, 0), ("F", 0, 1), ("F", 2, 0), ("F", 2, 1), ("F", 0, 2), ("B", 2, 0),
    ]  # fmt: skip


def test_order_of_zb_h1_by_hand() -> None:
    texts = ["".join(f"{a.kind}{a.micro_batch}" for a in actions) for actions in order("zb-h1", 2, 3)]
    assert texts == ["F0F1I0W0F2I1W1I2W2", "F0I0F1I1W0F2I2W1W2"]


def test_sends_take_time_and_may_block() -> None:
    """Two ranks, one micro-batch, f = 1, b = 2, transfer 0.5: 1 + 0.5 + 1 + 2 + 0.5 + 2."""
    schedule = generate("1f1b", 2, 1)
    timeline = simulate(schedule, equal(schedule, send=0.5))
    assert timeline.makespan_s == 7.0
    assert [(e.rank, tuple(e.action), e.start_s, e.stop_s) for e in timeline.transfers] == [
        (0, ("SEND_F", 0, 0), 1.0, 1.5),
        (1, ("SEND_B", 1, 0), 4.5, 5.0),
    ]
    assert simulate(schedule, equal(schedule, send=0.5), blocking=True).makespan_s == 7.0
    # GPipe's first rank sends three times: it may continue meanwhile, or block (F at 0, 1.5, 3; B of 2 by 10.5).
    schedule = generate("gpipe", 2, 3)
    assert simulate(schedule, equal(schedule, send=0.5)).makespan_s == 1 + 0.5 + 3 + 3 * 2 + 0.5 + 2
    blocked = simulate(schedule, equal(schedule, send=0.5), blocking=True)
    assert [e.start_s for e in blocked.events if e.rank == 0 and e.action.kind == "F"] == [0.0, 1.5, 3.0]
    assert blocked.makespan_s == pytest.approx(1.5 * 3 + 1 + 2.5 * 3 + 2)


def test_in_flight_by_hand() -> None:
    assert in_flight("gpipe", 4, 9) == (9, 9, 9, 9)
    assert in_flight("1f1b", 4, 9) == (4, 3, 2, 1)
    assert in_flight("1f1b", 4, 2) == (2, 2, 2, 1)
    assert in_flight("zb-h1", 4, 9) == (4, 4, 4, 4)
    assert in_flight("interleaved", 4, 8, 2) == (11, 9, 7, 5)


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
    assert any("message 1" in problem for problem in validate(changed(schedule, 1, swapped)))

    dropped = [action for action in middle if action != Action("B", 1, 2)]
    assert any("1B2 is missing" in problem for problem in validate(changed(schedule, 1, dropped)))
    assert any(
        "1F0 is there 2 times" in problem for problem in validate(changed(schedule, 1, [*middle, Action("F", 1, 0)]))
    )
    assert any("not on rank" in problem for problem in validate(changed(schedule, 1, [*middle, Action("F", 0, 0)])))
    assert any(
        "1F99: there are" in problem for problem in validate(changed(schedule, 1, [*middle, Action("F", 1, 99)]))
    )

    lost = [action for action in middle if action != Action("SEND_F", 1, 4)]
    assert any("1SEND_F4 is missing" in problem for problem in validate(changed(schedule, 1, lost)))

    early = list(middle)
    first = early.index(Action("B", 1, 0))
    early.insert(0, early.pop(first))
    assert any("cannot finish" in problem for problem in validate(changed(schedule, 1, early)))
    with pytest.raises(ValueError, match="cannot go on"):
        simulate(changed(schedule, 1, early), equal(schedule))


def test_messages_of_activations_and_gradients_share_their_pair() -> None:
    """Two ranks, two chunks: rank 0 sends rank 1 both kinds, and their relative order matters."""
    schedule = generate("interleaved", 2, 4, 2)
    actions = list(schedule.lists[1])
    receives = [index for index, action in enumerate(actions) if action.kind.startswith("RECV")]
    at = next(i for i, j in pairwise(receives) if {actions[i].kind, actions[j].kind} == {"RECV_F", "RECV_B"})
    other = receives[receives.index(at) + 1]
    actions[at], actions[other] = actions[other], actions[at]
    assert any("from rank 0 to 1" in problem for problem in validate(changed(schedule, 1, actions)))


def test_lists_that_wait_in_a_circle_are_found() -> None:
    """A gradient is received before the activation it depends on is sent: no buffer helps."""
    schedule = generate("gpipe", 3, 3)
    late = list(schedule.lists[1])
    gradient = late.index(Action("RECV_B", 1, 0))
    late.insert(late.index(Action("SEND_F", 1, 0)), late.pop(gradient))
    assert any("buffered" in problem for problem in validate(changed(schedule, 1, late)))


def test_lists_that_need_more_room_than_one_message_are_found() -> None:
    """Rank 0 sends four activations before it receives the first from rank 1, which forwards each on arrival."""
    phases: list[tuple[Kind, tuple[int, int]]] = [("F", (0, 1)), ("F", (2, 3)), ("B", (2, 3)), ("B", (0, 1))]
    orders = tuple(
        tuple(Action(kind, stages[rank], batch) for kind, stages in phases for batch in range(4)) for rank in range(2)
    )
    schedule = generate("interleaved", 2, 4, 2)
    found = validate(replace(schedule, lists=with_transfers(orders, schedule.placement)), room=1)
    assert len(found) == 1
    assert "room for one message" in found[0]


FAULTS = ("drop", "double", "swap", "move")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(staying, st.sampled_from(FAULTS), st.integers(0, 10**6), st.integers(0, 10**6))
def test_faults_anywhere_are_found(size: tuple[str, int, int, int], fault: str, where: int, to: int) -> None:
    """Dropped and doubled actions always; a receive swapped with another of its pair; a compute action moved before
    its inputs."""
    schedule = made(*size)
    rank = where % schedule.ranks
    actions = list(schedule.lists[rank])
    at = to % len(actions)
    if fault == "drop":
        del actions[at]
    elif fault == "double":
        actions.insert(at, actions[at])
    elif fault == "swap":
        receives = [index for index, action in enumerate(actions) if action.kind == "RECV_F"]
        receives = [index for index in receives if actions[index].stage == actions[receives[0]].stage]
        if len(receives) < 2:
            return
        one, two = receives[to % (len(receives) - 1)], receives[-1]
        actions[one], actions[two] = actions[two], actions[one]
    else:
        backward = [index for index, action in enumerate(actions) if action.kind in ("B", "I")]
        moving = actions.pop(backward[to % len(backward)])
        actions.insert(actions.index(Action("F", moving.stage, moving.micro_batch)), moving)
    assert validate(changed(schedule, rank, actions)) != []


def test_places_of_stages_are_those_of_lists() -> None:
    """The cost model places stages by the schedule's record, and the lists match it."""
    assert list(case.SCHEDULES) == [*SCHEDULES, "file"]
    for index, (name, record) in enumerate(SCHEDULES.items()):
        made = generate(name, 4, 8, 2 if record.stages != "1" else 1)
        if record.moves == "activations":
            run = {one.stage: rank for rank, actions in enumerate(made.lists) for one in actions if one.kind == "F"}
            assert (index in case.FOLDED) == (run.get(4) == 3), name
            assert [run[stage] for stage in range(made.stages)] == list(made.placement), name
        assert (index in case.EAGER) == (index in case.HALVED or made.moves == "weights"), name
        assert (index in case.RING) == (made.moves == "weights"), name
        assert (index in case.HALVED) == any(one.kind == "W" for actions in made.lists for one in actions), name
        assert [rank_of(name, stage, 4) for stage in range(made.stages)] == list(made.placement), name
