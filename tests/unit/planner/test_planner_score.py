"""One order of layouts: time, errors of mechanisms, the risk to run out; monotone in memory and links."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from often import often
from planned import plan_of, problem_of, spec_of

from partool.cost.evidence import PAIRED_FLOOR, mechanisms, pair_error
from partool.planner.evidence import asked_for, taken_for_granted, tier_of
from partool.planner.explain import choice, comparison
from partool.planner.explain.fewer import fewer_devices
from partool.planner.explain.limits import limit
from partool.planner.explain.summary import short_time
from partool.planner.queries import smallest_cluster
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import PINNED_SHARE, Priced, pinned_limit
from partool.planner.search.refine import refined
from partool.planner.search.score import KAPPA, SMALL, ScoreWeights, fill_share
from partool.planner.search.solve import solve
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
SMALL_MODEL = LARGE.replace("llama3-70b", "llama3-8b").replace("nodes: 8", "nodes: 1").replace("512}", "128}")


ABOVE_TIER_0 = (
    "sequence", "other_schedules", "tensor_2d", "offload_optimizer", "offload_parameters", "offload_activations",
)  # fmt: skip
NONE: frozenset[str] = frozenset()


@pytest.fixture(scope="module")
def both() -> tuple[Any, Any]:
    """Solution of a large problem by score, and of a smaller one on paper."""
    proven, fastest = problem_of(LARGE), problem_of(SMALL_MODEL, "limits.prefer=fastest")
    return solve(proven), solve(fastest)


def test_the_score_is_the_time_with_errors_risk_and_small_prices() -> None:
    """A layout with tensor ranks, pipelines and offload has the errors of all three; its memory costs by its chance."""
    pinned = "parallel={tensor: 4, pipeline: {stages: 4, schedule: 1f1b}, offload: {optimizer: cpu}, micro_batch: 1}"
    asked, free = problem_of(LARGE, pinned), problem_of(LARGE)
    layout = solve(asked).chosen.layout
    priced, own = Priced(free, layout), Priced(asked, layout)
    names = set(mechanisms(layout)) - {"data", "zero3"}
    assert {"tensor", "pipeline", "offload_optimizer"} <= names
    assert priced.risk == pytest.approx(sum(pair_error(name) for name in names))
    assert own.risk == pytest.approx(sum(pair_error(name) for name in names - asked.asked))
    small = priced.paper_s / priced.step_time_s - 1.0 - KAPPA * priced.unfit
    assert 0.0 < small < 0.01
    assert priced.score_s - priced.paper_s == pytest.approx(priced.risk * priced.step_time_s)
    assert Priced(problem_of(LARGE, "limits.prefer=fastest"), layout).risk == 0.0
    assert all(pair_error(name) >= min(0.08, PAIRED_FLOOR) for name in names)


def test_data_parallelism_with_zero_has_no_error(both: tuple[Any, Any]) -> None:
    proven = both[0].chosen
    assert proven.layout.mesh.tp * proven.layout.mesh.pp * proven.layout.mesh.cp == 1
    assert proven.layout.data.zero == 3
    assert proven.risk == 0.0


def test_scores_of_groups_and_policies_add_up_to_those_of_layouts() -> None:
    """The weights of the search are the exact scores without memory and recomputation."""
    for change in ("training.steps=10", "limits.prefer=fastest", "parallel.tensor=4"):
        problem = problem_of(LARGE, change)
        space = build(problem)
        weights = ScoreWeights.of(problem, space.groups, space.size, space.policies)
        random = np.random.default_rng(0)
        group, policy = random.integers(0, space.size, 12), random.integers(0, len(space.policies), 12)
        kept = space.allowed(group, policy)
        for pair in zip(group[kept].tolist(), policy[kept].tolist(), strict=True):
            priced = Priced(problem, layout_of(problem, space.rows(*pair)))
            fill = fill_share(priced.memory.total_bytes, priced.unfit, problem.devices.memory_bytes)
            rest = priced.factor - 1.0 - float(fill)
            least = weights.group[pair[0]] + weights.policy[pair[1]]
            assert least <= rest + 1e-12
            assert rest - least <= 0.2 * SMALL + 1e-12


def test_no_bound_of_a_score_is_above_the_score() -> None:
    """Layouts near the device's memory: bounds of time with the weights and the least chance against them."""
    risky = pipelined = 0
    for change in ("hardware.memory_gib=60", "hardware.memory_gib=79", "parallel.pipeline.stages=4"):
        problem = problem_of(LARGE, change, "parallel.offload.activations=none")
        space = build(problem)
        search, random = Search(problem, space), np.random.default_rng(1)
        group, policy = random.integers(0, space.size, 20_000), random.integers(0, len(space.policies), 20_000)
        kept = space.allowed(group, policy)
        group, policy = group[kept], policy[kept]
        total, probability, _, unfit = search.memory(group, policy, exact=True)
        likely, several = (probability > 0.3) & (probability < 0.97), space.groups.pp[group] > 1
        near = np.concatenate([np.flatnonzero(likely & mask)[:6] for mask in (several, ~several)])
        assert len(near) >= 6
        group, policy, total, unfit = group[near], policy[near], total[near], unfit[near]
        memory_bytes = problem.devices.memory_bytes
        factor = 1.0 + search.weights.group[group] + search.weights.policy[policy]
        least = total / search.slack(group)
        first = search.bounds(group, policy) * (factor + fill_share(least, unfit, memory_bytes))
        for at, pair in enumerate(zip(group.tolist(), policy.tolist(), strict=True)):
            exact = Priced(problem, layout_of(problem, space.rows(*pair)))
            assert first[at] <= exact.score_s * (1.0 + 1e-9), exact.layout
            risky += bool(unfit[at] > 0.01)
            if exact.layout.mesh.pp > 1:
                second = refined(problem, space.rows(group[at : at + 1], policy[at : at + 1]))
                fill = fill_share(second.total_bytes, second.unfit, memory_bytes)
                assert float((second.bound_s * (factor[at] + fill))[0]) <= exact.score_s * (1.0 + 1e-9), exact.layout
                pipelined += bool(second.unfit[0] > 0.01)
    assert risky
    assert pipelined


