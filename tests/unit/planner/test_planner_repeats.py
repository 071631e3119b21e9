"""Prices of many layouts at once are those of the same layouts in other batches, to the last bit."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import planned
import pytest

from partool.cost.case import RECOMPUTE, Layouts
from partool.cost.time import layer
from partool.cost.training import peak
from partool.cost.training.micro import Micro, micro
from partool.cost.training.peak import Memory, peak_memory
from partool.planner.cost_job import cost_job
from partool.planner.explain import front
from partool.planner.forms.gathers import under_pressure
from partool.planner.problem import Problem
from partool.planner.search import refine
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build, rebuilt
from partool.planner.search.layouts import splits, variant_costs
from partool.planner.search.leaves import SearchResult
from partool.planner.search.refine import refined
from partool.planner.search.solve import Solution, _bounds_in, harder_ones, solve

EXPERTS = """
model: {layers: 13, hidden: 1024, heads: 8, kv_heads: 8, ffn_hidden: 1024, vocab: 512, max_position: 8192,
  moe: {experts: 8, top_k: 2, ffn_hidden: 1024, first_dense_layers: 3}}
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 4}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 32}
"""
DENSE = """
model: {layers: 6, hidden: 512, heads: 8, kv_heads: 8, ffn_hidden: 1024, vocab: 512, max_position: 8192}
hardware: {accelerator: h100-sxm, nodes: 1, per_node: 8}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 32ADVERSARIAL}
"""


def rows_of(problem: Problem, count: int) -> Layouts:
    """Return every n-th of the layouts of a problem's space, ``count`` of them or a few more."""
    space = build(problem)
    group, policy = (index.ravel() for index in np.indices((space.size, len(space.policies))))
    allowed = np.flatnonzero(space.allowed(group, policy))
    some = allowed[:: max(1, len(allowed) // count)]
    return space.rows(group[some], policy[some])


def as_columns(memory: Memory, count: int) -> np.ndarray:
    every = [*memory.terms.values(), *memory.host_terms.values(), memory.total_bytes]
    every += [getattr(memory, name) for name in peak._COLUMNS]
    return np.stack([np.broadcast_to(column, count) for column in every])


@pytest.mark.parametrize("spec", [EXPERTS, DENSE.replace("ADVERSARIAL", "")])
def test_memory_of_pieces_is_that_of_all_and_of_single_layouts(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = planned.problem_of(spec)
    rows = rows_of(problem, 90)
    (count,), job = rows.shape, cost_job(problem)
    at_once = as_columns(peak_memory(job, rows), count)
    monkeypatch.setattr(peak, "_AT_ONCE", 7)
    assert (as_columns(peak_memory(cost_job(problem), rows), count) == at_once).all()
    for at in range(0, count, 10):
        assert as_columns(peak_memory(job, rows.take(at)), 1)[:, 0].tolist() == at_once[:, at].tolist()


def seconds_of(costs: Micro, count: int) -> np.ndarray:
    units = (*costs.layers.values(), costs.first, costs.last)
    names = [one.name for one in fields(units[0]) if one.name != "exposed"]
    every = [getattr(unit, name) for unit in units for name in names]
    every += [column for unit in units for column in unit.exposed.values()]
    return np.stack([np.broadcast_to(column, count) for column in every])


@pytest.mark.parametrize("adversarial", ["", ", adversarial: {epsilon: 0.01}"])
def test_layouts_that_recompute_differently_share_the_prices_of_passes(
    adversarial: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = EXPERTS if not adversarial else DENSE.replace("ADVERSARIAL", adversarial)
    problem = planned.problem_of(spec)
    priced: list[int] = []
    alone = layer._priced

    def counted(job: object, layouts: Layouts, *rest: object) -> object:
        priced.append(layouts.shape[0] if layouts.shape else 1)
        return alone(job, layouts, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(layer, "_priced", counted)
    rows, shared = rows_of(problem, 600), []
    for few in (10**9, 1):
        monkeypatch.setattr(layer, "_FEW", few)
        priced.clear()
        job = replace(cost_job(problem))
        shared.append((seconds_of(micro(job, rows), rows.shape[0]), sum(priced)))
    (without, all_rows), (with_shares, fewer_rows) = shared
    assert (without == with_shares).all()
    assert fewer_rows < 0.8 * all_rows
    # Of single layouts, all policies together price each kind's passes once.
    priced.clear()
    job, single = replace(cost_job(problem)), rows.take(0)
    kinds = len(micro(job, single).layers)
    for policy in range(len(RECOMPUTE)):
        micro(job, single.with_columns(recompute=policy, recompute_share=0.5))
    assert len(priced) == kinds


def test_second_bounds_count_the_layers_of_equal_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = planned.problem_of(EXPERTS)
    rows = rows_of(problem, 4000)
    first = np.flatnonzero((rows.pp == 2) & (rows.chunks == 1) & (rows.schedule == 1))
    rows = rows.take(first[:60])
    counted: list[object] = []
    alone = refine._counts

    def counted_once_more(*case: Any) -> Any:
        counted.append(case)
        return alone(*case)

    monkeypatch.setattr(refine, "_counts", counted_once_more)
    bounds = refined(problem, rows).bound_s
    assert 0 < len(counted) < len(bounds) / 2
    for at in range(0, len(bounds), 20):
        row = rows.take(np.array([at]))
        assert refined(problem, row).bound_s[0] == bounds[at]
        assert (
            splits(problem, row, variant_costs(problem, row))
            == splits(problem, rows, variant_costs(problem, rows))[at : at + 1]
        )


def test_columns_are_replaced_by_name() -> None:
    layouts = Layouts(tp=np.array([1, 2]), cp=4)
    assert layouts.with_columns(tp=8, zero=3) == replace(layouts, tp=8, zero=3)
    with pytest.raises(TypeError, match="zero_stage"):
        layouts.with_columns(zero_stage=3)


def test_the_front_leaves_out_only_layouts_that_are_beaten(monkeypatch: pytest.MonkeyPatch) -> None:
    solution = solve(planned.problem_of(EXPERTS))
    monkeypatch.setattr(front, "_SMALLEST", solution.space.size)
    every = [(one.step_time_s, one.memory.total_bytes) for one in front.front(solution)]
    monkeypatch.setattr(front._SmallestLayouts, "bytes_within", lambda _, times_s: np.full(np.shape(times_s), np.inf))
    assert [(one.step_time_s, one.memory.total_bytes) for one in front.front(solution)] == every
    assert len(every) > 2


def test_a_limit_and_bounds_that_are_shared_change_no_layout_of_least_bound() -> None:
    problem = planned.problem_of(EXPERTS)
    alone = front.least_bound(problem)
    assert alone is not None
    for bounded in (None, solve(problem).plain.search):
        for longest_s in (float("inf"), alone.step_time_s):
            least = front.least_bound(problem, bounded, longest_s=longest_s)
            assert least is not None
            assert least.layout == alone.layout
    slower = front.least_bound(problem, longest_s=0.9 * alone.step_time_s)
    assert slower is None or slower.step_time_s > 0.9 * alone.step_time_s
    assert front.least_bound(problem, longest_s=0.2 * alone.step_time_s) is None


def test_bounds_are_shared_by_equal_groups_of_two_spaces() -> None:
    plain = solve(planned.problem_of(EXPERTS))
    smaller = planned.problem_of(EXPERTS.replace("global_batch: 32", "global_batch: 32, precision: bf16"))
    space, here_s = build(smaller), np.where(np.isfinite(b := plain.search.bound_s), b, 0.0)
    shared_s = _bounds_in(space, plain)
    assert (shared_s <= here_s).all()
    # Groups whose tensor ranks share norms come with and without compiled blocks; others come once.
    once = np.broadcast_to((space.groups.sequence_norms == 0) | (space.groups.tp == 1), space.size)
    assert (shared_s == here_s)[once].all()
    assert once.any()
    other = build(planned.problem_of(EXPERTS.replace("global_batch: 32", "global_batch: 48")))
    assert not _bounds_in(other, plain)[np.broadcast_to(other.groups.accumulation % 3 == 0, other.size)].any()


def test_a_relaxed_space_is_that_of_its_own_enumeration() -> None:
    problem = planned.problem_of(EXPERTS.replace("vocab: 512", "vocab: 640000"))
    space, relaxed = build(problem), set()
    for harder in harder_ones(problem):
        fresh, quick = build(harder), rebuilt(harder, space)
        relaxed |= harder.relaxed
        assert quick.size == fresh.size
        for name, column in fresh.groups.__dict__.items():
            assert np.array_equal(getattr(quick.groups, name), column), name
    assert relaxed == {"gathers", "tiles"}


def test_bounds_of_a_plain_space_hold_and_are_close_with_gathers_that_need_least_memory() -> None:
    problem = planned.problem_of(EXPERTS)
    harder = under_pressure(problem)
    assert harder is not None
    space, search = build(harder), Search(problem, build(problem))
    search.bound()
    shared_s = _bounds_in(space, Solution(problem, search.space, search, SearchResult(None), None))
    groups = np.flatnonzero((shared_s > 0.0) & (np.asarray(space.groups.pp) == 1))
    groups = groups[np.linspace(0, len(groups) - 1, 24).astype(int)]
    exact_s = np.array([Search(harder, space).price(int(group), 0).step_time_s for group in groups])
    assert 0.995 < (shared_s[groups] / exact_s).max() <= 1.0 + 1e-9
