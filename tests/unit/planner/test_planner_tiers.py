"""Tiers of evidence: textbook layouts first, others where they are needed, asked for or clearly faster."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from often import often
from planned import plan_of, problem_of, spec_of

from partool.cost.evidence import PAIRED_FLOOR, paired_error
from partool.planner.evidence import ABOVE_TIER_0, margin, taken_for_granted, tier_of
from partool.planner.explain import comparison
from partool.planner.explain.candidates import fewer_devices
from partool.planner.explain.reasons import limit
from partool.planner.queries import smallest_cluster
from partool.planner.search.enumeration import build
from partool.planner.search.price import PINNED_SHARE, pinned_limit
from partool.planner.search.solve import solve
from partool.planner.search.tiers import group_tiers, is_small, least_margin, policy_tiers
from partool.spec.numbers import GIB

LARGE = """\
model: llama3-70b
hardware: {accelerator: h100-sxm, nodes: 8}
data: python-stdlib
training: {sequence_length: 8192, global_batch: 512}
"""
ONE = """\
model: llama3-8b
hardware: {accelerator: gh200-96, per_node: 1}
data: python-stdlib
training: {sequence_length: 4096, global_batch: 16}
"""


NONE: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    """Solutions of one problem by evidence and by time alone."""
    proven, fastest = problem_of(LARGE), problem_of(LARGE, "limits.prefer=fastest")
    return solve(proven), solve(fastest)


def test_a_textbook_layout_is_taken_within_the_error(both: tuple[Any, Any]) -> None:
    proven, fastest = (solution.chosen for solution in both)
    assert tier_of(proven.layout, NONE) == 0
    assert proven is both[0].tiered.textbook
    assert tier_of(fastest.layout, NONE) > 0
    assert fastest.time.step_time_s < proven.time.step_time_s
    assert proven.time.step_time_s <= fastest.time.step_time_s * (1.0 + margin(fastest.layout, proven.layout))
    assert margin(fastest.layout, proven.layout) == 2.0 * PAIRED_FLOOR


def test_tiers_hold_the_best_of_each(both: tuple[Any, Any]) -> None:
    """The tiers' bests are of their tier, and none of them is faster than the search by time alone."""
    least = both[1].chosen.time.step_time_s
    for tier, priced in enumerate(both[0].tiered.by_tier):
        if priced is not None:
            assert tier_of(priced.layout, NONE) == tier
            assert priced.time.step_time_s >= least * (1.0 - 1e-9)


def test_every_tier_has_a_layout_beside_the_plan(both: tuple[Any, Any]) -> None:
    """Higher tiers that could not win are glanced at: the table shows a good layout of each."""
    assert all(one is not None and one.safe for one in both[0].tiered.by_tier)


def test_a_layout_that_may_not_fit_does_not_keep_out_one_that_does() -> None:
    """Without host memory 32B parameters barely fit in eight H100; with the optimizer there, they surely do."""
    spec = LARGE.replace("llama3-70b", "qwen3-32b").replace("nodes: 8", "nodes: 1").replace("512}", "64}")
    solution = solve(problem_of(spec))
    first = solution.tiered.by_tier[0]
    assert first is not None
    assert not first.safe
    assert solution.chosen.safe
    assert solution.chosen.step_time_s * (1.0 + least_margin()) > first.step_time_s, "the margin is not asked for"


def test_a_higher_tier_is_taken_where_no_other_fits() -> None:
    """8B parameters take 120 GiB of state, a GH200 has 96: the optimizer goes to the host, and nothing else does."""
    solution = solve(problem_of(ONE))
    assert solution.chosen is not None
    assert tier_of(solution.chosen.layout, NONE) == 2
    assert solution.tiered.by_tier[:2] == (None, None)


ASKED = [
    ("parallel.sequence.degree=2", 1), ("parallel.pipeline={stages: 2, schedule: zb-h1}", 1),
    ("parallel.offload.activations=cpu", 3), ("parallel.offload.optimizer=cpu", 2),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), often(ASKED, ASKED[1:2]))
def test_what_the_spec_asks_for_counts_for_nothing(change: str, expected: int) -> None:
    problem = problem_of(LARGE, change)
    space = build(problem)
    assert group_tiers(problem, space.groups, space.size).min() == 0
    assert policy_tiers(problem, space.policies).min() == 0
    chosen = solve(problem).chosen
    assert chosen is not None
    assert tier_of(chosen.layout, NONE) == expected
    assert tier_of(chosen.layout, problem.granted) == 0


def test_a_pinned_schedule_is_used_where_it_is_faster() -> None:
    """The schedule that the spec asks for is not held against pipelines beside layouts without pipeline."""
    problem = problem_of(LARGE, "parallel={pipeline: {schedule: zb-h1}, compile: none}")
    space = build(problem)
    assert (space.groups.pp > 1).any()
    tiers = group_tiers(problem, space.groups, space.size)
    plain = (space.groups.cp == 1) & (space.groups.tensor_inner == 1)
    assert (tiers[plain] == 0).all()
    assert (tiers[~plain] == 1).all()


def test_long_sequences_may_be_shared_by_ranks() -> None:
    long = problem_of(LARGE, "training.sequence_length=65536", "training.global_batch=64")
    space = build(long)
    shared = (space.groups.cp > 1) & (space.groups.pp == 1) & (space.groups.tensor_inner == 1)
    tiers = group_tiers(long, space.groups, space.size)[shared]
    assert set(tiers.tolist()) <= {0, 1}
    assert (tiers == 0).any()