@pytest.mark.parametrize(
    ("model", "hardware", "length", "batch", "sizes"),
    [
        pytest.param(*case, marks=[pytest.mark.long] if at else [])
        for at, case in enumerate(
            [
                ("llama3-70b", "mi300x, nodes: 1", 8192, 64, (180, 192, 205, 215, 230, 250, 288, 400)),
                ("llama3-70b", "h100-sxm, nodes: 2", 8192, 128, (60, 79, 90, 100, 120, 141, 180, 288)),
                ("llama3-8b", "h100-sxm, nodes: 1", 8192, 128, (24, 32, 40, 48, 60, 70, 79, 141)),
                ("qwen3-32b", "h100-sxm, nodes: 8", 4096, 512, (24, 40, 60, 70, 79, 90, 120, 192)),
                ("llama3-8b", "rtx-4090, nodes: 1", 4096, 64, (12, 16, 20, 24, 28, 32, 48, 96)),
                ("mixtral-8x7b", "h100-sxm, nodes: 8", 4096, 512, (40, 60, 79, 90, 110, 141, 180, 288)),
            ]
        )
    ],
)
def test_more_memory_never_raises_the_score(
    model: str, hardware: str, length: int, batch: int, sizes: tuple[int, ...]
) -> None:
    spec = (
        f"model: {model}\nhardware: {{accelerator: {hardware}, memory_gib: 1}}\ndata: python-stdlib\n"
        f"training: {{sequence_length: {length}, global_batch: {batch}}}\n"
    )
    chosen = [solve(problem_of(spec, f"hardware.memory_gib={size}")).chosen for size in sizes]
    scores = [float("inf") if one is None else one.score_s for one in chosen]
    assert all(more <= less * (1.0 + 1e-9) for less, more in pairwise(scores)), scores
    assert scores[-1] < float("inf")
    for less, more in pairwise(chosen):
        if less is not None and more is not None and more.step_time_s > less.step_time_s:
            # Where time rises, a risk is bought off, by no more than what the smaller memory's layout was charged.
            assert more.step_time_s <= less.step_time_s * less.factor


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "hardware", "batch", "least"),
    [("qwen3-30b-a3b", "h100-sxm, nodes: 1", 256, 5), ("mixtral-8x7b", "h100-sxm, nodes: 2", 128, 5)],
)
def test_one_more_gib_never_raises_the_score_near_the_first_fit(
    model: str, hardware: str, batch: int, least: int
) -> None:
    """Experts on memories from the first that holds a layout: here settings that save memory come and go."""
    spec = (
        f"model: {model}\nhardware: {{accelerator: {hardware}, memory_gib: 1}}\ndata: python-stdlib\n"
        f"training: {{sequence_length: 4096, global_batch: {batch}}}\n"
    )
    scores: list[float] = []
    for gib in range(least, 64):
        chosen = solve(problem_of(spec, f"hardware.memory_gib={gib}")).chosen
        if chosen is not None:
            scores.append(chosen.score_s)
        if len(scores) == 10:
            break
    assert len(scores) == 10
    assert all(more <= less * (1.0 + 1e-9) for less, more in pairwise(scores)), scores


