"""The search: equal to exhaustive enumeration, deterministic, and monotone in memory and links."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from often import named

from partool.catalog.hardware import resolve_hardware
from partool.catalog.models import resolve_model
from partool.planner.explain import changes
from partool.planner.explain import reasons as explain
from partool.planner.explain.limits import limit
from partool.planner.forms.runnable import runnable
from partool.planner.problem import Problem, SearchBudget, divisors
from partool.planner.rules.table import check
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.dominance import dominated
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import _spread, layout_of
from partool.planner.search.leaves import Leaves
from partool.planner.search.price import Priced, bounds_s, host_limit
from partool.planner.search.solve import solve
from partool.spec.spec import Spec

ROOT = Path(__file__).parents[3]
GIB = 2**30
DENSE = {"layers": 6, "hidden": 1024, "heads": 16, "kv_heads": 8, "vocab": 32000, "ffn_hidden": 4096}
EXPERTS = {**DENSE, "layers": 4, "moe": {"experts": 8, "top_k": 2, "ffn_hidden": 2048}}


def problem_of(document: dict[str, Any]) -> Problem:
    spec = Spec.model_validate({"data": {"source": "python-stdlib"}, **document})
    model = resolve_model(spec.model, ROOT).config
    devices = resolve_hardware(spec.hardware, spec.training.precision, spec.limits.max_devices).devices
    assert model is not None
    assert devices is not None
    return Problem(spec, model, devices)


def case(
    model: dict[str, Any], nodes: int, per_node: int, *, memory_gib: float, batch: int, **parallel: Any
) -> dict[str, Any]:
    return {
        "model": model,
        "hardware": {"accelerator": "h100-sxm", "nodes": nodes, "per_node": per_node, "memory_gib": memory_gib},
        "training": {"sequence_length": 2048, "global_batch": batch},
        "parallel": parallel,
    }


ON_DEVICE = {"optimizer": "none", "parameters": "none", "activations": "none"}
EXHAUSTIVE: dict[str, dict[str, Any]] = {
    "one node": case(
        DENSE, 1, 4, memory_gib=4, batch=4, offload=ON_DEVICE, pipeline={"schedule": "1f1b"}, micro_batch=1, tensor=1,
        sequence={"method": "ulysses"},
    ),
    "offload": case(
        DENSE, 1, 4, memory_gib=3, batch=4, pipeline={"stages": 1}, sequence={"degree": 1}, micro_batch=1,
        recompute="full",
    ),
    "pipelines": case(
        DENSE, 1, 8, memory_gib=5, batch=32, offload=ON_DEVICE, tensor=1, recompute="selective", sequence={"degree": 1}
    ),
    "64 devices": case(
        DENSE, 8, 8, memory_gib=4, batch=128, offload=ON_DEVICE, recompute="none", micro_batch=1, data={"zero": 1},
        pipeline={"schedule": "1f1b"},
    ),
    "experts": case(
        EXPERTS, 2, 8, memory_gib=4, batch=32, offload=ON_DEVICE, pipeline={"stages": 2, "schedule": "1f1b"},
        recompute="full", sequence={"method": "ulysses"}, micro_batch=1,
    ),
}  # fmt: skip
LARGER: dict[str, dict[str, Any]] = {
    "micro-batches": case(DENSE, 1, 4, memory_gib=4, batch=4, offload=ON_DEVICE, pipeline={"schedule": "1f1b"}),
    "offload and recomputation": case(
        DENSE, 1, 4, memory_gib=3, batch=4, pipeline={"stages": 1}, sequence={"degree": 1}, micro_batch=1
    ),
    "schedules of 64 devices": case(
        DENSE, 8, 8, memory_gib=4, batch=128, offload=ON_DEVICE, recompute="none", micro_batch=1, data={"zero": 1}
    ),
    "micro-batches of experts": case(
        EXPERTS, 2, 8, memory_gib=4, batch=32, offload=ON_DEVICE, pipeline={"stages": 2, "schedule": "1f1b"},
        recompute="full", sequence={"method": "ulysses"},
    ),
}  # fmt: skip
"""Spaces for the longer suites."""
BOTH = [
    *named(EXHAUSTIVE, ["one node", "offload", "experts"]),
    *named(LARGER, []),
]


def every_layout(problem: Problem) -> list[Priced]:
    """Return the exact price of every layout of the space."""
    space = build(problem)
    found = []
    for group in range(space.size):
        policies = np.arange(len(space.policies))
        for policy in policies[space.allowed(np.full(len(policies), group), policies)]:
            found.append(Priced(problem, layout_of(problem, space.rows(group, policy))))
    return found


@pytest.mark.parametrize("document", BOTH)
def test_search_equals_exhaustive_enumeration(document: dict[str, Any]) -> None:
    problem = problem_of(document)
    solution = solve(problem)
    everything = every_layout(problem)
    fitting = [priced for priced in everything if priced.fits]
    assert len(everything) > 60
    assert 0 < len(fitting) < len(everything)
    winner = min(fitting, key=lambda priced: priced.score_s)
    assert solution.overall.best is not None
    assert solution.overall.best.score_s == pytest.approx(winner.score_s, rel=1e-12)
    able = [priced for priced in fitting if runnable(problem, priced.layout)]
    if able:
        assert solution.chosen is not None
        assert solution.chosen.score_s == pytest.approx(min(priced.score_s for priced in able), rel=1e-12)
        assert runnable(problem, solution.chosen.layout)
    assert solution.summary().simulated < len(everything)


@pytest.mark.parametrize("document", EXHAUSTIVE.values(), ids=EXHAUSTIVE)
def test_bounds_are_below_exact_times(document: dict[str, Any]) -> None:
    problem = problem_of(document)
    space = build(problem)
    rng = np.random.default_rng(0)
    group, policy = rng.integers(0, space.size, 80), rng.integers(0, len(space.policies), 80)
    allowed = space.allowed(group, policy)
    group, policy = group[allowed], policy[allowed]
    bounds = bounds_s(problem, space.rows(group, policy))
    for index, bound in enumerate(bounds):
        exact = Priced(
            problem,
            layout_of(problem, space.rows(group[index], policy[index])),
        )
        assert bound <= exact.time.step_time_s * (1.0 + 1e-9)


COUNTED: dict[str, dict[str, Any]] = {
    "pipelines": EXHAUSTIVE["pipelines"],
    "several nodes": EXHAUSTIVE["64 devices"],
    "experts": EXHAUSTIVE["experts"],
    "heads that do not divide": case(
        {**DENSE, "heads": 12, "hidden": 768, "kv_heads": 4},
        2,
        8,
        memory_gib=4,
        batch=32,
        micro_batch=1,
        recompute="none",
        offload=ON_DEVICE,
        pipeline={"schedule": "1f1b"},
        sequence={"method": "ulysses"},
    ),
    "waves": case(
        DENSE,
        1,
        4,
        memory_gib=4,
        batch=8,
        offload=ON_DEVICE,
        sequence={"degree": 1},
        pipeline={"stages": 2, "waves": 1},
    ),
    "weights travel": case(DENSE, 1, 4, memory_gib=8, batch=8, pipeline={"stages": 2, "schedule": "weipipe"}),
}


@pytest.mark.parametrize("document", COUNTED.values(), ids=COUNTED)
def test_enumeration_adds_up(document: dict[str, Any]) -> None:
    """The remaining and the pruned layouts together are the enumerated ones."""
    problem = problem_of(document)
    space = build(problem)
    policies = np.arange(len(space.policies))
    left = sum(
        int(((space.policies.parameters[policies] == 0) | (space.groups.zero[group] == 3)).sum())
        for group in range(space.size)
    )
    assert left + sum(space.pruned.values()) == space.enumerated
    mesh = space.groups
    assert (mesh.pp * mesh.replicas * mesh.shards * mesh.cp * mesh.tp == problem.world_size).all()
    batch = problem.spec.training.global_batch
    assert (mesh.micro_batch * mesh.accumulation * mesh.replicas * mesh.shards == batch).all()


LONGER = {"open waves": case(DENSE, 1, 4, memory_gib=4, batch=8, pipeline={"stages": 2, "waves": 1})}
LONGER |= {"schedules of several nodes": LARGER["schedules of 64 devices"]}


@pytest.mark.parametrize(
    "document",
    [
        *named(COUNTED, ["pipelines", "experts", "waves", "weights travel"]),
        *named(LONGER, []),
    ],
)
def test_no_layout_is_counted_twice(document: dict[str, Any]) -> None:
    """A layout is ruled out, priced once, or skipped because no similar layout can win."""
    for memory_gib in (2, 8):
        problem = problem_of({**document, "hardware": {**document["hardware"], "memory_gib": memory_gib}})
        counts = solve(problem).summary()
        assert counts.evaluated > 0 or sum(counts.pruned.values()) == counts.enumerated
        assert sum(counts.pruned.values()) + counts.evaluated <= counts.enumerated
        assert counts.fitting <= counts.evaluated


SIZES = (st.sampled_from([DENSE, EXPERTS]), st.sampled_from([4, 6, 8]), st.sampled_from([8, 24]), st.integers(0, 3))


@settings(max_examples=3, deadline=None, derandomize=True)
@given(*SIZES)
def test_more_memory_never_hurts_and_never_unfits(model: dict[str, Any], per_node: int, batch: int, zero: int) -> None:
    grows(model, per_node, batch, zero, pipeline={"schedule": "1f1b"}, compile="block")


@pytest.mark.long
@settings(max_examples=12, deadline=None, derandomize=True)
@given(*SIZES)
def test_more_memory_never_hurts_any_schedule(model: dict[str, Any], per_node: int, batch: int, zero: int) -> None:
    grows(model, per_node, batch, zero)


def grows(model: dict[str, Any], per_node: int, batch: int, zero: int, **pinned: Any) -> None:
    """Search one space for devices of more and more memory, of which the last has enough."""
    document = case(
        model, 1, per_node, memory_gib=1, batch=batch, data={"zero": zero}, tensor=1, micro_batch=1,
        sequence={"method": "ulysses"}, **pinned,
    )  # fmt: skip
    scores = []
    for size in (2.0, 3.5, 6.0, 40.0):
        document["hardware"]["memory_gib"] = size
        best = Search(problem_of(document), build(problem_of(document))).run().best
        scores.append(best.score_s if best is not None else float("inf"))
    assert all(more <= less * (1.0 + 1e-9) for less, more in pairwise(scores))
    assert scores[-1] < float("inf")


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from(["link_bytes_per_s", "fabric_bytes_per_s", "host_link_bytes_per_s", "pair_bytes_per_s"]),
    st.sampled_from([DENSE, EXPERTS]),
    st.sampled_from([1.5, 4.0]),
)
def test_a_faster_link_never_slows_a_plan(link: str, model: dict[str, Any], factor: float) -> None:
    document = case(model, 2, 4, memory_gib=8, batch=16, recompute="none", pipeline={"schedule": "1f1b"})
    slow = problem_of(document)
    speed = getattr(slow.devices, link) or 50e9
    slow = slow.on(**{link: speed})
    fast = slow.on(**{link: speed * factor})
    before, after = (Search(problem, build(problem)).run().best for problem in (slow, fast))
    assert before is not None
    assert after is not None
    assert after.score_s <= before.score_s * (1.0 + 1e-9)


def test_the_same_problem_gives_the_same_layout() -> None:
    problem = problem_of(EXHAUSTIVE["64 devices"])
    first, second = solve(problem), solve(problem)
    assert first.chosen is not None
    assert second.chosen is not None
    assert first.chosen.layout == second.chosen.layout
    assert first.summary() == second.summary()


def test_ties_go_to_the_simpler_layout() -> None:
    """If one device holds everything, nothing is sharded or split, even if other layouts tie."""
    tiny = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 256}
    best = solve(problem_of(case(tiny, 1, 1, memory_gib=40, batch=8))).chosen
    assert best is not None
    assert (best.layout.data.zero, best.layout.mesh.world_size, set(best.layout.recompute)) == (0, 1, {"none"})


@given(st.integers(1, 10**6))
def test_divisors(number: int) -> None:
    found = divisors(number)
    assert found[0] == 1
    assert found[-1] == number
    assert found == sorted({n for n in found if number % n == 0})


ODD_WORLDS = {
    "a prime": (127, 1, 127),
    "twice a prime": (1009, 2, 2018),
    "half a million": (62_500, 8, 500_000),
    "many divisors": (45_045, 8, 360_360),
}


@pytest.mark.parametrize(("nodes", "per_node", "batch"), named(ODD_WORLDS, ["a prime", "half a million"]))
def test_odd_worlds_end_quickly(nodes: int, per_node: int, batch: int) -> None:
    document = case(DENSE, nodes, per_node, memory_gib=80, batch=batch, offload=ON_DEVICE)
    problem = problem_of(document)
    assert not [finding for finding in check(problem, None) if finding.severity == "error"]
    assert build(problem).size < 700_000
    best = solve(problem).chosen
    assert best is not None
    assert best.layout.mesh.world_size == nodes * per_node


def test_a_search_ends_at_its_limit_of_work_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass computes a limited number of rows and exact prices; the best layout found by then is the plan."""
    problem = problem_of({**case(DENSE, 1, 4, memory_gib=8, batch=16), "limits": {"prefer": "fastest"}})
    whole = solve(problem)
    assert whole.overall.complete
    monkeypatch.setattr("partool.planner.search.branch_and_bound._MOST_ROWS", whole.problem.budget.rows // 3)
    short = solve(replace(problem, budget=SearchBudget()))
    assert not short.overall.complete
    assert short.chosen is not None
    assert short.problem.budget.rows < whole.problem.budget.rows
    for one, ended in ((short, True), (whole, False)):
        assert one.chosen is not None
        reasons = explain.reasons(one, one.chosen, one.summary(), (), limit(one, one.chosen))
        assert ("before its limit of work" in reasons[0]) == ended


def test_proposals_end_at_their_limit_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each changed spec is searched; if that takes long, fewer changes are proposed."""
    problem = problem_of(case(DENSE, 1, 1, memory_gib=0.5, batch=4, offload=ON_DEVICE, tensor=1))
    tried = [text for text, _ in changes.single_changes(problem)]
    assert len(tried) > 1
    monkeypatch.setattr("partool.planner.explain.changes._MOST_ROWS", 0)
    assert list(changes.single_changes(replace(problem, budget=SearchBudget()))) == []


def test_a_share_of_layers_recomputes_on_each_rank_in_its_first_stages() -> None:
    """Three stages of one layer on each of two ranks: a third of the ranks' layers is one layer, in the first stage."""
    bounds = tuple((at, at + 1) for at in range(6))
    assert _spread("full", 1 / 3, bounds, (0, 1, 0, 1, 0, 1)) == ("full", "full", "none", "none", "none", "none")
    assert _spread("full", 0.5, bounds, (0, 1, 0, 1, 0, 1)) == ("full", "full", "full", "full", "none", "none")
    folded = ((0, 3), (3, 4), (4, 6))
    assert _spread("full", 0.25, folded, (0, 1, 0)) == ("full", "full", "none", "full", "none", "none")
    assert _spread("full", 1.0, folded, (0, 1, 0)) == ("full",) * 6


def test_a_layout_near_a_limit_of_the_host_rules_out_no_other() -> None:
    """Of two policies of one group the first is faster and milder; it must be sure to fit device and host."""
    document = case(DENSE, 1, 4, memory_gib=8, batch=16)
    stated = problem_of({**document, "hardware": {**document["hardware"], "host_memory_gib": 256}})
    for problem, half in ((stated, True), (problem_of(document), False)):
        search = Search(problem, build(problem))
        stays = np.flatnonzero(search.space.policies.recompute == 0)[0]
        policy = np.array([stays, np.flatnonzero(search.space.policies.recompute > 0)[0]])
        group = np.full(2, np.flatnonzero(np.asarray(search.space.groups.pp) == 1)[0])
        # Half of an assumed host may be pinned, and closed equations of pinned memory err.
        for share, ruled_out in ((0.0, True), (0.5, half), (0.99, False)):
            host = np.full(2, share * host_limit(problem))
            leaves = Leaves(group, policy, np.array([1.0, 2.0]), np.ones(2), np.ones(2), host)
            out = dominated(problem, search.space, leaves, np.ones(2, dtype=bool))
            assert out.tolist() == [False, ruled_out], (share, half)
