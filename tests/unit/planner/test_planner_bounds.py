"""Random problems: no bound is above the exact time, and the search finds what pricing every layout finds."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import planned
import pytest
import yaml
from _bounds import CLOSE, LAYOUTS, above
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import document, narrowed, problem_of

from partool.cost.case import CAPPED, SCHEDULES
from partool.cost.training.peak import least_memory, least_memory_of_passes
from partool.planner.cost_job import cost_job
from partool.planner.problem import Problem
from partool.planner.search import enumeration, stages
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import Priced, room, room_below
from partool.planner.search.refine import refined
from partool.planner.search.space import Space


@pytest.fixture(autouse=True)
def _parts_of_small_spaces_are_searched_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_LEAST", 0)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_no_bound_is_above_the_exact_time(seed: int) -> None:
    assert above(problem_of(document(Random(seed).choice)), seed, LAYOUTS) == []


LAYERS_DIFFER = """
model: {layers: 13, hidden: 1024, heads: 8, kv_heads: 8, ffn_hidden: 1024, vocab: 512, max_position: 8192,
  moe: {experts: 8, top_k: 2, ffn_hidden: 1024, first_dense_layers: 3}}
hardware: {accelerator: h100-sxm, per_node: 8}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 64}
parallel: {tensor: 1, sequence: 1, expert: 1, pipeline: {stages: 4}, recompute: RECOMPUTE, offload: {optimizer: none,
  activations: none, parameters: none}, tiles: {mlp: 0, loss: 0}}
