"""WeiPipe's lists: the paper's order, replay with labels, traffic and memory."""

from __future__ import annotations

from collections import defaultdict, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.schedule import Action, Schedule, StageTimes, cell, generate, peer, simulate, validate
from partool.schedule.weipipe import (
    GRADIENT_COPIES,
    VARIANTS,
    CopyRoom,
    interleave,
    naive,
    owner,
    room,
    trains,
    volume,
    weipipe,
)

sizes = st.tuples(st.sampled_from(sorted(VARIANTS)), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))


def computed(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{a.kind}{a.micro_batch}.{a.stage}" for a in schedule.lists[rank] if a.kind in "FBIW")


def test_interleave_has_the_papers_order() -> None:
    schedule = generate("weipipe", 4, 8)
    expected = "F0.0 F0.1 F0.2 F0.3 B0.3 F4.0 B0.2 F4.1 B0.1 F4.2 B0.0 F4.3 B4.3 B4.2 B4.1 B4.0"
    for rank in range(4):
        mine = expected.replace("0.", "a.").replace("4.", "b.")
        assert computed(schedule, rank) == mine.replace("a.", f"{rank}.").replace("b.", f"{rank + 4}.")


def test_other_variants_by_hand() -> None:
    assert computed(generate("weipipe-naive", 2, 4), 1) == "F1.0 F1.1 B1.1 B1.0 F3.0 F3.1 B3.1 B3.0"
    assert computed(generate("weipipe-zb", 2, 2), 0) == "F0.0 F0.1 I0.1 I0.0 W0.0 W0.1"


def test_shifts_of_the_smallest_ring_by_hand() -> None:
    """Rank 1 owns stage 0, rank 0 stage 1, which stays between its two passes; gradients return to their owners."""
    zero, one = (" ".join(map(cell, actions)) for actions in generate("weipipe", 2, 2).lists)
    assert zero == "0RECV_FW0 1SEND_FW2 0F0 1F0 0RECV_BW3 1B0 1RECV_G4 0B0 0SEND_G4"
    assert one == "0SEND_FW0 1RECV_FW2 0F1 0SEND_BW3 1F1 1B1 1SEND_G4 0B1 0RECV_G4"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(sizes, st.integers(0, 3))
def test_every_list_is_sound(size: tuple[str, int, int, int], frozen: int) -> None:
    name, ranks, rounds, chunks = size
    schedule = weipipe(name, ranks, ranks * rounds, chunks, min(frozen, ranks * chunks))
    assert validate(schedule) == []
    assert replayed(schedule) == {
        stage: sorted(range(ranks * rounds)) for stage in range(schedule.trained_from, ranks * chunks)
    }


def replayed(schedule: Schedule) -> dict[int, list[int]]:
    """Run the lists with labels for tensors; return the micro-batches whose gradients each owner ends with."""
    ranks = range(schedule.ranks)
    weights = [set(schedule.on_rank(rank)) for rank in ranks]
    sums: list[defaultdict[int, list[int]]] = [defaultdict(list) for _ in ranks]
    wires: defaultdict[tuple[int, int, bool], deque[tuple[Action, list[int]]]] = defaultdict(deque)
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while at[rank] < len(schedule.lists[rank]):
                action = schedule.lists[rank][at[rank]]
                kind, stage, number = action
                there, other = (rank, action) if kind in "FBIW" else peer(schedule, rank, action)
                if kind.startswith("RECV"):
                    wire = wires[there, rank, kind == "RECV_G"]
                    if not wire:
                        break
                    sent, load = wire.popleft()
                    assert sent == other, (schedule.name, rank, action, sent)
                    if kind == "RECV_G":
                        assert sums[rank][stage], "a sum of nothing would be wrong only where nothing is added"
                        sums[rank][stage] += load
                    else:
                        weights[rank].add(stage)
                elif kind == "SEND_G":
                    wires[rank, there, True].append((action, sums[rank].pop(stage)))
                elif kind.startswith("SEND"):
                    assert stage in weights[rank]
                    wires[rank, there, False].append((action, []))
                elif kind != "W":
                    assert stage in weights[rank], (schedule.name, rank, action)
                    assert number % schedule.ranks == rank
                if kind in ("B", "W"):
                    sums[rank][stage].append(number)
                at[rank] += 1
                moved = True
    assert at == [len(actions) for actions in schedule.lists]
    assert not any(wires.values())
    homes = {stage: sorted(sums[home].pop(stage, [])) for stage, home in enumerate(schedule.placement)}
    assert not any(map(len, sums)), "gradients that never came home"
    return {stage: found for stage, found in homes.items() if stage >= schedule.trained_from}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sizes, st.integers(0, 6), st.integers(1, 12))
def test_lists_follow_one_order(size: tuple[str, int, int, int], frozen: int, count: int) -> None:
    """Lists end even if both ends of every transfer wait for each other before their ranks do anything else."""
    name, ranks, rounds, chunks = size
    training = weipipe(name, ranks, ranks * rounds, chunks, min(frozen, ranks * chunks))
    for schedule in (training, weipipe(name, ranks, count, chunks, ranks * chunks)):
        left = [list(reversed(actions)) for actions in schedule.lists]
        moved = True
        while moved:
            moved = False
            for rank, actions in enumerate(left):
                while actions:
                    if actions[-1].kind not in "FBIW":
                        there, other = peer(schedule, rank, actions[-1])
                        if left[there][-1:] != [other]:
                            break
                        left[there].pop()
                    actions.pop()
                    moved = True
        assert not any(left)


