"""Schedules as text: round trips, differences, and faults of a text with their places."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import (
    Action,
    Schedule,
    ScheduleTextError,
    cell,
    columns_of,
    diff,
    forward_only,
    from_text,
    generate,
    nearest,
    rows_of,
    schedule_hash,
    to_text,
    validate,
    without_backward,
)
from partool.strategies.schedules import SCHEDULES


def made(name: str, ranks: int, batches: int) -> Schedule:
    chunks = {"interleaved": 2, "hanayo": 4, "zb-v": 2}.get(name, 1)
    return generate(name, ranks, nearest(name, ranks, batches, chunks) or 0, chunks)


schedules = st.builds(made, st.sampled_from(sorted(SCHEDULES)), st.integers(1, 4), st.integers(1, 9))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(schedules)
def test_text_and_back(schedule: Schedule) -> None:
    for one in (schedule, forward_only(schedule, 2), without_backward(schedule, schedule.stages // 2)):
        again = from_text(to_text(one), one.name)
        assert again == one
        assert schedule_hash(again) == schedule_hash(one)
        assert diff(one, again) == []


@settings(max_examples=120, deadline=None, derandomize=True)
@given(schedules, st.data())
def test_every_change_is_seen(schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.sampled_from([rank for rank, actions in enumerate(schedule.lists) if actions]))
    actions = list(schedule.lists[rank])
    at = data.draw(st.integers(0, len(actions) - 1))
    if data.draw(st.booleans()):
        del actions[at]
    else:
        actions.insert(at, Action("F", 0, 99))
    lists = (*schedule.lists[:rank], tuple(actions), *schedule.lists[rank + 1 :])
    other = replace(schedule, lists=lists)
    found = diff(schedule, other)
    assert len(found) == 1
    assert found[0].startswith(f"rank {rank}, ")
    assert schedule_hash(other) != schedule_hash(schedule)


def test_what_is_printed() -> None:
    schedule = generate("1f1b", 2, 2)
    assert to_text(schedule) == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    assert to_text(without_backward(schedule, 1)) == (
        "# trained_from=1\n0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1B0,1RECV_F1,1F1,1B1\n"
    )
    assert to_text(generate("weipipe", 2, 2)).startswith("# moves=weights\n# placement=1 0\n0RECV_FW0,")
    alone = Schedule("x", 3, 9, 2, (1, 1), ((), (Action("F", 0, 1),), ()))
    assert to_text(alone) == "# micro_batches=9\n# placement=1 1\n-\n0F1\n-\n"
    assert from_text(to_text(alone), "x") == alone


def test_texts_that_people_write() -> None:
    """Lists of computes get their transfers; empty cells are idle time, as torch writes it; quotes, notes, CRLF."""
    lines = ["\ufeff# two ranks, V", '"0F0",, 3F0 ,3B0,,,0B0,', "", "  # below", ",1F0,2F0,,2B0,1B0"]
    text = "\r\n".join(lines)
    schedule = from_text(text)
    assert schedule.name == "file"
    assert (schedule.ranks, schedule.micro_batches, schedule.chunks, schedule.placement) == (2, 1, 2, (0, 1, 1, 0))
    assert to_text(schedule).splitlines()[0] == "0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0"
    assert validate(schedule) == []
    assert rows_of(text) == (2, 5)
    # A text with any transfers is read unchanged.
    assert validate(from_text("0F0,0SEND_F0,0B0\n1F0,1B0"))


@pytest.mark.parametrize(
    ("text", "message", "row", "column"),
    [
        ("", "no actions", 0, 0),
        ("# nothing\n\n,,\n-\n", "no actions", 0, 0),
        ("0F0,0B0\n1F0, 1X0", "'1X0' is no action", 2, 2),
        ("0F0,F0", "'F0' is no action", 1, 2),
        ("0F0,0F-1", "no action", 1, 2),
        ("0F0,0F٣", "no action", 1, 2),
        ("0F0,0F1,0B0,0B1\n1F0,7F1,,1B0,1B1", "7F1: the last stage of the other cells is stage 1", 2, 2),
        ("0F0,1F1,0B0,0B1\n1F0,1B0,1B1", "1F1: stage 1 is computed on rank 1 and on rank 0", 1, 2),
        ("0F0\n#\n\n,0F0", "stage 0 is computed on rank 0 and on rank 1", 4, 2),
        ("0F0,2F0", "there is no stage 1: the rows compute 0, 2", 0, 0),
        ("1F0", "there is no stage 0: the rows compute 1", 0, 0),
        ("0SEND_F0", "there is no stage 0: no row computes anything", 0, 0),
        ("0F0,999999999F0", "there is no stage 1", 0, 0),
        ("0F0\n1F0,3SEND_F0", "3SEND_F0: there is no stage 3", 2, 2),
        ("0F0,0B0,0F999999999", "fewer micro-batches", 1, 3),
        ("0F0,0F9999999999", "no action", 1, 2),
        ("0F0,0B2", "fewer micro-batches", 1, 2),
        ("# micro_batches=7\n0F7,0B7", "fewer micro-batches", 2, 1),
        ("# micro_batches=3\n0F7,0B7", "fewer micro-batches", 2, 1),
        ("# micro_batches=999999999\n0F7,0B7", "no number up to", 1, 0),
        ("# moves=tensors\n0F0", "activations or weights", 1, 0),
        ("# moves=weights\n0F0", "# placement=1 2 0", 0, 0),
        ("# placement=0 1\n0F0", "on ranks up to 1 of 1", 1, 0),
        ("# placement=0\n0F0\n1F0", "places 1 stages", 1, 0),
        ("# placement=1 0\n0F0\n1F0", "stage 0 is computed on rank 0, not on rank 1", 1, 0),
        ("# placement=first\n0F0", "names no rank", 1, 0),
        ("# trained_from=2\n0F0", "no number up to 1", 1, 0),
    ],
)
def test_what_is_wrong_and_where(text: str, message: str, row: int, column: int) -> None:
    with pytest.raises(ScheduleTextError) as caught:
        from_text(text)
    assert message in str(caught.value)
    assert (caught.value.row, caught.value.column) == (row, column)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.text("0123FBIWSENDRCV_, \n#-=", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        schedule = from_text(text)
    except ScheduleTextError:
        return
    assert from_text(to_text(schedule)) == schedule
    validate(schedule)


def test_columns_are_those_of_the_text() -> None:
    text = "# mine\n0F0,,0F1,0B0,0B1\n-\n,1F0,1B0,1F1,,1B1\n".replace("-\n", "")
    schedule = from_text(text)
    places = {
        cell(action): column
        for actions, columns in zip(schedule.lists, columns_of(text, schedule), strict=True)
        for action, column in zip(actions, columns, strict=True)
    }
    assert {name: column for name, column in places.items() if "_" not in name} == {
        "0F0": 1, "0F1": 3, "0B0": 4, "0B1": 5, "1F0": 2, "1B0": 3, "1F1": 4, "1B1": 6,
    }  # fmt: skip
    assert {column for name, column in places.items() if "_" in name} == {0}
    whole = to_text(schedule)
    assert columns_of(whole, from_text(whole))[0] == tuple(range(1, 1 + len(schedule.lists[0])))


def test_differences_by_hand() -> None:
    one, other = generate("1f1b", 2, 3), generate("gpipe", 2, 3)
    assert diff(one, other) == [
        "rank 0, before cell 5: nothing -> 0F2 0SEND_F2",
        "rank 0, cells 7-8: 0F2 0SEND_F2 -> nothing",
        "rank 1, before cell 3: nothing -> 1RECV_F1 1F1 1RECV_F2 1F2",
        "rank 1, cells 5-6: 1RECV_F1 1F1 -> nothing",
        "rank 1, cells 9-10: 1RECV_F2 1F2 -> nothing",
    ]
    found = diff(generate("zb-v", 2, 1, 2), generate("interleaved", 2, 2, 2))
    assert found[:3] == ["micro-batches: 1 -> 2", "stage 2: rank 1 -> rank 0", "stage 3: rank 0 -> rank 1"]
    assert diff(generate("1f1b", 1, 1), generate("1f1b", 2, 1))[:3] == [
        "ranks: 1 -> 2",
        "stages: 1 -> 2",
        "rank 0, before cell 2: nothing -> 0SEND_F0 0RECV_B0",
    ]
