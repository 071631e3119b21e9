"""Tiles of networks and losses in plans: as pinned, where memory requires them, and not where they are impossible."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from planned import plan_of, problem_of, result_of

from partool.plan.types import Plan
from partool.planner import PlanResult
from partool.planner.forms.tiles import in_tiles
from partool.planner.resolve import resolve
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build
from partool.planner.search.leaves import SearchResult, crowded
from partool.planner.search.solve import Solution, _may_help, solve
from partool.spec import load_text

WIDE = """\
model: {layers: 4, hidden: 4096, heads: 32, kv_heads: 8, vocab: 32000, ffn_hidden: 32768, max_position: 1000000}
hardware: {accelerator: h100-sxm, per_node: 1}
data: python-stdlib
training: {sequence_length: 98304, global_batch: 1}
parallel: {offload: {optimizer: none, parameters: none, activations: none}}
"""
"""A network eight times as wide as the model: at this length its inner tensors take most of the device."""
TIGHT = "hardware.memory_gib=60"
SHORT = "training.sequence_length=2048"


def planner_says(*overrides: str, text: str = WIDE) -> PlanResult:
    return result_of(text, *overrides)


def planned(*overrides: str, text: str = WIDE) -> Plan:
    return plan_of(text, *overrides)


def about(plan: Plan, word: str) -> list[str]:
    return [reason for reason in plan.reasons if reason.startswith(word)]


def test_short_memory_asks_for_tiles_and_says_so() -> None:
    plan = planned(TIGHT)
    assert plan.layout.tiles.mlp == 4096
    assert plan.layout.compile == "none"
    assert plan.runnable
    (why,) = about(plan, "Networks in tiles")
    assert "the best layout without does not fit" in why
    assert "tiles of 4,096 tokens" in why
    result = planner_says(TIGHT, "parallel.tiles.mlp=0")
    assert result.plan is None or result.plan.prediction.memory.verdict != "green"


def test_where_all_fits_there_are_none() -> None:
    plan = planned(SHORT)
    assert (plan.layout.tiles.mlp, plan.layout.tiles.loss) == (0, 0)
    assert plan.layout.compile == "block"
    assert not about(plan, "Networks")
    assert not about(plan, "Loss")


def test_pinned_tiles_are_kept() -> None:
    plan = planned(SHORT, "parallel.tiles.mlp=512", "parallel.tiles.loss=100")
    assert (plan.layout.tiles.mlp, plan.layout.tiles.loss) == (512, 100)
    assert plan.layout.compile == "none"
    assert "the spec asks for it" in about(plan, "Networks in tiles")[0]
    assert "the spec asks for it" in about(plan, "Loss in tiles")[0]
    alone = planned(SHORT, "parallel.tiles.loss=100")
    assert alone.layout.compile == "block"
    assert alone.prediction.memory.terms_bytes["loss"] <= planned(SHORT).prediction.memory.terms_bytes["loss"]


def test_tiles_as_large_as_what_a_rank_holds_are_none() -> None:
    plain = planned(SHORT)
    plan = planned(SHORT, "parallel.tiles={mlp: 2048, loss: 1000000}")
    assert plan.layout == plain.layout
    assert plan.prediction.time.step_time_s == plain.prediction.time.step_time_s
    assert "tiles.mlp: 2048" in about(plan, "Networks are not tiled")[0]
    assert "tiles.loss: 1000000" in about(plan, "All logits")[0]
    assert planned(SHORT, "parallel.tiles={mlp: 2047}").layout.tiles.mlp == 2047
    # Three ranks hold 683, 683 and 682 tokens.
    shared = (SHORT, "hardware.per_node=3", "parallel.sequence={method: ring, degree: 3}", "parallel.tensor=1")
    assert planned(*shared, "parallel.tiles.mlp=683").layout.tiles.mlp == 0
    assert planned(*shared, "parallel.tiles.mlp=682").layout.tiles.mlp == 682


def test_a_loss_that_would_split_by_itself_can_be_asked_for_all_at_once() -> None:
    """By default the loss holds 2**26 logits at once; 98,304 tokens have 2**31 of them."""
    loaded = load_text(WIDE, overrides=["parallel.tiles.loss=1000000", "parallel.micro_batch=1"])
    assert loaded.spec is not None
    problem = resolve(loaded.spec, Path()).problem
    assert problem is not None
    assert set(np.asarray(build(problem).groups.loss_tile_tokens).tolist()) == {98304}


@pytest.mark.parametrize(
    ("code", "overrides"),
    [
        ("PT479", ["parallel.compile=block"]),
        ("PT481", ["hardware.per_node=2", "parallel.tensor={degree: 2, sequence_norms: true}"]),
        ("PT481", ["hardware.per_node=4", "parallel.tensor={shape: [2, 2]}"]),
        ("PT482", ["hardware.per_node=2", "parallel.pipeline={stages: 2, schedule: weipipe}"]),
    ],
)
def test_tiles_where_they_cannot_be_are_findings(code: str, overrides: list[str]) -> None:
    found = {finding.code for finding in planner_says(SHORT, "parallel.tiles.mlp=512", *overrides).diagnostics}
    assert code in found


def test_tensor_ranks_of_tiles_hold_whole_tokens() -> None:
    plan = planned(SHORT, "hardware.per_node=2", "parallel.tensor=2", "parallel.tiles.mlp=512")
    assert not plan.layout.tensor.sequence_norms
    assert plan.layout.tensor.inner == 1


def test_long_sequences_keep_attention() -> None:
    """If matrix products' results do not fit, the planner recomputes them, but keeps those of attention."""
    plan = planned("training.sequence_length=65536")
    assert "keep_attention" in plan.layout.recompute
    (why,) = about(plan, "Recompute")
    assert why.startswith("Recompute keep_attention: with selective, this layout would need ")