@pytest.mark.long
@pytest.mark.parametrize("link", ["link_bytes_per_s", "fabric_bytes_per_s", "host_link_bytes_per_s"])
@pytest.mark.parametrize("spec", ["LARGE", "ONE", "small", "experts"])
def test_faster_links_never_raise_the_score(spec: str, link: str) -> None:
    others = {
        "small": ("llama3-8b", "a100-80, nodes: 8, fabric: ethernet-25g"),
        "experts": ("qwen3-30b-a3b", "h100-sxm, nodes: 2"),
    }
    text = {"LARGE": LARGE, "ONE": ONE}.get(spec) or (
        "model: {}\nhardware: {{accelerator: {}}}\ndata: python-stdlib\n"
        "training: {{sequence_length: 4096, global_batch: 128}}\n"
    ).format(*others[spec])
    problem = problem_of(text)
    rate = getattr(problem.devices, link) or 50e9
    scores = []
    for factor in (0.5, 1.0, 2.0, 4.0):
        chosen = solve(problem.on(**{link: rate * factor})).chosen
        assert chosen is not None
        scores.append(chosen.score_s)
    assert all(more <= less * (1.0 + 1e-9) for less, more in pairwise(scores)), scores


def test_a_fuller_layout_needs_a_gain(both: tuple[Any, Any]) -> None:
    """Eight H100 train 8B with ZeRO-3 at 56 GiB; the same with gathers kept at 70 GiB would have to gain its risk."""
    spec = SMALL_MODEL
    chosen = solve(problem_of(spec)).chosen
    assert chosen is not None
    assert chosen.layout.data.zero == 3
    assert chosen.memory.total_bytes < 0.8 * chosen.problem.devices.memory_bytes
    fuller = solve(problem_of(spec, "parallel={data: {zero: 2}, recompute: selective}")).chosen
    assert fuller is not None
    assert fuller.unfit > chosen.unfit
    assert fuller.score_s > chosen.score_s
    assert fuller.score_s / fuller.step_time_s - chosen.score_s / chosen.step_time_s > KAPPA * (
        fuller.unfit - chosen.unfit
    )


