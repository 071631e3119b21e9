"""Schedules derived from other schedules, executed action by action."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import (
    COMPUTE,
    Action,
    Frontier,
    Schedule,
    after,
    cut,
    forward_only,
    from_text,
    generate,
    nearest,
    peer,
    receive_depth,
    remap,
    to_text,
    validate,
    without_backward,
)
from partool.strategies.schedules import SCHEDULES

STAYING = sorted(name for name in SCHEDULES if SCHEDULES[name].moves == "activations")


def made(name: str, ranks: int, batches: int, waves: int = 1) -> Schedule:
    chunks = {"interleaved": waves, "hanayo": 2 * waves, "zb-v": 2}.get(name, 1)
    count = nearest(name, ranks, batches, chunks)
    assert count
    return generate(name, ranks, count, chunks)


schedules = st.builds(made, st.sampled_from(STAYING), st.integers(1, 4), st.integers(1, 9), st.integers(1, 2))


class Ranks:
    """Ranks that execute lists: the data each one has, and the wires between them, which keep the order of sends."""

    def __init__(self, ranks: int) -> None:
        self.has: list[set[Action]] = [set() for _ in range(ranks)]
        """Messages by the name of their receive, and forward passes kept for backward passes."""
        self.wires: defaultdict[tuple[int, int], deque[Action]] = defaultdict(deque)
        self.done: Counter[Action] = Counter()

    def run(self, schedule: Schedule, until: Sequence[int] | None = None) -> None:
        """Execute each rank's list up to a position; fail if that is impossible."""
        ends = until or [len(actions) for actions in schedule.lists]
        at = [0] * schedule.ranks
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(schedule.lists):
                while at[rank] < ends[rank] and self.does(schedule, rank, actions[at[rank]]):
                    at[rank] += 1
                    moved = True
        assert at == list(ends)

    def does(self, schedule: Schedule, rank: int, action: Action) -> bool:
        kind, stage, batch = action
        has = self.has[rank]
        if kind.startswith("SEND"):
            there, other = peer(schedule, rank, action)
            has.remove(Action("RECV_F" if kind == "SEND_F" else "RECV_B", other.stage, batch))
            self.wires[rank, there].append(other)
            return True
        if kind.startswith("RECV"):
            wire = self.wires[peer(schedule, rank, action)[0], rank]
            if not wire:
                return False
            assert wire.popleft() == action
            has.add(action)
            return True
        assert schedule.placement[stage] == rank
        self.done[action] += 1
        trained = stage >= schedule.trained_from
        if kind == "F":
            if stage and Action("RECV_F", stage, batch) not in has:
                self.done[action] -= 1
                return False
            has.discard(Action("RECV_F", stage, batch))
            has.update({Action("F", stage, batch)} if trained else ())
            has.update({Action("RECV_F", stage + 1, batch)} if stage + 1 < schedule.stages else ())
            return True
        if kind == "W":
            has.remove(Action("I", stage, batch))
            return True
        if stage + 1 < schedule.stages and Action("RECV_B", stage, batch) not in has:
            self.done[action] -= 1
            return False
        has.remove(Action("F", stage, batch))
        has.discard(Action("RECV_B", stage, batch))
        has.update({Action("I", stage, batch)} if kind == "I" else ())
        has.update({Action("RECV_B", stage - 1, batch)} if stage > schedule.trained_from else ())
        return True

    def hand_over(self, what: Frontier, placement: Sequence[int]) -> None:
        """Move the state between two schedules to the ranks that continue with it."""
        there = [message for wire in self.wires.values() for message in wire]
        everything = {thing for has in self.has for thing in has} | set(there)
        held = {thing for thing in everything if thing.kind in ("F", "I")}
        assert {(stage, batch) for _, stage, batch in held} == set(what.live_passes)
        assert everything - held == set(what.messages)
        self.wires.clear()
        self.has = [{thing for thing in everything if placement[thing.stage] == rank} for rank in range(len(self.has))]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(schedules, st.data())