def test_what_has_to_be_gained_is_at_least_what_higher_tiers_are_searched_below() -> None:
    assert least_margin() == 2.0 * min(paired_error([name]) for name in ABOVE_TIER_0)
    assert least_margin() > 0.0


def test_models_are_small_by_their_state() -> None:
    """18 bytes for each of 16 billion parameters are 45 % of a node of eight devices with 79 GiB."""
    assert is_small(problem_of(ONE, "hardware={accelerator: h100-sxm}"))
    assert not is_small(problem_of(LARGE))
    assert not is_small(problem_of(ONE))


def test_half_of_an_assumed_host_is_pinned_at_most() -> None:
    problem = problem_of(ONE)
    assert problem.devices.host_memory_bytes is not None
    assert pinned_limit(problem) == PINNED_SHARE * problem.devices.host_memory_bytes
    assert pinned_limit(problem_of(ONE, "hardware.host_memory_gib=480")) == float("inf")
    assert pinned_limit(problem_of(ONE, "parallel.offload.pinned_gib=10")) == 10 * GIB


def test_assumed_hosts_are_named() -> None:
    plan = plan_of(ONE)
    assert any(reason.startswith("Host assumed") and "480 GiB" in reason for reason in plan.reasons)
    stated = (
        "hardware={accelerator: gh200-96, per_node: 1, host_memory_gib: 480, host_cores: 72, host_link_gb_per_s: 450}"
    )
    assert not any(reason.startswith("Host assumed") for reason in plan_of(ONE, stated).reasons)
    assert plan.prediction.relative_error >= 0.4
    assert "offloaded optimizer" in plan.prediction.evidence


def test_rows_have_roles_and_the_one_that_does_not_fit_is_last() -> None:
    plan = plan_of(LARGE)
    roles = [row.role for row in plan.alternatives]
    assert "32 devices" in roles
    assert roles.count("does not fit") == 1
    assert roles[-1] == "does not fit"
    assert "more in host memory" in roles
    assert all(row.why_not for row in plan.alternatives)
    assert plan.devices.memory_bytes < plan.alternatives[-1].memory_bytes <= 2.1 * plan.devices.memory_bytes


def test_rows_of_fewer_devices_surely_fit() -> None:
    """With so much memory the fastest layouts of 16 or 32 devices fit by prediction, but not surely."""
    for memory_gib in (90, 110):
        rows = fewer_devices(problem_of(LARGE, f"hardware.memory_gib={memory_gib}"))
        assert [problem.world_size for problem, _ in rows] == [32, 16]
        assert all(priced.safe for _, priced in rows)


def test_the_limit_is_evidence_where_a_layout_that_fits_is_nearly_as_fast(both: tuple[Any, Any]) -> None:
    """The layout that the error keeps out is named with what it would gain; by time alone nothing is kept out."""
    proven, fastest = both
    text = limit(proven, proven.chosen)
    least = min(one.step_time_s for one in proven.tiered.by_tier)
    assert text.startswith("evidence. ")
    assert f"{1.0 - least / proven.chosen.step_time_s:.1%} faster" in text
    assert "counts from 23% on" in text
    assert not limit(fastest, fastest.chosen).startswith("evidence")


def test_the_smallest_part_of_a_node_has_its_part_of_the_host() -> None:
    """8B parameters have 90 GiB of masters and moments: an eighth of 512 GiB is too little on one device."""
    text = ONE.replace("{accelerator: gh200-96, per_node: 1}", "{accelerator: h100-sxm, host_memory_gib: %d}")
    found = [smallest_cluster(spec_of(text % gib), Path()) for gib in (512, 2048)]
    assert found == [["hardware.nodes=1", "hardware.per_node=2"], ["hardware.nodes=1", "hardware.per_node=1"]]


def test_the_best_without_host_memory_is_shown_only_beside_plans_with_it(both: tuple[Any, Any]) -> None:
    """Of the tiers' bests, the one with most evidence that stays on the devices; a pinned offload leaves none."""
    here, moved = both[0].tiered.by_tier[0], both[0].tiered.by_tier[3]
    assert moved.layout.offload.active
    for tiers, chosen, expected in (
        ((here, None, None, moved), moved, [here]), ((here, None, None, moved), here, []), ((moved,), moved, []),
    ):  # fmt: skip
        tiered = SimpleNamespace(textbook=None, by_tier=tiers)
        rows = list(comparison._roles(SimpleNamespace(tiered=tiered, better=None), chosen))  # type: ignore[arg-type]
        assert [one for role, one in rows if role == "without host memory"] == expected


def test_every_mechanism_above_tier_0_can_be_granted() -> None:
    granted = "parallel={pipeline: {schedule: zb-h1}, sequence: {degree: 2}, tensor: {shape: [4, 2]}, offload: %s}"
    offload = "{optimizer: cpu, parameters: cpu, activations: cpu}"
    spec = spec_of(LARGE, granted % offload, "training.sequence_length=65536")
    assert taken_for_granted(spec) == {*ABOVE_TIER_0, "long_sequence"}
    assert taken_for_granted(spec_of(LARGE)) == set()