def test_a_mechanism_is_used_only_where_it_gains_more_than_it_may_err() -> None:
    """Beside the best layout without each mechanism, the chosen one is faster by its error, or no other fits."""
    compared = 0
    small = LARGE.replace("h100-sxm, nodes: 8", "a100-80, nodes: 8").replace("512}", "16}")
    for text in (LARGE, ONE, small, LARGE.replace("8192", "131072").replace("512}", "16}")):
        solution = solve(problem_of(text))
        best = solution.chosen
        assert best is not None
        for one in choice.comparisons(solution, best):
            if one.other is None:
                continue
            compared += 1
            assert one.other.score_s >= best.score_s
            told, gain = choice.sentence(best, one), one.other.step_time_s / best.step_time_s - 1.0
            assert f"takes {short_time(one.other.step_time_s)} (here {short_time(best.step_time_s)})" in told
            assert (f"{gain:.1%} more than here" in told) == (gain > 0.0)
            if one.other.unfit <= best.unfit and one.other.risk < best.risk:
                assert gain > 0.9 * (best.risk - one.other.risk) / (1.0 + one.other.risk) - 0.01
    assert compared


def test_a_layout_that_is_faster_on_paper_is_named_with_both_times(both: tuple[Any, Any]) -> None:
    solution = both[0]
    best, paper = solution.chosen, solution.on_paper
    assert paper is not None
    assert paper.paper_s < best.paper_s
    assert paper.score_s >= best.score_s
    again = Priced(problem_of(LARGE), paper.layout)
    assert (again.step_time_s, again.score_s) == (paper.step_time_s, paper.score_s)
    text = choice.on_paper(solution, best)
    assert f"{1.0 - paper.step_time_s / best.step_time_s:.1%} faster on paper" in text
    assert f"{paper.step_time_s:.3g} s" in text
    assert f"err by {paper.risk:.0%}" in text
    assert choice.on_paper(both[1], both[1].chosen) == ""


def test_offload_is_taken_where_no_other_fits() -> None:
    """8B parameters take 120 GiB of state, a GH200 has 96: the optimizer goes to the host, and nothing else does."""
    solution = solve(problem_of(ONE))
    assert solution.chosen is not None
    assert tier_of(solution.chosen.layout, NONE) == 2
    (compared,) = choice.comparisons(solution, solution.chosen)
    assert compared.other is None
    assert "no layout without it fits" in choice.sentence(solution.chosen, compared)


ASKED = [
    ("parallel.sequence.degree=2", 1), ("parallel.pipeline={stages: 2, schedule: zb-h1}", 1),
    ("parallel.offload.activations=cpu", 3), ("parallel.offload.optimizer=cpu", 2),
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), often(ASKED, ASKED[1:2]))
def test_what_the_spec_asks_for_counts_for_nothing(change: str, expected: int) -> None:
    problem = problem_of(LARGE, change)
    chosen = solve(problem).chosen
    assert chosen is not None
    assert tier_of(chosen.layout, NONE) == expected
    assert tier_of(chosen.layout, problem.granted) == 0
    names = set(mechanisms(chosen.layout)) - {"data", "zero3"}
    assert chosen.risk == pytest.approx(sum(pair_error(name) for name in names - problem.asked))
    assert names & problem.asked


@pytest.mark.parametrize(
    ("parallel", "asked"),
    [
        ("{pipeline: {schedule: 1f1b}}", {"other_schedules"}),
        ("{pipeline: {stages: 1}}", set()),
        ("{pipeline: {stages: 4}}", {"pipeline"}),
        ("{pipeline: {layers: [40, 40]}}", {"pipeline"}),
        ("{pipeline: {layers: [80]}}", set()),
        ("{tensor: {sequence_norms: true}}", set()),
        ("{tensor: 1}", set()),
        ("{tensor: 8}", {"tensor"}),
        ("{tensor: {shape: [4, 2]}}", {"tensor", "tensor_2d"}),
        ("{sequence: 1}", set()),
        ("{sequence: {method: ring}}", {"sequence"}),
        ("{sequence: 2}", {"sequence"}),
    ],
)
def test_a_degree_asks_for_a_mechanism_and_a_setting_of_it_does_not(parallel: str, asked: set[str]) -> None:
    assert asked_for(spec_of(LARGE, f"parallel={parallel}")) == asked


