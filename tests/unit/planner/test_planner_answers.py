"""Sentences on a plan: each layout beside the plan's is pinned and priced anew, and limits are named with numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from _golden import fixed_machine
from _golden_specs import text_of
from _practice import CASES
from planned import plan_of, problem_of

from partool.cost.evidence import PAIRED_FLOOR, mechanisms, pair_error
from partool.plan.as_spec import as_spec
from partool.planner.explain import choice, comparison, limits, reasons, settings
from partool.planner.explain.front import front
from partool.planner.explain.summary import short_time, summary, times
from partool.planner.problem import Problem
from partool.planner.resolve import resolve
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import Priced
from partool.planner.search.score import KAPPA
from partool.planner.search.solve import solve
from partool.spec import load_text
from partool.spec.numbers import GIB
from partool.spec.parallel import ParallelSpec
from partool.strategies.sequence import METHODS

NODE = """\
model: {}
hardware: {{accelerator: {}}}
data: python-stdlib
training: {{sequence_length: {}, global_batch: {}}}
"""
OFTEN = ("cpu-batch-prime", "node-short-batch", "superchip-open", "video-open")
"""Golden specs that every run of the tests explains: pipelines, tensor ranks, offload, ZeRO alone."""
RARELY = (
    "node-open", "nodes-open", "node-long-sequence", "experts-open", "tensor-norms", "compiled-not",
    "recompute-keep-attention", "gather-in-turn",
)  # fmt: skip
PUBLISHED = (
    "llama3-8b on 8 H100", "qwen3-32b on 8 H200", "mixtral-8x7b on 64 H100", "llama2-7b on an RTX 4090",
    "llama3-8b on a GH200", "llama3-8b on 64 A100 over 25 Gb Ethernet", "llama3-70b on 8 MI300X",
    "qwen3-30b-a3b on 8 H100",
)  # fmt: skip


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    with fixed_machine():
        yield


def _problem(text: str, parallel: dict[str, object] | None = None) -> Problem:
    spec = load_text(text).spec
    assert spec is not None
    if parallel is not None:
        spec = spec.model_copy(update={"parallel": ParallelSpec.model_validate(parallel)})
    problem = resolve(spec, Path("/nonexistent")).problem
    assert problem is not None
    return problem


def _anew(text: str, one: Priced) -> Priced:
    """Return a layout as a spec that allows no other gives it, priced from that spec."""
    section = as_spec(one.layout, one.problem.spec.parallel)
    problem = _problem(text, yaml.safe_load(yaml.safe_dump(section)))
    space = build(problem)
    assert space.size == 1, section
    policies = np.arange(len(space.policies))
    (policy,) = policies[space.allowed(np.zeros(len(policies), dtype=int), policies)]
    return Priced(problem, layout_of(problem, space.rows(0, int(policy))))


def _score_s(one: Priced, asked: Problem) -> tuple[float, float]:
    """Return the least and the most that the score may be, from its published terms."""
    names = set(mechanisms(one.layout)) - {"data", "zero3"} - asked.asked
    rare = one.layout.mesh.cp > 1 and not METHODS[one.layout.sequence.method].common and "sequence" in names
    relaxed = PAIRED_FLOOR * len(one.problem.relaxed & {"gathers", "tiles", "disks"})
    errors = sum(pair_error(name) for name in names) + PAIRED_FLOOR * rare + relaxed
    share = 1.0 + errors + KAPPA * (1.0 - one.memory.fit_probability)
    return one.step_time_s * share, one.step_time_s * (share + 0.02)


@pytest.mark.parametrize(
    "name", [*OFTEN, *(pytest.param(name, marks=pytest.mark.long) for name in (*RARELY, *PUBLISHED))]
)
def test_every_layout_beside_a_plan_is_what_its_sentence_says(name: str) -> None:
    text = CASES[name].text if name in CASES else text_of(name)[0]
    solution = solve(_problem(text))
    best = solution.chosen
    assert best is not None
    by_mechanism = [one for one in choice.comparisons(solution, best) if one.other is not None]
    by_setting = [settings.milder_recompute(solution, best), settings.lower_stage(solution, best)]
    by_setting += [settings.higher_stage(solution, best), settings.other_micro_batch(solution, best)]
    told: list[tuple[str, Priced]] = [(choice.sentence(best, one), one.other) for one in by_mechanism if one.other]
    told += [(settings.sentence(best, one), one.other) for one in by_setting if one is not None]
    if (paper := solution.on_paper) is not None and paper.step_time_s < best.step_time_s:
        told.append((choice.on_paper(solution, best), paper))
    told += [("", priced) for _, problem, priced in comparison.rows(solution, best) if problem is best.problem]
    assert told
    for sentence, other in [("", best), *told]:
        again = _anew(text, other)
        assert again.step_time_s == pytest.approx(other.step_time_s, rel=1e-9), (sentence, other.layout)
        assert again.memory.total_bytes == other.memory.total_bytes
        least, most = _score_s(other, solution.problem)
        assert least <= other.score_s <= most, sentence
        assert not other.fits or other is solution.better or other.score_s >= best.score_s, sentence
        if sentence and other.fits:
            assert times(again, best) in sentence or short_time(again.step_time_s) in sentence
        elif sentence:
            assert "would need" in sentence or "would pin" in sentence


def test_a_batch_that_divides_among_fewer_devices_is_named() -> None:
    """Four sequences for eight devices; a batch of 8, and a degree that the spec sets, leave nothing to say."""
    short = NODE.format("llama3-8b", "h100-sxm, nodes: 1", 8192, 4)
    problem = problem_of(short)
    best = solve(problem).chosen
    assert best is not None
    (said,) = limits.batch_sentences(problem, best)
    assert said == "Batch: 4 sequences divide among 4 of 8 devices at most, so 2 devices share each sequence."
    assert not list(limits.batch_sentences(problem_of(short, "parallel.tensor=2"), best))
    even = problem_of(short, "training.global_batch=8")
    assert not list(limits.batch_sentences(even, best))


def test_idle_pipeline_ranks_are_named_with_their_micro_batches() -> None:
    text = NODE.format("gpt2", "a100-80, nodes: 1, per_node: 4", 1024, 8)
    change = "parallel={pipeline: {stages: 4, schedule: 1f1b}, micro_batch: 1}"
    problem = problem_of(text, change)
    best = solve(problem).chosen
    assert best is not None
    (said,) = limits.batch_sentences(problem, best)
    assert said.startswith("Batch: 8 micro-batches for 4 pipeline ranks leave these idle for ")
    many = problem_of(text, change, "training.global_batch=512")
    more = solve(many).chosen
    assert more is not None
    assert not list(limits.batch_sentences(many, more))


def test_a_network_that_is_a_bottleneck_is_named() -> None:
    """Over 25 Gb Ethernet the step waits for the network; over InfiniBand it does not, nor on one node."""
    slow_text = NODE.format("gpt2-xl", "a100-80, nodes: 2, fabric: ethernet-25g", 1024, 64)
    change = "parallel={data: {zero: 1}, tensor: 1, pipeline: 1}"
    slow, fast = (plan_of(text, change) for text in (slow_text, slow_text.replace("ethernet-25g", "ib-ndr")))
    (said,) = [reason for reason in slow.reasons if reason.startswith("Network: ")]
    assert "ethernet-25g" in said
    assert "0.391 GB/s per device" in said  # a 25 Gb/s adapter for eight devices
    assert slow.limit.startswith("network: ")
    assert not any(reason.startswith("Network: ") for reason in fast.reasons)


def test_a_plan_that_may_not_fit_names_the_best_layout_that_surely_fits() -> None:
    text = NODE.format("mistral-7b", "l40s, per_node: 4", 4096, 32)
    change = "parallel={offload: {optimizer: none, parameters: none, activations: none}, pipeline: 1, tensor: 1}"
    solution = solve(problem_of(text, change))
    best = solution.chosen
    assert best is not None
    assert not best.safe
    front(solution)  # prices the layouts that need least memory
    (finding,) = reasons.tight(solution, best)
    safe = [one for one in solution.search.exact.values() if one.safe]
    named = min(safe, key=lambda one: one.score_s)
    size = f"{named.memory.total_bytes / GIB:.1f} GiB per rank"
    words = f"safer: on these devices, {summary(named.layout)}: {short_time(named.step_time_s)} per step, {size}"
    assert finding.help == words
    assert named.score_s > best.score_s
    surely_fits = solve(problem_of(text, change, "training.global_batch=16"))
    assert surely_fits.chosen is not None
    assert not list(reasons.tight(surely_fits, surely_fits.chosen))
