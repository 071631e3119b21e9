"""Ranks that wait for each other, in the execution model over the lists of exchanges."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
from _device_waits import ahead
from _device_waits import stuck as stuck_in_schedule
from _planted import trace_of
from _schedules import made
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_of

from partool.plan.rank_trace import Collective, RankTrace
from partool.plan.types import Plan
from partool.schedule import Schedule, peer, posts
from partool.schedule.posting import Posts
from partool.verify import mismatches, stuck

Entries = list[Collective | None]


@pytest.fixture(scope="module")
def plan() -> Plan:
    text = "model: {hidden: 16, layers: 4, heads: 4, kv_heads: 4, vocab: 256}\ndata: python-stdlib\n"
    text += "hardware: {accelerator: h100-sxm, per_node: 8}\ntraining: {global_batch: 8, sequence_length: 16}\n"
    return plan_of(text + "parallel: {tensor: 2, sequence: 1, pipeline: {stages: 4, schedule: 1f1b}}\n")


def found_in(plan: Plan, *lists: Entries) -> list[tuple[tuple[int, ...], str]]:
    """Return ranks and message of each finding about ranks 0, 1, … with these lists."""
    traces = [trace_of(rank, mine) for rank, mine in enumerate(lists)]
    return [(each.ranks, each.message) for each in stuck(plan, traces)]


def letter(kind: str, peer: int, group: tuple[int, ...] = (0, 1)) -> Collective:
    return Collective(kind, group, "pipeline", (4,), "float32", peer)


def summed(*group: int) -> Collective:
    return Collective("allreduce_", group, "undefined", (4,), "float32", -1)


def test_messages_in_one_batch_close_no_circle(plan: Plan) -> None:
    """Both ends are posted together, in whichever order; with an operator between them a rank may wait."""
    batched: list[Entries] = [[None, letter("send", 1), letter("recv_", 1)], [letter("send", 0), letter("recv_", 0)]]
    assert found_in(plan, *batched) == []
    apart: list[Entries] = [
        [letter("send", 1), None, letter("recv_", 1)],
        [letter("send", 0), None, letter("recv_", 0)],
    ]
    ((ranks, message),) = found_in(plan, *apart)
    assert ranks == (0, 1)
    assert message.count("has not issued") == 2
    assert found_in(plan, apart[0], apart[1][::-1]) == []


def test_collectives_in_two_orders(plan: Plan) -> None:
    """With and without an operator between them; the device may run the second one after the first one."""
    for between in ([], [None]):
        lists: list[Entries] = [[summed(0, 1, 2), *between, summed(0, 1)], [summed(0, 1), *between, summed(0, 1, 2)]]
        ((ranks, message),) = found_in(plan, *lists, [summed(0, 1, 2)])
        assert ranks == (0, 1)
        assert "ranks that wait for them: 2" in message
        assert found_in(plan, lists[0], lists[0], [summed(0, 1, 2)]) == []


def test_a_rank_that_has_ended(plan: Plan) -> None:
    ((ranks, message),) = found_in(plan, [summed(0, 1), summed(0, 1)], [summed(0, 1), None])
    assert ranks == (0,)
    assert message.endswith("and the list of rank 1 ends without it")
    ((ranks, _),) = found_in(plan, [letter("send", 1)], [])
    assert ranks == (0,), "posted at the end of a list, and never complete"


def test_ranks_that_were_not_executed_are_always_there(plan: Plan) -> None:
    mine: Entries = [letter("send", 7, (0, 7)), None, summed(0, 6, 7), None]
    assert found_in(plan, mine) == []
    traces = [trace_of(rank, [summed(0, 5, 6), None]) for rank in (0, 5)]
    assert stuck(plan, traces) == []


def test_a_long_circle(plan: Plan) -> None:
    """Each rank of a ring sends before it receives."""
    lists: list[Entries] = []
    for rank in range(6):
        after, before = (rank + 1) % 6, (rank - 1) % 6
        ring = tuple(range(6))
        lists.append([letter("send", after, ring), None, letter("recv_", before, ring)])
    ((ranks, message),) = found_in(plan, *lists)
    assert sorted(ranks) == list(range(6))
    assert message.endswith("6 ranks in a circle")


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 6), st.integers(0, 40), st.integers(0, 2**32))
def test_lists_in_one_order_never_wait(ranks: int, length: int, seed: int) -> None:
    """Each rank issues its part of one list of exchanges of all ranks, with operators anywhere."""
    rng = random.Random(seed)
    lists: dict[int, Entries] = {rank: [] for rank in range(ranks)}
    for _ in range(length):
        group = tuple(sorted(rng.sample(range(ranks), rng.randint(2, ranks))))
        if rng.random() < 0.5:
            one, other = rng.sample(group, 2)
            lists[one].append(letter("send", other, group))
            lists[other].append(letter("recv_", one, group))
        else:
            for rank in group:
                lists[rank].append(summed(*group))
        for mine in lists.values():
            if rng.random() < 0.5:
                mine.append(None)
    some = rng.sample(range(ranks), rng.randint(1, ranks))
    traces = [trace_of(rank, lists[rank]) for rank in some]
    plan = of_six()
    assert mismatches(plan, traces) == stuck(plan, traces) == []


@cache
def of_six() -> Plan:
    """Return a plan for six ranks."""
    text = "model: {hidden: 16, layers: 4, heads: 4, kv_heads: 4, vocab: 256}\ndata: python-stdlib\n"
    text += "hardware: {accelerator: h100-sxm, per_node: 6}\ntraining: {global_batch: 6, sequence_length: 16}\n"
    return plan_of(text)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-v", "hanayo"])
def test_pipelines_as_in_the_model_of_schedules(name: str, plan: Plan) -> None:
    """Receives that the runtime posts close no circle. Those of other rules do where the model of schedules says so."""
    schedule = made(name, 4, 8)
    rules: dict[str, Sequence[Posts]] = {f"ahead {depth}": ahead(schedule, depth) for depth in (1, 2, 4, 8)}
    verdicts = {}
    for rule, found in {"runtime": posts(schedule), **rules}.items():
        waiting = stuck(plan, traces_of(schedule, found))
        assert bool(waiting) == bool(stuck_in_schedule(schedule, found, lambda _rank, _place: True)), rule
        verdicts[rule] = bool(waiting)
    assert not verdicts["runtime"]
    assert any(verdicts.values())


def traces_of(schedule: Schedule, rule: Sequence[Posts]) -> list[RankTrace]:
    """Return the traces of ranks that run a schedule and may wait within every action."""
    found = []
    for rank, actions in enumerate(schedule.lists):
        entries: Entries = []
        for place in range(len(actions) + 1):
            for receive in rule[rank].get(place, ()):
                sender, _ = peer(schedule, rank, receive)
                entries.append(Collective("recv_", (0, 1, 2, 3), str(receive), (4,), "float32", sender))
            if place < len(actions):
                entries.append(None)
            if place < len(actions) and actions[place].kind.startswith("SEND"):
                to, receive = peer(schedule, rank, actions[place])
                entries.append(Collective("send", (0, 1, 2, 3), str(receive), (4,), "float32", to))
        found.append(trace_of(rank, entries))
    return found