def test_the_rest_of_a_schedule_runs_on_other_ranks(schedule: Schedule, data: st.DataObject) -> None:
    """Cut twice, anywhere, with any maps: every action is executed once, with its inputs present."""
    whole = Counter(action for actions in schedule.lists for action in actions if action.kind in COMPUTE)
    ranks = Ranks(schedule.ranks)
    rest = schedule
    for _ in range(2):
        total = sum(map(len, rest.lists))
        done = after(rest, data.draw(st.integers(0, total)))
        assert sum(done) <= total
        ranks.run(rest, done)
        place = data.draw(
            st.lists(st.integers(0, schedule.ranks - 1), min_size=schedule.stages, max_size=schedule.stages)
        )
        ranks.hand_over(cut(rest, done), place)
        rest = remap(rest, done, place)
        assert rest.placement == tuple(place)
        assert not any(rest.lists) or from_text(to_text(rest), rest.name) == rest
    ranks.run(rest)
    assert ranks.done == whole
    assert not any(ranks.has)
    assert not any(ranks.wires.values())


def test_a_cut_by_hand() -> None:
    """1F1B on two ranks: F0 F1 on rank 0, F0 B0 on rank 1; the gradient and the second activation are in flight."""
    schedule = generate("1f1b", 2, 2)
    assert [cell_list(actions) for actions in schedule.lists] == [
        "F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1",
        "RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1",
    ]
    found = cut(schedule, (4, 3))
    assert found == Frontier((Action("RECV_B", 0, 0), Action("RECV_F", 1, 1)), ((0, 0), (0, 1)))
    rest = remap(schedule, (4, 3), (1, 0))
    assert [cell_list(actions) for actions in rest.lists] == ["F1 B1 SEND_B1", "B0 RECV_B1 B1"]
    assert after(schedule, 0) == (0, 0)
    assert after(schedule, 16) == (8, 8)


def cell_list(actions: Sequence[Action]) -> str:
    return " ".join(f"{action.kind}{action.micro_batch}" for action in actions)


def test_cuts_and_maps_that_cannot_be() -> None:
    schedule = generate("1f1b", 2, 2)
    with pytest.raises(ValueError, match="RECV_F"):
        cut(schedule, (1, 1))
    with pytest.raises(ValueError, match="no map"):
        remap(schedule, (0, 0), (0, 2))
    with pytest.raises(ValueError, match="no map"):
        remap(schedule, (0, 0), (0,))
    with pytest.raises(ValueError, match="no place to cut"):
        cut(generate("weipipe", 2, 2), (0, 0))
    with pytest.raises(ValueError, match="no stage 3"):
        without_backward(schedule, 3)
    with pytest.raises(ValueError, match="none of weipipe"):
        forward_only(replace(generate("weipipe", 2, 2), name="file"))


@settings(max_examples=80, deadline=None, derandomize=True)
@given(schedules, st.integers(1, 30))
def test_forward_passes_alone(schedule: Schedule, batches: int) -> None:
    found = forward_only(schedule, batches)
    assert validate(found) == []
    assert receive_depth(found) == 1
    assert found.placement == schedule.placement
    counts = Counter(action.kind for actions in found.lists for action in actions)
    hops = sum(found.placement[at] != found.placement[at + 1] for at in range(found.stages - 1))
    assert counts == Counter(F=found.stages * batches, SEND_F=hops * batches, RECV_F=hops * batches)
    assert forward_only(schedule).micro_batches == schedule.micro_batches
    Ranks(schedule.ranks).run(found)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(schedules, st.data())
def test_frozen_stages_have_no_backward_pass(schedule: Schedule, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, schedule.stages))
    found = without_backward(schedule, first)
    assert validate(found) == []
    assert found.trained_from == first
    assert without_backward(found, 0) == found
    for before, now in zip(schedule.lists, found.lists, strict=True):
        gone = [action for action in before if action not in now]
        assert [action for action in before if action in now] == list(now)
        assert all(action.kind in ("B", "I", "W", "SEND_B", "RECV_B") for action in gone)
        assert all(action.stage < first or tuple(action[:2]) == ("SEND_B", first) for action in gone)
    Ranks(schedule.ranks).run(found)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - set(STAYING)))
def test_parts_of_travelling_weights(name: str) -> None:
    schedule = generate(name, 3, 6)
    alone = forward_only(schedule, 5)
    assert {action.kind for actions in alone.lists for action in actions} == {"F", "SEND_FW", "RECV_FW"}
    assert sum(action.kind == "F" for actions in alone.lists for action in actions) == 3 * 5
    frozen = without_backward(schedule, 1)
    assert {action.stage for actions in frozen.lists for action in actions if action.kind in "BIW"} == {1, 2}
    assert without_backward(frozen, 0) == frozen