def test_a_layout_that_just_does_not_fit_rules_out_no_other() -> None:
    """Keeping all activations takes two GiB too much here, and less time than any layout that fits."""
    plan = planned("parallel.tiles.mlp=4096", "kernels.fused=[]", "parallel.data.zero=0", "limits.memory_headroom=0.16")
    assert plan.prediction.memory.verdict == "green"
    assert any("too large" in other.why_not for other in plan.alternatives)


def test_activations_in_host_memory_can_run_on_a_gpu() -> None:
    plan = planned("parallel.offload={optimizer: none, activations: cpu}", SHORT)
    assert plan.layout.offload.activations == "cpu"
    assert plan.runnable
    found = planner_says("parallel.offload={activations: cpu}", "hardware={accelerator: cpu}", SHORT).diagnostics
    assert "PT274" in {finding.code for finding in found}


def test_groups_that_are_too_large_whole_are_searched_in_tiles() -> None:
    """On a device that holds no whole network, no layout is nearly small enough; the groups left out have tiles."""
    problem = problem_of(WIDE, TIGHT)
    space = build(problem)
    search = Search(problem, space)
    search.bound()
    plain = Solution(problem, space, search, search.run(), None)
    assert plain.chosen is None
    tiled = in_tiles(problem)
    assert tiled is not None
    limit = tiled.capacity_bytes * search.slack(search.groups)
    assert np.any(search.least_bytes > limit), "else nothing is tested"
    plain.overall.crowded.clear()
    assert _may_help(tiled, plain, float("inf"))
    chosen = solve(problem).chosen
    assert chosen is not None
    assert _may_help(tiled, plain, chosen.score_s)
    assert not _may_help(tiled, plain, 0.5 * chosen.score_s)


def test_layouts_that_only_a_search_of_what_runs_has_met_count_as_crowded() -> None:
    """A plan that runs may be beaten by a runnable layout in tiles, which the search of all layouts never came to."""
    row = (np.array([3]), np.array([1]), np.array([2.0]))
    overall, able = SearchResult(None), SearchResult(None, crowded=[row])
    assert [part.tolist() for part in crowded([overall, able], 2.0)] == [[3], [1]]
    assert [len(part) for part in crowded([overall, able], 1.9)] == [0, 0]
    assert [len(part) for part in crowded([overall], 2.0)] == [0, 0]
