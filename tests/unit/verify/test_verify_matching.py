"""Exchanges matched across the traces of ranks: real layouts agree, planted faults are found."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from _dry_traces import Recorded, recorded, recorded_once
from _planted import FAULTS, Planted, entries_of, mutants, plant, trace_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planned import plan_of

from partool.plan.rank_trace import Collective
from partool.plan.types import Plan
from partool.verify import ExchangeFinding, mismatches, stuck
from partool.verify.matching import Divergence, divergence

SPEC = """\
model: {hidden: 16, layers: %d, heads: 4, kv_heads: 4, vocab: 256, ffn_hidden: 24, tied_embeddings: true%s}
hardware: {accelerator: h100-sxm, per_node: %d}
data: python-stdlib
training: {global_batch: %d, sequence_length: 15, steps: 3}
parallel: {%s, compile: none, micro_batch: 1}
kernels: {mode: torch}
"""
GRID = ", attention: {grid: [3, 5], layer_types: {pattern: [row, column]}}"
ALONE = "tensor: 1, sequence: 1, pipeline: 1"
IN_TURN = "tensor: 1, sequence: 1, pipeline: {stages: 2, schedule: %s}"
SHARED = "tensor: 1, pipeline: 1, sequence: {degree: %d, method: %s}"
OFTEN = {
    "tensor ranks in a pipeline": (2, 4, 2, "tensor: 2, sequence: 1, pipeline: {stages: 2, schedule: 1f1b}"),
    "usp": (1, 4, 1, SHARED % (4, "usp")),
    "dsp": (2, 2, 1, SHARED % (2, "dsp")),
    "zero 2": (1, 2, 2, f"{ALONE}, data: {{zero: 2}}"),
    "weipipe": (2, 2, 2, IN_TURN % "weipipe"),
}
"""Name → layers, devices, sequences of a step, section ``parallel``."""
STAGES = "tensor: %s, sequence: %s, pipeline: {stages: %d, schedule: %s}, data: {zero: %d}"
RING = "{degree: %d, method: %s}"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "hanayo")
WEIPIPES = ("weipipe", "weipipe-naive", "weipipe-zb")
LONGER: dict[str, dict[str, tuple[int, int, int, str]]] = {
    "two ranks": {
        **{name: (4, 2, 2, IN_TURN % name) for name in ("interleaved", "zb-v", "hanayo")},
        "ulysses": (1, 2, 1, SHARED % (2, "ulysses")),
        "ring": (1, 2, 1, SHARED % (2, "ring")),
        "zero 1": (1, 2, 2, f"{ALONE}, data: {{zero: 1}}"),
        "hybrid shards": (1, 4, 4, f"{ALONE}, data: {{zero: 3, shard: 2}}"),
        "tensor in two dimensions": (1, 4, 1, "tensor: {shape: [2, 2]}, sequence: 1, pipeline: 1"),
    },
    "four stages": {name: (8, 4, 4, STAGES % ("1", "1", 4, name, 0)) for name in (*SCHEDULES, *WEIPIPES)},
    "stages of shards": {
        f"{name} {zero}": (4, 4, 4, STAGES % ("1", "1", 2, name, zero)) for name in SCHEDULES for zero in (1, 2)
    },
    "stages of tensor ranks": {name: (4, 4, 2, STAGES % ("2", "1", 2, name, 0)) for name in SCHEDULES},
    "stages of rings": {
        **{name: (4, 4, 2, STAGES % ("1", RING % (2, "ring"), 2, name, 1)) for name in ("1f1b", "zb-v", "hanayo")},
        **{name: (2, 4, 2, STAGES % ("1", RING % (2, name), 2, "1f1b", 2)) for name in ("ulysses", "all_gather")},
        "dsp": (4, 4, 2, STAGES % ("1", RING % (2, "dsp"), 2, "1f1b", 0)),
    },
    "sequences": {
        **{name: (1, 4, 1, SHARED % (4, name)) for name in ("ring", "ulysses", "startrail", "all_gather")},
        "wide startrail": (1, 8, 1, SHARED % (8, "startrail")),
        "wide usp": (1, 8, 1, SHARED % (8, "usp")),
        "ring of tensor ranks": (1, 4, 1, f"tensor: 2, pipeline: 1, sequence: {RING % (2, 'ring')}"),
        "zigzag": (1, 4, 1, "tensor: 1, pipeline: 1, sequence: {degree: 4, method: ring, order: zigzag}"),
    },
    "tensor ranks": {
        "norms": (2, 4, 1, "tensor: {degree: 4, sequence_norms: true}, sequence: 1, pipeline: 1"),
        "shards": (2, 4, 2, "tensor: 2, sequence: 1, pipeline: 1, data: {zero: 3}"),
        "recomputation": (2, 2, 2, "tensor: 2, sequence: 1, pipeline: 1, recompute: full"),
        "replicas": (2, 4, 2, "tensor: 2, sequence: 1, pipeline: 1, data: {zero: 0}"),
        "pairs": (2, 4, 1, "tensor: {shape: [1, 4]}, sequence: 1, pipeline: 1"),
        "sequential": (2, 4, 4, f"{ALONE}, data: {{zero: 3, gather: sequential}}"),
        "shards of two": (2, 8, 8, f"{ALONE}, data: {{zero: 1, shard: 2}}"),
    },
}
"""Group → name → layout, for the longer suites."""
PLANTED_IN = ("tensor ranks in a pipeline", "usp", "dsp")


def spec(name: str, layers: int, devices: int, batch: int, parallel: str) -> str:
    """Return the text of a spec; the method dsp needs a model of grids."""
    return SPEC % (layers, GRID if "dsp" in name else "", devices, batch, parallel)


@pytest.fixture(scope="module")
def often(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recorded]:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return recorded_once({name: spec(name, *case) for name, case in OFTEN.items()}, shared / "exchanges")


def found_in(plan: Plan, lists: dict[int, list[Collective | None]]) -> list[ExchangeFinding]:
    """Return the mismatches of ranks that issue these exchanges."""
    return mismatches(plan, [trace_of(rank, mine) for rank, mine in lists.items()])


def faults_found(plan: Plan, mutant: Planted) -> bool:
    """Return whether a planted fault is found, with its rank and a section of the spec."""
    findings = [*mismatches(plan, mutant.traces), *stuck(plan, mutant.traces)]
    about = [each for each in findings if mutant.rank in each.ranks and each.code in mutant.codes]
    return bool(about) and all(place[0] == "parallel" for each in about for place in each.places)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of(spec("", *OFTEN["tensor ranks in a pipeline"]))


def summed(*group: int, elements: int = 8, dtype: str = "float32", purpose: str = "undefined") -> Collective:
    """Return an all-reduce of a group."""
    return Collective("allreduce_", group, purpose, (elements,), dtype, -1)


def letter(kind: str, peer: int, elements: int = 8) -> Collective:
    """Return one end of a message between the ranks 0 and 2."""
    return Collective(kind, (0, 2), "pipeline up", (elements,), "float32", peer)


@pytest.mark.timeout(170)
def test_layouts_that_train_have_no_findings(often: dict[str, Recorded]) -> None:
    assert often.keys() == OFTEN.keys()
    for name, (plan, traces) in often.items():
        assert mismatches(plan, traces) == [], name
        assert stuck(plan, traces) == [], name
        assert all(list(trace.collectives) for trace in traces), name
    kinds = {each.kind for _, traces in often.values() for trace in traces for each in trace.vocabulary}
    assert kinds >= {"send", "recv_", "all_to_all_single", "_allgather_base_", "_reduce_scatter_base_", "allreduce_"}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("group", LONGER)
def test_more_layouts_have_no_findings_and_their_faults_have(group: str) -> None:
    for name, (plan, traces) in recorded({n: spec(n, *c) for n, c in LONGER[group].items()}).items():
        assert mismatches(plan, traces) == stuck(plan, traces) == [], name
        for fault, seed, mutant in mutants(traces, 3):
            assert faults_found(plan, mutant), (name, fault, seed)


def test_sixty_layouts_are_covered() -> None:
    assert sum(map(len, LONGER.values())) + len(OFTEN) >= 60


@pytest.mark.timeout(170)
def test_some_ranks_suffice_and_agree(often: dict[str, Recorded]) -> None:
    """Of ranks that were not executed nothing is judged."""
    for plan, traces in often.values():
        for left_out in traces:
            some = [trace for trace in traces if trace is not left_out]
            assert mismatches(plan, some) == stuck(plan, some) == []


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", PLANTED_IN)
def test_planted_faults_are_found(name: str, often: dict[str, Recorded]) -> None:
    """Each fault changes a real trace at a random place."""
    plan, traces = often[name]
    planted: Counter[str] = Counter()
    for fault, seed, mutant in mutants(traces, 12):
        assert faults_found(plan, mutant), (fault, seed, mutant.rank)
        planted[fault] += 1
    assert planted.total() >= 100


@pytest.mark.timeout(170)
def test_every_fault_was_planted(often: dict[str, Recorded]) -> None:
    planted = {fault for name in PLANTED_IN for fault, *_ in mutants(often[name][1], 1)}
    assert planted == set(FAULTS)


@pytest.mark.timeout(170)
def test_traces_survive_being_taken_apart(often: dict[str, Recorded]) -> None:
    """The lists from which mutants are made are those of the traces, so that a mutant differs by its fault only."""
    for _, traces in often.values():
        for trace in traces:
            again = trace_of(trace.rank, entries_of(trace))
            assert list(again.collectives) == list(trace.collectives)
            assert len(again.order) == len(trace.order)
    assert plant("send for receive", often["zero 2"][1], random.Random(0)) is None


def test_a_skipped_collective_is_named(plan: Plan) -> None:
    whole = [summed(0, 1, elements=each) for each in (8, 9, 10, 11)]
    (finding,) = found_in(plan, {0: [*whole], 1: [*whole[:1], *whole[2:]]})
    assert (finding.code, finding.number, finding.ranks) == ("PT592", 2, (0, 1))
    assert finding.places == (("parallel", "tensor"),)
    assert finding.message.startswith("rank 1 skips all_reduce of 9 elements of float32, which rank 0 issues")
    assert "exchange 2 of the group of ranks 0, 1" in finding.message


def test_most_ranks_are_right(plan: Plan) -> None:
    """Of four ranks the one that differs is named, whichever it is, and each of two that differ."""
    group = (0, 1, 2, 3)
    usual, other = [summed(*group), summed(*group, elements=3)], [summed(*group), summed(*group, elements=4)]
    for rank in group:
        (finding,) = found_in(plan, {each: [*(other if each == rank else usual)] for each in group})
        assert finding.code == "PT593"
        assert rank in finding.ranks
        assert f"rank {rank} issues all_reduce of 4 elements" in finding.message
        assert finding.places == (("parallel", "pipeline"), ("parallel", "tensor"))
    both = found_in(plan, {0: [*usual], 1: [*usual], 2: [usual[0]], 3: [*usual, usual[0]]})
    assert [(each.code, each.number, each.ranks) for each in both] == [("PT592", 2, (0, 2)), ("PT592", 3, (0, 3))]


def test_messages_meet_in_their_order(plan: Plan) -> None:
    sends = [letter("send", 2, elements) for elements in (5, 6, 7)]
    receives = [letter("recv_", 0, elements) for elements in (5, 6, 7)]
    assert found_in(plan, {0: [*sends], 2: [*receives]}) == []
    (finding,) = found_in(plan, {0: [*sends], 2: [receives[0], receives[2]]})
    assert (finding.code, finding.number, finding.places) == ("PT594", 2, (("parallel", "pipeline"),))
    assert finding.message.startswith("rank 0 issues send of 6 elements of float32 to rank 2, rank 2 has no receive")
    (finding,) = found_in(plan, {0: [*sends[:2]], 2: [*receives]})
    assert finding.message.startswith("rank 2 issues receive of 7 elements of float32 from rank 0, rank 0 sends noth")
    (finding,) = found_in(plan, {0: [sends[1], sends[0], sends[2]], 2: [*receives]})
    assert (finding.code, finding.number) == ("PT595", 1)
    assert found_in(plan, {0: [*sends]}) == [], "rank 2 was not executed"


def test_an_uneven_all_to_all(plan: Plan) -> None:
    def exchange(sent: tuple[int, int], received: tuple[int, int]) -> Collective:
        return Collective("all_to_all_single", (0, 1), "", (sum(sent),), "float32", -1, sent, received)

    first, second = exchange((3, 4), (3, 5)), exchange((5, 2), (4, 2))
    assert found_in(plan, {0: [first], 1: [second]}) == []
    (finding,) = found_in(plan, {0: [first, first], 1: [second, exchange((6, 2), (4, 2))]})
    assert (finding.code, finding.number) == ("PT593", 2)
    assert "rank 1 sends 6 elements to rank 0, which expects 5" in finding.message


def test_functional_operators_meet_those_that_also_take_their_output(plan: Plan) -> None:
    for functional, other, elements in (
        ("all_gather_into_tensor", "_allgather_base_", (16, 8)),
        ("reduce_scatter_tensor", "_reduce_scatter_base_", (4, 8)),
    ):
        one = Collective(functional, (0, 1), "", (8,), "float32", -1)
        assert found_in(plan, {0: [one], 1: [one._replace(kind=other, elements=elements)]}) == []
        (finding,) = found_in(plan, {0: [one], 1: [one._replace(kind=other, elements=(elements[0], 9))]})
        assert finding.code == "PT593"


def test_a_rank_outside_of_the_group(plan: Plan) -> None:
    (finding,) = found_in(plan, {3: [summed(0, 1)]})
    assert (finding.code, finding.ranks) == ("PT596", (3,))
    (finding,) = found_in(plan, {0: [letter("send", 0)]})
    assert "to itself" in finding.message
    (finding,) = found_in(plan, {0: [letter("send", 5)]})
    assert "rank 5 is not in the group of ranks 0, 2" in finding.message


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.data())
def test_one_missing_entry_is_told_from_one_that_differs(whole: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(whole) - 1))
    without = whole[:at] + whole[at + 1 :]
    found = divergence(whole, without)
    assert found is not None
    assert found.missing == 1
    assert whole[: found.at] + whole[found.at + 1 :] == without
    turned = divergence(without, whole)
    assert turned == Divergence(found.at, -1)
    assert divergence(whole, [*whole]) is None
    changed = [*whole[:at], 9, *whole[at + 1 :]]
    assert divergence(whole, changed) == Divergence(at, 0)