@pytest.mark.parametrize(("ranks", "rounds", "weights"), [(2, 1, 3), (3, 1, 10), (4, 1, 21), (4, 2, 36), (4, 4, 60)])
def test_what_interleave_moves(ranks: int, rounds: int, weights: int) -> None:
    """Number of stages' weights that all ranks send in a step; the paper's ring sends (3K + 4) P on every rank."""
    schedule, one, none = generate("weipipe", ranks, ranks * rounds), [1] * ranks, [0] * ranks
    assert sum(volume(schedule, one, none)) == weights == (ranks - 1) * len(trains(interleave(ranks, rounds)))
    assert volume(schedule, none, one) == (rounds * (ranks - 1),) * ranks
    assert max(volume(schedule, one, one)) < (3 * rounds + 4) * ranks


def test_volume_goes_by_stage() -> None:
    schedule = generate("weipipe", 2, 2)
    assert sum(volume(schedule, [10, 1], [0, 0])) == 21, "stage 0 goes twice, stage 1 stays for its backward pass"
    assert volume(schedule, [0, 0], [5, 7]) == (5, 7)


def test_neighbouring_turns_share_weights() -> None:
    """The last stage stays for the backward pass, the first for the next round but one, the middle ones in between."""
    journeys = [(at, one.stage) for at, one in trains(naive(3, 2))]
    assert journeys == [(0, 0), (1, 1), (2, 2), (4, 1), (5, 0), (7, 1), (8, 2), (10, 1), (11, 0)]
    steady = [one.stage for at, one in trains(interleave(4, 9)) if 12 <= at < 16]
    assert sorted(steady) == [0, 1, 2, 3]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(sizes)
def test_room_is_small(size: tuple[str, int, int, int]) -> None:
    name, ranks, rounds, chunks = size
    schedule = generate(name, ranks, ranks * rounds, chunks)
    for rank in range(ranks):
        found = room(schedule, rank)
        assert found.weights <= (4 if name == "weipipe" else 2)
        assert found == CopyRoom(held_by_hand(schedule, rank), GRADIENT_COPIES)


def held_by_hand(schedule: Schedule, rank: int) -> int:
    """Largest number of other ranks' stages that are already received and still read before they are received again."""
    uses: defaultdict[int, list[tuple[int, bool]]] = defaultdict(list)
    for at, (kind, stage, _) in enumerate(schedule.lists[rank]):
        if schedule.placement[stage] != rank and kind not in ("W", "RECV_G", "SEND_G"):
            uses[stage].append((at, kind.startswith("RECV")))
    spans = []
    for found in uses.values():
        starts = [index for index, (_, comes) in enumerate(found) if comes]
        for first, after in zip(starts, [*starts[1:], len(found)], strict=True):
            spans.append((found[first][0], found[after - 1][0]))
    return max((sum(first <= at <= last for first, last in spans) for at, _ in spans), default=0)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(sizes, st.floats(0.0, 0.2))
def test_without_waiting_for_links_nobody_idles(size: tuple[str, int, int, int], send_s: float) -> None:
    """Ranks wait for the first weights and for the last gradients to return, and for nothing between."""
    name, ranks, rounds, chunks = size
    schedule = generate(name, ranks, ranks * rounds, chunks)
    stages = ranks * chunks
    timeline = simulate(schedule, StageTimes([1.0] * stages, [2.0] * stages, send_s=send_s / ranks))
    assert max(timeline.idle_s) <= 4 * send_s + 1e-9
    assert timeline.makespan_s >= 3.0 * rounds * stages - 1e-9


def test_evaluation_goes_as_far_as_there_are_micro_batches() -> None:
    schedule = weipipe("weipipe", 4, 6, 1, 4)
    assert validate(schedule) == []
    assert schedule.trained_from == 4
    assert computed(schedule, 1) == "F1.0 F1.1 F1.2 F1.3 F5.0 F5.1 F5.2 F5.3"
    assert computed(schedule, 3) == "F3.0 F3.1 F3.2 F3.3"
    second = [a for a in schedule.lists[2] if a.kind.startswith("RECV") and a.micro_batch >= 4 + 2]
    assert not second, "rank 2 has nothing to do with the second round's weights"


def test_rounds_must_be_whole() -> None:
    with pytest.raises(ValueError, match="7 micro-batches are no multiple of the 4 pipeline ranks"):
        generate("weipipe", 4, 7)
    with pytest.raises(ValueError, match="7 micro-batches are no multiple of the 4 ranks"):
        weipipe("weipipe", 4, 7)


def test_owners_are_one_further() -> None:
    assert generate("weipipe", 3, 3, 2).placement == tuple(owner(stage, 3) for stage in range(6)) == (1, 2, 0, 1, 2, 0)
