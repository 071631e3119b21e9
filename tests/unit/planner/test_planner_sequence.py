"""Sequence parallelism in the planner: legal forms, searched forms, findings, and the longest sequence."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import laid
from often import often
from planned import plan_of, problem_of, spec_of
from rich.console import Console

from partool.cli.main import run
from partool.cost.case import INSIDES, ORDERS, RING, SEQUENCE_METHODS
from partool.diagnostics.record import Diagnostic
from partool.plan.as_spec import own_yaml
from partool.plan.layout import Layout
from partool.planner import make_plan
from partool.planner.explain.sequence import formed, rivals, sequence_reasons
from partool.planner.forms.sequence_rules import SequenceForm, all_forms, methods
from partool.planner.longest import NONE, Longest, longest
from partool.planner.problem import Problem
from partool.planner.queries import fits
from partool.planner.resolve import resolve
from partool.planner.search.enumeration import build
from partool.planner.search.price import Priced
from partool.planner.search.sequence_forms import _front, best_forms, every_form, seconds
from partool.planner.search.solve import solve
from partool.report.longest import longest_rows, render_longest
from partool.spec import load_text
from partool.strategies.sequence import BY_GRAPH, METHODS, ON_GRIDS, PREFERENCE

ROOT = Path(__file__).parents[3]
MODEL = "model: {layers: 4, hidden: 448, heads: 7, kv_heads: 7, vocab: 256, max_position: 1000000}\n"
MIXED = "model: {layers: 4, hidden: 512, heads: 8, vocab: 256, attention: {window: 300, layer_types: [full, sliding, sliding, sliding]}}\n"  # noqa: E501
SLIDING = "model: {layers: 4, hidden: 512, heads: 8, vocab: 256, attention: {window: 300}}\n"
GRID = (
    "model: {layers: 4, hidden: 512, heads: 8, vocab: 256, max_position: 4096,\n"
    "  attention: {grid: [64, 60], layer_types: {pattern: [row, column]}}}\n"
)
REST = "hardware: {accelerator: h100-sxm, nodes: 2}\ndata: python-stdlib\n"
LENGTH = "training: {sequence_length: 3840, global_batch: 16}\n"
ALONE = ("parallel.tensor=1", "parallel.pipeline=1", "parallel.compile=none", "parallel.offload=none")
"""Settings without tensor and pipeline ranks, of one compilation and without offload, for fewer layouts."""
LONG = "model: llama3-8b\n" + REST + "training: {sequence_length: 65536, global_batch: 16}\n"


def findings(text: str, *overrides: str) -> list[Diagnostic]:
    loaded = load_text(text, overrides=list(overrides))
    if loaded.spec is None or any(finding.severity == "error" for finding in loaded.diagnostics):
        return loaded.diagnostics
    return [*loaded.diagnostics, *resolve(loaded.spec, ROOT).diagnostics]


BAD = {
    "C² does not divide": (MODEL, "{method: startrail, degree: 8, teams: 4}", "PT466", "error", "teams: 2"),
    "no C at all": (MODEL, "{method: startrail, degree: 2}", "PT466", "error", "degree: 4"),
    "a team of one": (MODEL, "{method: startrail, degree: 16, teams: 1}", "PT466", "error", "method: ring"),
    "usp does not divide": (MODEL, "{method: usp, degree: 8, ulysses: 3}", "PT467", "error", "use 2 or 4"),
    "usp that is ulysses": (MODEL, "{method: usp, degree: 8, ulysses: 8}", "PT467", "error", "or auto"),
    "usp of two ranks": (MODEL, "{method: usp, degree: 2}", "PT467", "error", "ulysses or ring"),
    "zigzag in windows": (SLIDING, "{method: ring, degree: 8, order: zigzag}", "PT468", "error", "contiguous"),
    "zigzag in some windows": (MIXED, "{method: ring, degree: 8, order: zigzag}", "PT468", "warning", "auto"),
    "ring on a grid": (GRID, "{method: ring, degree: 4}", "PT469", "error", "ulysses"),
    "all_gather on a grid": (GRID, "{method: all_gather, degree: 4}", "PT469", "error", "ulysses"),
    "startrail on a grid": (GRID, "{degree: 4, teams: 2}", "PT469", "error", "ulysses"),
    "dsp without a grid": (MODEL, "{method: dsp, degree: 4}", "PT469", "error", "ulysses"),
    "dsp, degree open": (MIXED, "{method: dsp}", "PT469", "error", "ulysses"),
    "fewer heads than ranks": (MODEL, "{method: ulysses, degree: 8}", "PT470", "warning", "degree: 7 or less"),
    "fewer heads than a group": (MODEL, "{method: usp, degree: 16, ulysses: 8}", "PT470", "warning", "ulysses: 7"),
    "another method's field": (MODEL, "{method: ring, degree: 4, teams: 2}", "PT465", "error", "startrail"),
    "fields of two methods": (MODEL, "{degree: 4, teams: 2, ulysses: 2}", "PT465", "error", "drop"),
    "zigzag in ulysses": (MODEL, "{method: ulysses, degree: 4, order: zigzag}", "PT465", "error", "ring"),
    "fields without ranks": (MODEL, "{method: startrail, degree: 1, teams: 3}", "PT465", "warning", "degree: auto"),
    "an order without ranks": (MODEL, "{degree: 1, order: zigzag}", "PT465", "warning", "drop"),
    "an order in dsp": (GRID, "{method: dsp, degree: 4, order: contiguous}", "PT465", "error", "drop order"),
}


@pytest.mark.parametrize(("model", "sequence", "code", "severity", "help"), BAD.values(), ids=BAD)
def test_what_does_not_go_is_a_finding(model: str, sequence: str, code: str, severity: str, help: str) -> None:
    found = findings(model + REST + LENGTH, f"parallel.sequence={sequence}")
    assert [(one.code, one.severity) for one in found] == [(code, severity)]
    assert help in found[0].help
    assert found[0].path[:2] == ("parallel", "sequence")


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["parallel.sequence=2", "parallel.pipeline={stages: 2, schedule: weipipe}"], "PT471"),
        (["parallel.sequence=16", "training.sequence_length=15"], "PT265"),
        (["data={source: python-stdlib, pack: false, attend: document}"], "PT472"),
    ],
)
def test_what_does_not_go_beside_is_a_finding(overrides: list[str], code: str) -> None:
    assert code in {one.code for one in findings(MODEL + REST + LENGTH, *overrides) if one.severity == "error"}


def test_tensor_ranks_of_two_dimensions_share_sequences() -> None:
    even = ("model.heads=8", "model.kv_heads=8")
    spec = spec_of(MODEL + REST + LENGTH, *even, "parallel.sequence=2", "parallel.tensor={shape: [1, 2]}", ALONE[2])
    plan = make_plan(spec, base_dir=ROOT, default_name="test").plan
    assert plan is not None
    assert (plan.layout.mesh.cp, plan.layout.mesh.tp, plan.layout.tensor.inner) == (2, 2, 2)
    assert plan.runnable


def test_wide_windows_are_balanced_like_full_layers() -> None:
    text = SLIDING.replace("window: 300", "window: WIDE") + REST + LENGTH
    ring = "parallel.sequence={method: ring, degree: 4}"
    for window, order in ((300, "contiguous"), (3840, "zigzag"), (10**6, "zigzag")):
        assert plan_of(text.replace("WIDE", str(window)), ring, *ALONE).layout.sequence.order == order
    pinned = "parallel.sequence={method: ring, degree: 4, order: zigzag}"
    assert not findings(text.replace("WIDE", "3840"), pinned)
    assert [one.severity for one in findings(text.replace("WIDE", "2000"), pinned)] == ["warning"]


def test_who_names_a_method_gets_it() -> None:
    text = MODEL + REST + LENGTH
    for method in ("ring", "startrail"):
        plan = make_plan(
            spec_of(text, f"parallel.sequence.method={method}", *ALONE), base_dir=ROOT, default_name="a"
        ).plan
        assert plan is not None
        layout = plan.layout
        assert layout.mesh.cp > 1
        assert layout.sequence.method == method
    alone = spec_of(text, "parallel.sequence.method=ring", "parallel.sequence.degree=1", *ALONE)
    plan = make_plan(alone, base_dir=ROOT, default_name="a").plan
    assert plan is not None
    assert plan.layout.mesh.cp == 1


def test_more_ranks_than_rows_are_for_ulysses_only() -> None:
    found = findings(GRID + REST + LENGTH, "parallel.sequence={method: dsp, degree: 64}", "hardware.nodes=8")
    assert [one.code for one in found] == ["PT265"]
    assert methods(problem_of(GRID + REST + LENGTH)) == ("ulysses", "dsp")


def shown(forms: Any) -> set[tuple[str, str, int, int, str]]:
    return {(one.name, ORDERS[one.order], one.inner, one.teams, INSIDES[one.inside]) for one in forms}


def test_every_legal_form_and_no_other() -> None:
    problem = problem_of(MODEL + REST + LENGTH)
    assert shown(all_forms(problem, 1, 1)) == {("ulysses", "contiguous", 1, 1, "teams")}
    alone = [name for name, record in METHODS.items() if record.keys in ("ring", "gathered") and record.heads == "own"]
    plain = {(name, "zigzag", 1, 1, "teams") for name in alone}
    assert {"ring", "all_gather"} <= set(alone)
    assert shown(all_forms(problem, 3, 1)) == plain | {("ulysses", "contiguous", 1, 1, "teams")}
    # Seven heads: no group of eight can exchange them; a team of four makes rings of one rank.
    assert shown(all_forms(problem, 16, 1)) == plain | {
        *(("usp", "zigzag", inner, 1, "teams") for inner in (2, 4)),
        ("startrail", "zigzag", 1, 4, "teams"),
        *(("startrail", "zigzag", 1, 2, inside) for inside in INSIDES),
    }
    # Three or four heads on each of two tensor ranks.
    assert ("ulysses", "contiguous", 1, 1, "teams") not in shown(all_forms(problem, 4, 2))
    pinned = problem_of(MODEL + REST + LENGTH, "parallel.sequence={method: ulysses, degree: 16}")
    assert shown(all_forms(pinned, 16, 1)) == {("ulysses", "contiguous", 1, 1, "teams")}


@pytest.mark.parametrize(
    ("model", "orders"),
    [(MODEL, {"zigzag"}), (SLIDING, {"contiguous"}), (MIXED, {"contiguous", "zigzag"}), (GRID, {"grid"})],
)
def test_orders_follow_from_the_layers(model: str, orders: set[str]) -> None:
    found = {ORDERS[one.order] for one in all_forms(problem_of(model + REST + LENGTH), 4, 1) if one.name != "ulysses"}
    assert found == orders
    asked = problem_of(MODEL + REST + LENGTH, "parallel.sequence={order: contiguous}")
    assert {ORDERS[one.order] for one in all_forms(asked, 4, 1)} == {"contiguous"}


MESHES = [(2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (16, 1)]


@pytest.mark.parametrize("micro_batch", [1, 8])
@pytest.mark.parametrize("text", [LONG, MIXED + REST + LENGTH, MODEL + REST + LENGTH], ids=["long", "mixed", "odd"])
def test_no_form_that_is_left_out_is_faster_and_as_small(text: str, micro_batch: int) -> None:
    problem = problem_of(text)
    every = every_form(problem, MESHES)
    kept = best_forms(problem, every)
    for (ranks, tensor), forms in every.items():
        assert set(kept[ranks, tensor]) <= set(forms)
        times = seconds(problem, [(ranks, tensor, *form) for form in forms], micro_batch)
        left = [form in kept[ranks, tensor] for form in forms]
        assert times[left].min() == times.min()


def test_what_is_left_out_is_replaced_whatever_memory_costs() -> None:
    """Times and sizes that differ by less than a thousandth: the best of the remaining entries is the best of all."""
    random = np.random.default_rng(0)
    for _ in range(50):
        times, sizes = 1.0 + 1e-3 * random.random((2, 12))
        times[1], sizes[1] = times[0], sizes[0]
        kept = _front(times, sizes)
        assert not kept[1] or not kept[0]
        for price in (0.0, 0.3, 1.0, 3.0):
            scores = times + price * sizes
            assert scores[kept].min() == scores.min()


def test_of_forms_alike_the_preferred_one_is_kept() -> None:
    """Ranks of one sequence that exchange all heads over a fast link: the methods differ in preference only."""
    problem = problem_of(LONG, "hardware.nodes=1")
    forms = best_forms(problem, every_form(problem, [(8, 1)]))[8, 1]
    times = seconds(problem, [(8, 1, *form) for form in forms], 1)
    quickest = int(np.argmin(times))
    for at, form in enumerate(forms):
        if at != quickest and PREFERENCE.index(form.name) > PREFERENCE.index(forms[quickest].name):
            assert times[at] < times[quickest] * 1.002 or form.name != forms[quickest].name


@pytest.mark.parametrize("method", [name for name in SEQUENCE_METHODS if name not in BY_GRAPH])
def test_what_a_table_proposes_plans_the_same_layout(method: str) -> None:
    text = (GRID if method == "dsp" else MODEL) + REST + LENGTH
    first = plan_of(text, *ALONE, f"parallel.sequence={{method: {method}, degree: 4}}")
    again = plan_of(text + own_yaml(first))
    assert first.layout == again.layout
    assert first.layout.sequence.method == method


def test_state_is_shared_over_the_ranks_of_a_sequence_too() -> None:
    problem = problem_of(MODEL + REST + LENGTH, "parallel.sequence=16", "parallel.data.zero=3")
    space = build(problem)
    assert set(space.groups.zero.tolist()) == {3}
    assert set((space.groups.shards * space.groups.cp).tolist()) == {16}
    assert "PT268" not in {
        one.code for one in findings(MODEL + REST + LENGTH, "parallel={sequence: 16, data: {zero: 3}}")
    }
    inside = build(problem_of(MODEL + REST + LENGTH, "parallel.sequence=8", "parallel.data.zero=3")).groups
    assert {(1, 2), (2, 1)} <= set(zip(inside.shards.tolist(), inside.replicas.tolist(), strict=True))


def test_weights_do_not_travel_beside_shared_sequences() -> None:
    groups = build(problem_of(MODEL + REST + LENGTH)).groups
    moving = np.isin(groups.schedule, RING) & (groups.pp > 1)
    assert moving.any()
    assert (groups.cp[moving] == 1).all()
    assert (groups.cp > 1).any()


def test_reasons_name_what_is_taken_and_what_it_is_compared_with() -> None:
    problem = problem_of(LONG, *ALONE, "parallel.sequence=8")
    best = solve(problem).chosen
    assert best is not None
    told = list(sequence_reasons(problem, best))
    sent = best.time.traffic_bytes["sequence"]
    assert sent > 0
    assert f"{sent / 2**30:.2f} GiB" in told[0]
    others = rivals(problem, best.layout)
    assert {one.layout.sequence.method for one in others} == set(SEQUENCE_METHODS) - {
        "dsp",
        "compiled",
        best.layout.sequence.method,
    }
    assert [one.time.step_time_s for one in others] == sorted(one.time.step_time_s for one in others)
    for one in others:
        assert one.layout.sequence.form in told[1]
    # No layout that fits is clearly faster than the chosen one.
    assert all(one.time.step_time_s > best.time.step_time_s * 0.998 for one in others if one.safe)


def test_reasons_tell_of_uneven_shares_and_heads() -> None:
    text = MODEL + REST + "training: {sequence_length: 1021, global_batch: 16}\n"
    plan = plan_of(text, *ALONE, "parallel.sequence={method: ulysses, degree: 4}")
    told = " ".join(plan.reasons)
    assert "Query heads per rank in attention: 2, 2, 2, 1" in told
    assert "Tokens per rank: 256 or 255" in told
    assert "Tokens contiguous" not in told
    few = plan_of(text, *ALONE, "parallel.sequence={method: ulysses, degree: 4}", "model.kv_heads=1")
    assert "Keys and values: 1 heads on 4 ranks" in " ".join(few.reasons)
    eight = " ".join(plan_of(text, *ALONE, "parallel.sequence={method: ring, degree: 8}").reasons)
    assert "Not here: ulysses (7 heads are too few)" in eight


def priced(problem: Problem, layout: Layout, **fields: Any) -> Priced:
    return Priced(problem, laid(formed(layout, SequenceForm()), **fields))


def test_windows_cost_what_they_see() -> None:
    """A layer costs min(window, tokens) keys per token: longer sequences make full layers dearer, not windowed ones.

    This holds where blocks are longer than any measured kernel. Kernels of 1,024 and of 2,048 tokens do not fill the
    device: those of 64 heads take 43 and 104 us on an H100.
    """
    short, long = (8192, 16384), (262144, 524288)
    layout = plan_of(MODEL + REST + LENGTH, *ALONE, "parallel.sequence={method: ring, degree: 8}").layout
    times = {}
    for kind, length in product(("full", "sliding"), short + long):
        window = ", attention: {window: 512}" if kind == "sliding" else ""
        model = f"model: {{layers: 4, hidden: 512, heads: 8, vocab: 256, max_position: 1000000{window}}}\n"
        problem = problem_of(model + REST + f"training: {{sequence_length: {length}, global_batch: 16}}\n")
        order = "contiguous" if kind == "sliding" else "zigzag"
        found = priced(problem, layout, sequence_method="ring", sequence_order=order)
        times[kind, length] = found.time.breakdown_s["attention_forward"]
    ratios = {
        (kind, two): times[kind, two[1]] / times[kind, two[0]] for kind in ("full", "sliding") for two in (short, long)
    }
    assert ratios["full", long] == pytest.approx(4.0, rel=0.01)
    assert ratios["sliding", long] == pytest.approx(2.0, rel=0.02)
    assert ratios["full", short] == pytest.approx(104 / 43, rel=0.02)
    assert 1.0 < ratios["sliding", short] < 2.0


SMALL = (
    "model: {layers: 4, hidden: 448, heads: 7, kv_heads: 7, vocab: 256, max_position: 100000000}\n"
    "hardware: {accelerator: h100-sxm, per_node: 4, memory_gib: 4}\ndata: python-stdlib\n"
    "parallel: {tensor: 1, pipeline: 1, offload: {optimizer: none, parameters: none, activations: none}, "
    "compile: none, micro_batch: 1, data: {zero: 3}}\n"
    "training: {sequence_length: 4096, global_batch: 4}\n"
)


def test_the_longest_sequence_of_each_method_fits_and_a_longer_one_does_not() -> None:
    spec = spec_of(SMALL)
    found = {one.method: one for one in longest(spec, ROOT, 4096)}
    assert list(found) == [NONE, *(name for name in METHODS if name not in (*ON_GRIDS, *BY_GRAPH))]
    for name, one in found.items():
        plan = plan_of(SMALL, *one.overrides)
        assert plan.prediction.memory.verdict == "green"
        assert plan.training.sequence_length == one.tokens
        assert (plan.layout.mesh.cp > 1) == (name != NONE)
        assert name in (NONE, plan.layout.sequence.method)
        longer = problem_of(SMALL, one.overrides[0], f"training.sequence_length={one.tokens + one.tokens // 16 + 256}")
        assert not fits(longer)
    # Ranks that share sequences hold less of each; gathered keys are held whole.
    assert found["ring"].tokens > 1.3 * found[NONE].tokens
    assert found["all_gather"].tokens <= found["ring"].tokens


@pytest.mark.parametrize("output", often(["json", "text"], ["json"]))
def test_what_if_of_lengths_tells_the_longest_of_each_method(
    output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL, encoding="utf-8")
    pins = ("recompute=full", "data.zero=3", "compile=none", "micro_batch=1")
    few = [word for pin in pins for word in ("--set", f"parallel.{pin}")]
    with pytest.raises(SystemExit) as end:
        run(["plan", str(path), "--vary", "sequence_length=4096,8192", "--output", output, *few])
    assert end.value.code == 0
    out = capsys.readouterr().out
    if output == "text":
        assert "Longest sequence that fits" in out
        return
    rows = json.loads(out)
    assert [row["with"] for row in rows[:2]] == [[f"training.sequence_length={n}"] for n in (4096, 8192)]
    methods_ = [row["method"] for row in rows[2:]]
    assert methods_ == [NONE, *(name for name in METHODS if name not in (*ON_GRIDS, *BY_GRAPH))]
    assert all(row["plan"]["verdict"] == "green" and row["longest_tokens"] > 8192 for row in rows[2:])


def test_no_length_that_is_tried_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Lengths under 256 are not tried: zero tokens would be a wrong answer."""
    rows: list[Any] = [([], Longest("ring", 0, []), None)]
    render_longest(rows, Console(width=120))
    assert "under 256" in capsys.readouterr().out
    (row,) = longest_rows(rows)
    assert row["longest_tokens"] == 0
    assert "256" in row["problem"]


def test_that_documents_are_not_counted_is_told() -> None:
    given = ("data={source: python-stdlib, attend: document}", "training.sequence_length=256")
    plan = make_plan(spec_of(MODEL + REST + LENGTH, *ALONE, *given), base_dir=ROOT, default_name="test").plan
    assert plan is not None
    assert any("documents in a sequence" in reason for reason in plan.reasons)