def test_a_named_schedule_leaves_the_error_of_pipelines() -> None:
    """A schedule without a number of stages: a pipelined layout is charged as without it."""
    layout = solve(problem_of(LARGE, "parallel={pipeline: {stages: 4, schedule: 1f1b}, tensor: 1}")).chosen.layout
    named, open_ = (Priced(problem_of(LARGE, *change), layout) for change in (["parallel.pipeline.schedule=1f1b"], []))
    assert named.risk == open_.risk == pair_error("pipeline")


def test_rows_of_fewer_devices_and_the_next_best_are_ordered_by_score() -> None:
    plan = plan_of(LARGE)
    scores = [row.score_s for row in plan.candidates]
    assert scores == sorted(scores)
    times = [row.step_time_s for row in plan.candidates]
    assert times != sorted(times)  # a faster layout is charged more
    own = next(row for row in plan.candidates if not row.why_not)
    assert own.score_s == min(row.score_s for row in plan.candidates if row.devices == own.devices and row.runnable)


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
    assert "faster on paper" in roles
    assert all(row.why_not for row in plan.alternatives)
    assert plan.devices.memory_bytes < plan.alternatives[-1].memory_bytes <= 2.1 * plan.devices.memory_bytes


def test_rows_of_fewer_devices_surely_fit() -> None:
    """With so much memory the fastest layouts of 16 or 32 devices fit by prediction, but not surely."""
    for memory_gib in (90, 110):
        rows = fewer_devices(problem_of(LARGE, f"hardware.memory_gib={memory_gib}"))
        assert [problem.world_size for problem, _ in rows] == [32, 16]
        assert all(priced.safe for _, priced in rows)


def test_the_limit_is_evidence_where_a_layout_that_fits_is_nearly_as_fast(both: tuple[Any, Any]) -> None:
    """The layout that is kept out is named with its gain; on paper nothing is kept out."""
    proven, paper = both[0].chosen, both[0].on_paper
    assert limit(both[0], proven).sentence.startswith("evidence. ")
    assert f"{1.0 - paper.step_time_s / proven.step_time_s:.1%} faster" in limit(both[0], proven).sentence
    assert limit(both[1], both[1].chosen).kind != "evidence"


def test_the_smallest_part_of_a_node_has_its_part_of_the_host() -> None:
    """8B parameters have 90 GiB of masters and moments: an eighth of 512 GiB is too little on one device."""
    text = ONE.replace("{accelerator: gh200-96, per_node: 1}", "{accelerator: h100-sxm, host_memory_gib: %d}")
    found = [smallest_cluster(spec_of(text % gib), Path()) for gib in (512, 2048)]
    assert found == [["hardware.nodes=1", "hardware.per_node=2"], ["hardware.nodes=1", "hardware.per_node=1"]]


def test_the_best_without_host_memory_is_shown_only_beside_plans_with_it(both: tuple[Any, Any]) -> None:
    """Where the optimizer is in host memory by choice, the best layout that stays on the devices has a row."""
    assert "without host memory" not in [role for role, _ in comparison._roles(both[0], both[0].chosen)]
    solution = solve(problem_of(ONE, "hardware.memory_gib=150"))
    assert solution.chosen.layout.offload.active
    here = dict(comparison._roles(solution, solution.chosen))["without host memory"]
    assert not here.layout.offload.active
    assert here.score_s > solution.chosen.score_s


def test_every_mechanism_above_tier_0_can_be_granted() -> None:
    granted = "parallel={pipeline: {schedule: zb-h1}, sequence: {degree: 2}, tensor: {shape: [4, 2]}, offload: %s}"
    offload = "{optimizer: cpu, parameters: cpu, activations: cpu}"
    spec = spec_of(LARGE, granted % offload, "training.sequence_length=65536")
    assert taken_for_granted(spec) == {*ABOVE_TIER_0, "long_sequence"}
    assert taken_for_granted(spec_of(LARGE)) == set()