"""


@pytest.mark.parametrize(("recompute", "least"), [("none", (0.81, 0.98)), ("auto", (0.80, 0.92))])
def test_bounds_of_layers_that_differ_are_close_and_below_the_exact_time(
    recompute: str, least: tuple[float, float]
) -> None:
    """Of ten layers with experts, three of four ranks have three at least: one waits for the passes of two others."""
    problem = planned.problem_of(LAYERS_DIFFER.replace("RECOMPUTE", recompute))
    space = build(problem)
    random = np.random.default_rng(0)
    group, policy = random.integers(0, space.size, 200), random.integers(0, len(space.policies), 200)
    kept = space.allowed(group, policy)
    group, policy = group[kept], policy[kept]
    first = Search(problem, space).bounds(group, policy)
    pairs = zip(group, policy, strict=True)
    exact = np.array([Priced(problem, layout_of(problem, space.rows(*pair))).step_time_s for pair in pairs])
    assert np.all(first <= exact * CLOSE)
    schedules = np.asarray(space.groups.schedule)[group]
    close = [np.median((first / exact)[schedules == SCHEDULES.index(name)]) for name in ("1f1b", "gpipe")]
    assert np.all(np.array(close) > least)


def wrong_on_memory(problem: Problem, seed: int, count: int) -> tuple[list[str], int]:
    """Return a line for each random pipelined layout whose batched verdict on device memory is not the exact one.

    The second value is the number of layouts that were compared.
    """
    space = build(problem)
    plain = problem.lists is None and not isinstance(problem.spec.parallel.recompute, list)
    pipelined = np.flatnonzero((np.broadcast_to(space.groups.pp, space.size) > 1) & ~space.groups.ring)
    if not len(pipelined) or not plain:
        return [], 0
    random, wrong, seen = np.random.default_rng(seed), [], 0
    for one in random.choice(pipelined, 2):
        names = ("schedule", "pp", "chunks", "in_flight", "accumulation")
        alike = np.all([getattr(space.groups, name) == getattr(space.groups, name)[one] for name in names], axis=0)
        group, policy = random.choice(np.flatnonzero(alike), count), random.integers(0, len(space.policies), count)
        kept = space.allowed(group, policy)
        group, policy = group[kept], policy[kept]
        if not len(group):
            continue
        second = refined(problem, space.rows(group, policy))
        verdicts = zip(second.fits, second.total_bytes, second.unfit, strict=True)
        for pair, (verdict, total, unfit) in zip(zip(group, policy, strict=True), verdicts, strict=True):
            priced = Priced(problem, layout_of(problem, space.rows(*pair)))
            memory = priced.memory
            exact = memory.total_bytes <= memory.capacity_bytes
            # The activations that searched schedules hold are only bounded.
            right = verdict >= exact if space.groups.schedule[one] in CAPPED else verdict == exact
            right &= total <= memory.total_bytes and unfit <= priced.unfit + 1e-6
            wrong += [] if right else [f"{pair}: {memory.total_bytes} of {memory.capacity_bytes}"]
            seen += 1
    return wrong, seen


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 80), marks=pytest.mark.long)])
def test_batched_memory_is_the_exact_memory(seeds: range) -> None:
    wrong, seen = [], 0
    for seed in seeds:
        found, count = wrong_on_memory(problem_of(document(Random(seed).choice)), seed, LAYOUTS)
        wrong, seen = wrong + found, seen + count
    assert wrong == []
    assert seen > len(seeds)


@pytest.mark.long
@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.integers(0, 10**6))
def test_no_bound_of_many_problems_is_above_the_exact_time(seed: int) -> None:
    assert above(problem_of(document(Random(seed).choice)), seed, 3 * LAYOUTS) == []


def test_layouts_that_are_not_priced_are_too_large() -> None:
    """The bytes that rule layouts out, before all moments of a step are priced, are never more than the whole."""
    ruled_out = by_passes = 0
    for seed in range(40):
        problem = problem_of(document(Random(seed).choice))
        space, random = build(problem), np.random.default_rng(seed)
        if not space.size:
            continue
        compiled = np.broadcast_to(np.asarray(space.groups.compiled), space.size)
        alike = np.flatnonzero(compiled == compiled[seed % space.size])
        rows = space.rows(random.choice(alike, 200), random.integers(0, len(space.policies), 200))
        job = cost_job(problem, "block" if compiled[alike[0]] else "none")
        whole, state = room(problem, rows), np.broadcast_to(least_memory(job, rows), 200)
        total = np.broadcast_to(whole.total_bytes, 200)
        assert np.all(state <= total)
        if not isinstance(problem.spec.parallel.recompute, list):
            device, host = least_memory_of_passes(job, rows)
            assert np.all(device <= total)
            assert np.all(host <= whole.host_bytes * CLOSE)
            unkept = least_memory_of_passes(replace(job), rows, keep=False)
            assert np.array_equal(unkept, (device, host))
            by_passes += int(np.sum(device > state))
        most, most_host = np.quantile(total, 0.3), float(np.quantile(whole.host_bytes, 0.9, method="lower"))
        below = np.broadcast_to(room_below(problem, rows, most).total_bytes, 200)
        assert np.array_equal(below <= most, total <= most)
        ruled_out += int(np.sum(below != total))
        both = room_below(problem, rows, most, most_host)
        fits = (both.total_bytes <= most) & (both.host_bytes <= most_host)
        assert np.array_equal(fits, (total <= most) & (whole.host_bytes <= most_host))
    assert ruled_out > 0
    assert by_passes > 0


SIZES = "layers: 4, hidden: 1024, heads: 8, kv_heads: 2, ffn_hidden: 4096, vocab: 32000, max_position: 8192"
ENGINE = f"""
engine: ENGINE
model: {{{SIZES}}}
hardware: {{accelerator: h100-sxm, nodes: 2, per_node: 3, fabric: ethernet-100g}}
data: python-stdlib
training: {{sequence_length: 256, global_batch: 24}}
parallel: {{pipeline: {{stages: 1}}}}
"""


@pytest.mark.parametrize("engine", ["megatron", "deepspeed"])
def test_bounds_of_groups_hold_where_collectives_hide_the_host(engine: str) -> None:
    problem = planned.problem_of(ENGINE.replace("ENGINE", engine))
    assert above(problem, 0, 50) == []


def test_gradients_in_transfer_are_no_memory_of_a_cpu() -> None:
    made = {
        "model": {**yaml.safe_load(f"{{{SIZES}}}"), "hidden": 4096, "ffn_hidden": 16384},
        "hardware": {"accelerator": "cpu", "per_node": 1, "memory_gib": 64},
        "training": {"sequence_length": 256, "global_batch": 32, "precision": "fp32"},
        "parallel": {"offload": {"optimizer": "cpu", "gpu_fraction": 0.99}, "micro_batch": 1, "compile": "none"},
    }
    problem = problem_of(made)
    space = build(problem)
    group, policy = (part.ravel() for part in np.indices((space.size, len(space.policies))))
    rows = space.rows(group, policy)
    least, _ = least_memory_of_passes(cost_job(problem), rows)
    assert np.all(least <= room(problem, rows).total_bytes)


def test_of_a_list_of_policies_the_one_that_needs_least_memory_decides() -> None:
    made = {
        "model": yaml.safe_load(f"{{{SIZES}}}"),
        "hardware": {"accelerator": "h100-sxm", "per_node": 1},
        "training": {"sequence_length": 4096, "global_batch": 8, "precision": "bf16"},
        "parallel": {"recompute": ["none", "full", "none", "full"], "micro_batch": 8, "offload": "none"},
    }
    problem = problem_of(made)
    rows = build(problem).rows(np.arange(1), np.zeros(1, dtype=int))
    (total,) = np.broadcast_to(room(problem, rows).total_bytes, 1)
    assert least_memory_of_passes(cost_job(problem), rows)[0] > total, "else nothing is tested"
    assert room_below(problem, rows, total).total_bytes == total


def test_a_large_space_has_degrees_of_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its groups and counts are those of the smaller space alone, however many of all groups were listed before."""
    made = {
        "model": yaml.safe_load(f"{{{SIZES}}}"),
        "hardware": {"accelerator": "h100-sxm", "nodes": 3, "per_node": 4},
        "training": {"sequence_length": 1024, "global_batch": 24, "precision": "bf16"},
        "parallel": {},
    }
    whole = build(problem_of(made))
    monkeypatch.setattr(enumeration, "MANY", whole.size // 2)
    some = build(problem_of(made))
    assert {*np.asarray(some.groups.pp).tolist()} < {*np.asarray(whole.groups.pp).tolist()}
    assert all(count & (count - 1) == 0 for count in np.asarray(some.groups.pp).tolist())
    monkeypatch.setattr(enumeration, "MANY", 0)
    fewer = build(problem_of(made))
    assert (some.size, some.enumerated, some.pruned) == (fewer.size, fewer.enumerated, fewer.pruned)
    monkeypatch.setattr(enumeration, "MANY", whole.size)
    again = build(problem_of(made))
    assert (again.size, again.enumerated, again.pruned) == (whole.size, whole.enumerated, whole.pruned)


def prices(problem: Problem, space: Space) -> list[Priced]:
    """Return the exact price of every layout."""
    policies = np.arange(len(space.policies))
    pairs = np.argwhere(space.allowed(np.arange(space.size)[:, None], policies[None, :]))
    return [Priced(problem, layout_of(problem, space.rows(*pair))) for pair in pairs]


def best_of(every: list[Priced]) -> Priced | None:
    """Return the layout with the least score among those that are predicted to fit."""
    return min((priced for priced in every if priced.fits), key=lambda priced: priced.score_s, default=None)


def check_winner(seed: int, most: int) -> None:
    """Compare the search's best layout, by score and on paper, with all layouts of a random problem."""
    pick, problem = Random(seed).choice, None
    while problem is None:
        problem = narrowed(pick, document(pick), most)
    space = build(problem)
    every, shared = prices(problem, space), Search(problem, space)
    best, winner = best_of(every), shared.run().best
    assert (best is None) == (winner is None)
    if best is None or winner is None:
        return
    assert winner.score_s == pytest.approx(best.score_s, rel=1e-9)
    paper = Search(problem, space, shared=shared, proven=False).run().best
    assert paper is not None
    assert paper.paper_s == pytest.approx(min(one.paper_s for one in every if one.fits), rel=1e-9)
    near = Search(problem, space, shared=shared, gap=0.05).run().best
    assert near is not None
    assert near.score_s <= best.score_s / 0.95 * CLOSE


SLOW = (3, 4, 5, 7, 8, 9, 11)
"""Seeds of problems with many layouts that take long to price."""


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.long] if seed in SLOW else []) for seed in range(3, 13)]
)
def test_the_winner_is_the_best_of_all_layouts(seed: int) -> None:
    check_winner(seed, most=300)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 140))
def test_the_winner_of_a_larger_space_is_the_best_of_all_layouts(seed: int) -> None:
    check_winner(seed, most=1500)


SLOW_LINKS = """
model: {layers: 32, hidden: 2048, heads: 16, kv_heads: 16, ffn_hidden: 8192, vocab: 512, max_position: 8192}
hardware: {accelerator: a100-80, nodes: 8, per_node: 1, fabric: ethernet-25g}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 64}
parallel: {tensor: 1, sequence: 1, pipeline: {stages: 8, schedule: SCHEDULE, chunks: CHUNKS}, recompute: none,
  offload: {optimizer: none, activations: none, parameters: none}}
"""


@pytest.mark.parametrize(
    ("schedule", "chunks", "first", "second"), [("1f1b", 1, 0.9999, 0.9999), ("interleaved", 4, 0.7, 0.9)]
)
def test_bounds_count_transfers_that_micro_batches_wait_for(
    schedule: str, chunks: int, first: float, second: float
) -> None:
    """Over slow links a rank has as many micro-batches in flight as the schedule allows, and waits for the first."""
    problem = planned.problem_of(SLOW_LINKS.replace("SCHEDULE", schedule).replace("CHUNKS", str(chunks)))
    space = build(problem)
    search, groups = Search(problem, space), np.arange(space.size)
    prices = [search.price(group, 0) for group in range(space.size)]
    groups = groups[[one.terms_s["pipeline_bubble"] > 0.3 * one.step_time_s for one in prices]]
    exact_s = np.array([prices[group].step_time_s for group in groups])
    policy = np.zeros(1, dtype=int)
    second_s = [refined(problem, space.rows(np.array([group]), policy)).bound_s[0] for group in groups]
    for bound_s, least in ((search.bounds(groups, 0 * groups), first), (np.array(second_s), second)):
        assert least < (bound_s / exact_s).max() <= CLOSE


def test_passes_alone_are_a_bound_of_groups() -> None:
    problem = planned.problem_of(LAYERS_DIFFER.replace("RECOMPUTE", "auto").replace("{stages: 4}", "auto"))
    space = build(problem)
    search, groups = Search(problem, space), np.arange(space.size)
    share = search.pass_bounds(groups) / search.group_bounds(groups)
    ring = np.asarray(space.groups.ring)
    assert share.max() <= CLOSE
    assert share[~ring].max() > 0.992
    assert (share[ring] == 0).all()
