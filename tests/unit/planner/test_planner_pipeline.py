"""Pipelines in plans: every field of the section, what is found wrong with it, what the search makes of it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from layouts import laid, new_layout
from often import named, often
from planned import findings_of, plan_of, problem_of, result_of

from partool.cli.main import run
from partool.cost.case import SCHEDULES
from partool.cost.time.pipeline import messages, sent_bytes
from partool.cost.training.predict import stage_times
from partool.plan.schedule import placement_of, schedule_of
from partool.plan.types import Plan
from partool.planner.cost_job import cost_job
from partool.planner.explain.summary import why_lost
from partool.planner.resolve import resolve
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import Priced, bounds_s, room
from partool.planner.search.refine import refined
from partool.report.terminal_timeline import summary
from partool.report.timeline import planned
from partool.schedule import Action, Schedule, generate, schedule_hash, simulate, to_text, validate, with_transfers
from partool.schedule.weipipe import volume
from partool.spec import load_text

HEAD = """\
model: {layers: LAYERS, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: DEVICE, per_node: 4}
data: python-stdlib
training: {global_batch: BATCH, sequence_length: 128, steps: 10}
parallel: {PARALLEL}
"""


def text(parallel: str, *, batch: int = 8, layers: int = 8, device: str = "cpu") -> str:
    values = {"PARALLEL": parallel, "BATCH": str(batch), "LAYERS": str(layers), "DEVICE": device}
    found = HEAD
    for name, value in values.items():
        found = found.replace(name, value)
    return found


PLANS: dict[str, tuple[str, tuple[str, int, int]]] = {
    "one wave": ("{stages: 4, schedule: hanayo, waves: 1}", ("hanayo", 2, 0)),
    "two waves of two ranks": ("{stages: 2, schedule: hanayo, waves: 2}", ("hanayo", 4, 0)),
    "waves as chunks": ("{stages: 2, schedule: hanayo, chunks: 4}", ("hanayo", 4, 0)),
    "waves alone": ("{stages: 4, waves: 1}", ("hanayo", 2, 0)),
    "less memory": ("{stages: 2, schedule: hanayo, waves: 1, in_flight: 2}", ("hanayo", 2, 2)),
    "a V": ("{stages: 4, schedule: zb-v}", ("zb-v", 2, 0)),
    "a V for less memory": ("{stages: 4, schedule: zb-v, in_flight: 3}", ("zb-v", 2, 3)),
    "weights travel": ("{stages: 4, schedule: weipipe}", ("weipipe", 1, 0)),
    "in smaller pieces": ("{stages: 2, schedule: weipipe, chunks: 2}", ("weipipe", 2, 0)),
    "chunks": ("{stages: 2, schedule: interleaved, chunks: 4}", ("interleaved", 4, 0)),
}


@pytest.mark.parametrize(("pipeline", "wanted"), PLANS.values(), ids=PLANS)
def test_what_is_pinned_is_planned(pipeline: str, wanted: tuple[str, int, int], tmp_path: Path) -> None:
    plan = plan_of(text(f"micro_batch: 1, pipeline: {pipeline}"), folder=tmp_path)
    layout = plan.layout
    assert (layout.pipeline.schedule, layout.pipeline.chunks, layout.pipeline.in_flight) == wanted
    schedule = schedule_of(layout)
    assert validate(schedule) == []
    assert schedule.placement == placement_of(layout)
    assert layout.derived.schedule_hash == schedule_hash(schedule)
    assert len(layout.pipeline.bounds) == layout.mesh.pp * layout.pipeline.chunks
    assert plan.runnable


def test_a_plan_of_other_lists_is_refused(tmp_path: Path) -> None:
    layout = plan_of(text("micro_batch: 1, pipeline: {stages: 4, schedule: hanayo, waves: 1}"), folder=tmp_path).layout
    with pytest.raises(ValueError, match="zb-v is not the planned one"):
        schedule_of(laid(layout, schedule="zb-v"))


def test_layers_are_split_as_given(tmp_path: Path) -> None:
    plan = plan_of(text("pipeline: {stages: 2, schedule: hanayo, layers: [3, 3, 1, 1]}"), folder=tmp_path)
    assert plan.layout.pipeline.bounds == ((0, 3), (3, 6), (6, 7), (7, 8))
    open_schedule = plan_of(text("pipeline: {layers: [1, 3, 3, 1]}"), folder=tmp_path).layout
    assert open_schedule.pipeline.bounds == ((0, 1), (1, 4), (4, 7), (7, 8))
    assert open_schedule.mesh.pp * open_schedule.pipeline.chunks == 4


def test_a_schedule_of_ones_own(tmp_path: Path) -> None:
    own = generate("hanayo", 4, 4, 2)
    (tmp_path / "my.csv").write_text("# mine\n" + to_text(own))
    plan = plan_of(text("pipeline: {schedule: {file: my.csv}}"), folder=tmp_path)
    layout = plan.layout
    assert (layout.pipeline.schedule, layout.mesh.pp, layout.pipeline.chunks, layout.derived.accumulation) == (
        "file",
        4,
        2,
        4,
    )
    assert schedule_of(layout).lists == own.lists
    named = plan_of(text("pipeline: {stages: 4, schedule: hanayo, waves: 1}, micro_batch: 2"), folder=tmp_path)
    assert plan.prediction.time.step_time_s == pytest.approx(named.prediction.time.step_time_s, rel=1e-9)
    # Of a schedule of one's own it is not known that the last stage holds one micro-batch's loss at a time.
    late = {"loss", "activations", "fragmentation"}
    for mine, its in zip(plan.prediction.memory.ranks, named.prediction.memory.ranks, strict=True):
        assert {k: v for k, v in mine.terms_bytes.items() if k not in late} == {
            k: v for k, v in its.terms_bytes.items() if k not in late
        }
        assert all(mine.terms_bytes[term] >= its.terms_bytes[term] for term in late)
    again = Plan.from_json(plan.to_json())
    assert schedule_of(again.layout) == schedule_of(layout)


WRONG: dict[str, tuple[str, int, str, str]] = {
    "rounds": (
        "micro_batch: 1, pipeline: {stages: 4, schedule: interleaved, chunks: 2}",
        6,
        "PT430",
        "global_batch: 8",
    ),
    "rounds below": ("micro_batch: 1, pipeline: {stages: 4, schedule: weipipe}", 9, "PT430", "global_batch: 8"),
    "any size": ("pipeline: {stages: 4, schedule: weipipe}", 6, "PT430", "global_batch: 8"),
    "data ranks": (
        "tensor: 1, sequence: 1, micro_batch: 2, pipeline: {stages: 2, schedule: weipipe}", 12, "PT430",
        "global_batch: 16",
    ),
    "sum": ("pipeline: {stages: 2, schedule: 1f1b, layers: [3, 4]}", 8, "PT431", "add 1"),
    "waves": ("pipeline: {stages: 4, schedule: hanayo, waves: 2}", 8, "PT264", "use at most 1"),
}  # fmt: skip


@pytest.mark.parametrize(("parallel", "batch", "code", "help"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_found_with_the_nearest_that_can(
    parallel: str, batch: int, code: str, help: str, tmp_path: Path
) -> None:
    made = result_of(text(parallel, batch=batch), folder=tmp_path)
    plan, found = made.plan, made.diagnostics
    assert plan is None
    (error,) = [finding for finding in found if finding.severity == "error"]
    assert error.code == code
    assert help in error.help
    if code == "PT430":
        plan_of(text(parallel, batch=int(error.help.rsplit(" ", 1)[1])), folder=tmp_path)


BATCHES: dict[str, tuple[str, int, str, str]] = {
    "one micro-batch": (
        "tensor: 1, sequence: 1, micro_batch: 8, pipeline: {stages: 4, schedule: weipipe}", 8,
        "leaves 1 micro-batch per rank and step; weipipe takes multiples of the 4 pipeline ranks",
        "use micro_batch: 2, or global_batch: 32",
    ),
    "two": (
        "micro_batch: 4, pipeline: {stages: 4, schedule: interleaved}", 8,
        "leaves 2 micro-batches per rank and step; interleaved takes multiples of the 4 pipeline ranks",
        "use micro_batch: 2, or global_batch: 16",
    ),
    "no size will do": (
        "pipeline: {stages: 4, schedule: weipipe}", 6,
        "leaves 6, 3, 2 or 1 micro-batches per rank and step; weipipe takes multiples of the 4 pipeline ranks",
        "the nearest number is 8: use global_batch: 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parallel", "batch", "message", "help"), BATCHES.values(), ids=BATCHES)
def test_micro_batches_that_work_are_offered(
    parallel: str, batch: int, message: str, help: str, tmp_path: Path
) -> None:
    found = findings_of(text(parallel, batch=batch), folder=tmp_path)
    (error,) = [finding for finding in found if finding.severity == "error"]
    assert (error.code, error.message, error.help) == ("PT430", f"global_batch: {batch} {message}", help)
    if "use micro_batch" in help:
        plan_of(text(re.sub("micro_batch: .", "micro_batch: 2", parallel), batch=batch), folder=tmp_path)


@pytest.mark.parametrize("model", ["", "gpt2"])
def test_layers_of_the_model_are_named(model: str, tmp_path: Path) -> None:
    spec = text("pipeline: {stages: 4, schedule: 1f1b, layers: [4, 4]}")
    if model:
        spec = re.sub("^model: .*", f"model: {model}", spec)
    (found,) = findings_of(spec, folder=tmp_path)
    assert (found.code, found.help) == (
        "PT431",
        f"give 4 numbers that sum up to the model's {12 if model else 8} layers",
    )


def test_layers_match_the_stages_of_ones_own_schedule(tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_text(to_text(generate("1f1b", 2, 4)))
    spec = "pipeline: {schedule: {file: my.csv}, layers: LAYERS}"
    assert plan_of(text(spec.replace("LAYERS", "[3, 5]")), folder=tmp_path).layout.pipeline.layers == (3, 5)
    (wrong,) = findings_of(text(spec.replace("LAYERS", "[3, 2, 3]")), folder=tmp_path)
    assert (wrong.code, wrong.help) == ("PT431", "give 2 numbers that sum up to 8")


def test_a_file_that_is_not_there_is_told_from_one_that_is_no_schedule(tmp_path: Path) -> None:
    spec = text("pipeline: {schedule: {file: my.csv}}")
    (missing,) = findings_of(spec, folder=tmp_path)
    (tmp_path / "my.csv").write_text("hello\n")
    (wrong,) = findings_of(spec, folder=tmp_path)
    assert missing.code == wrong.code == "PT432"
    assert "partool schedule" not in missing.help
    (command,) = re.findall("partool (schedule .*) writes one", wrong.help)
    with pytest.raises(SystemExit) as end:
        run(command.replace("my.csv", str(tmp_path / "my.csv")).split())
    assert not end.value.code
    plan_of(spec, folder=tmp_path)


def test_findings_about_a_file_name_its_rows(tmp_path: Path) -> None:
    lists = to_text(generate("1f1b", 2, 4))
    spec = text("pipeline: {stages: 2, schedule: {file: my.csv}}")
    for name, broken, code, words in (
        ("a cell", "# mine\n" + lists.replace("0F1", "0Q1", 1), "PT432", "row 2"),
        ("twice", "# mine\n" + lists.replace("1F0,", "1F0,1F0,", 1), "PT433", "row 3 at 1F0: 1F0 is there 2 times"),
        ("rows", to_text(generate("1f1b", 4, 4)), "PT437", "4 rows"),
        ("weights", to_text(generate("weipipe", 2, 4)), "PT437", "weights that travel"),
    ):
        (tmp_path / "my.csv").write_text(broken)
        made = result_of(spec, folder=tmp_path)
        plan, found = made.plan, made.diagnostics
        assert plan is None, name
        errors = [finding for finding in found if finding.severity == "error"]
        assert {finding.code for finding in errors} == {code}, name
        assert any(words in finding.message for finding in errors), (name, errors)


def _gpipe(placement: tuple[int, ...], micro_batches: int) -> Schedule:
    """Return all forward passes, then all backward passes of stages that lie anywhere."""
    order = tuple(
        tuple(
            Action(kind, stage, batch)
            for kind, stages in (("F", range(len(placement))), ("B", reversed(range(len(placement)))))
            for stage in stages
            if placement[stage] == rank
            for batch in range(micro_batches)
        )
        for rank in range(max(placement) + 1)
    )
    lists = with_transfers(order, placement)
    return Schedule("own", len(order), micro_batches, max(Counter(placement).values()), placement, lists)


PLACEMENTS = [((0, 1, 0),), ((0, 1, 1, 1, 0),), ((0, 1, 2, 3, 1),), ((0, 0, 1, 2, 3, 3, 3),)]


@pytest.mark.parametrize("placement", often(PLACEMENTS, PLACEMENTS[2:]))
def test_ranks_of_own_lists_may_have_different_numbers_of_stages(placement: tuple[int, ...], tmp_path: Path) -> None:
    own = _gpipe(placement, 4)
    assert validate(own) == []
    (tmp_path / "my.csv").write_text(to_text(own))
    for parallel in (
        "data: {zero: 0}, recompute: none, pipeline: {schedule: {file: my.csv}}",
        "pipeline: {schedule: {file: my.csv}}",
    ):
        spec = load_text(text(parallel)).spec
        assert spec is not None
        problem = resolve(spec, tmp_path).problem
        assert problem is not None
        space, policies = build(problem), np.arange(len(build(problem).policies))
        assert space.size
        for group in range(space.size):
            for policy in policies[space.allowed(np.full(len(policies), group), policies)]:
                row = space.rows(np.array([group]), np.array([policy]))
                exact = Priced(problem, layout_of(problem, space.rows(group, policy)))
                assert len(exact.layout.pipeline.bounds) == len(placement)
                assert float(bounds_s(problem, row)[0]) <= exact.time.step_time_s * (1.0 + 1e-9), exact.layout
                assert float(np.ravel(room(problem, row).total_bytes)[0]) <= 1.5 * exact.memory.total_bytes
        plan = plan_of(text(parallel), folder=tmp_path)
        assert placement_of(plan.layout) == placement
        assert schedule_of(plan.layout).lists == own.lists
    sizes = [stop - start for start, stop in plan.layout.pipeline.bounds]
    layers = [sum(size for size, where in zip(sizes, placement, strict=True) if where == rank) for rank in range(4)]
    held = [rank.terms_bytes["optimizer"] for rank in plan.prediction.memory.ranks]
    assert layers[held.index(max(held))] == max(layers)


def test_own_lists_that_halve_passes_are_not_compiled(tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_text(to_text(generate("zb-h1", 4, 4)))
    pipeline = "pipeline: {stages: 4, schedule: {file: my.csv}}"
    assert plan_of(text(pipeline, device="h100-sxm"), folder=tmp_path).layout.compile == "none"
    found = findings_of(text(f"compile: block, {pipeline}", device="h100-sxm"), folder=tmp_path)
    assert "PT434" in {finding.code for finding in found}


def test_layouts_that_can_be_compiled_stand_beside_those_that_cannot() -> None:
    problem = problem_of(text("pipeline: 4, micro_batch: 1", device="h100-sxm"))
    groups = build(problem).groups
    names = {SCHEDULES[index]: bool(done) for index, done in zip(groups.schedule, groups.compiled, strict=True)}
    assert names == {
        "gpipe": True, "1f1b": True, "interleaved": True, "zb-h1": False, "zb-v": False, "weipipe": False,
    }  # fmt: skip
    pinned = build(problem_of(text("compile: block, pipeline: 4, micro_batch: 1", device="h100-sxm"))).groups
    assert {SCHEDULES[index] for index in pinned.schedule} == {"gpipe", "1f1b", "interleaved"}


EVERY = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "hanayo", "weipipe"}
SPACES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "CPU": ({"parallel": "pipeline: 4"}, EVERY),
    "few micro-batches": ({"parallel": "pipeline: 2", "batch": 4, "layers": 9}, EVERY),
    "devices": ({"parallel": "pipeline: 4", "device": "h100-sxm", "batch": 16}, EVERY),
    "layers given": (
        {"parallel": "pipeline: {stages: 2, layers: [1, 5, 1, 1]}"}, {"interleaved", "zb-v", "hanayo", "weipipe"}
    ),
    "less memory": (
        {"parallel": "pipeline: {stages: 4, schedule: hanayo, waves: 1, in_flight: 4}", "batch": 16}, {"hanayo"}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("case", "schedules"), named(SPACES, ["CPU", "layers given", "less memory"]))
def test_bounds_of_every_schedule_are_below_exact_times(case: dict[str, Any], schedules: set[str]) -> None:
    problem = problem_of(text(**case))
    space = build(problem)
    seen = set()
    everything = np.arange(len(space.policies))
    for group in range(space.size):
        for policy in np.flatnonzero(space.allowed(np.full(len(everything), group), everything))[:2]:
            row = space.rows(np.array([group]), np.array([policy]))
            exact = Priced(problem, layout_of(problem, space.rows(group, policy)))
            time_s = exact.time.step_time_s * (1.0 + 1e-9)
            assert float(bounds_s(problem, row)[0]) <= time_s, exact.layout
            assert float(np.ravel(refined(problem, row).bound_s)[0]) <= time_s, exact.layout
            seen.add(exact.layout.pipeline.schedule)
    assert seen == schedules


def test_nothing_that_fits_is_taken_for_too_large() -> None:
    """Columns are not above the exact memory by more than the search allows for."""
    problem = problem_of(text("pipeline: 4", layers=16))
    space = build(problem)
    policy = int(np.flatnonzero(space.only)[0])
    for group in range(space.size):
        row = space.rows(np.array([group]), np.array([policy]))
        exact = Priced(problem, layout_of(problem, space.rows(group, policy))).memory.total_bytes
        assert float(np.ravel(room(problem, row).total_bytes)[0]) <= 1.03 * exact


def test_bytes_that_are_sent(tmp_path: Path) -> None:
    hanayo = plan_of(
        text("micro_batch: 1, pipeline: {stages: 2, schedule: hanayo, waves: 2}, data: {zero: 0}"), folder=tmp_path
    )
    layout, m, waves = hanayo.layout, hanayo.layout.derived.accumulation, 2
    # 4 M W (P - 1) messages in all (Hanayo), of which two ranks send half each.
    sent = messages(cost_job(problem_of(text("pipeline: {stages: 2}"))), layout)
    assert sent == 4 * m * waves // 2
    boundary = 128 * 64 * 2
    assert hanayo.prediction.time.traffic_bytes["pipeline"] == sent * boundary
    ring = plan_of(
        text("micro_batch: 1, pipeline: {stages: 2, schedule: weipipe}, data: {zero: 0}", batch=32), folder=tmp_path
    )
    job = cost_job(problem_of(text("pipeline: {stages: 2, schedule: weipipe}", batch=32)))
    elements = [4 * (4 * 64 * 64 + 3 * 64 * ring.model.ffn_hidden + 2 * 64)] * 2
    counted = volume(schedule_of(ring.layout), [2 * one for one in elements], [4 * one for one in elements])
    assert sent_bytes(job, ring.layout, job.master_bytes) == max(counted)


def test_the_time_of_weights_that_travel_is_that_of_the_lists(tmp_path: Path) -> None:
    spec = text("micro_batch: 1, pipeline: {stages: 4, schedule: weipipe}, data: {zero: 0}", device="h100-sxm")
    plan, job = plan_of(spec, folder=tmp_path), cost_job(problem_of(spec), "none")
    times = stage_times(job, plan.layout)
    line = simulate(schedule_of(plan.layout), times)
    terms = plan.prediction.time.terms_s
    assert terms["forward"] + terms["backward"] == pytest.approx(sum(line.busy_s) / 4, rel=1e-9)
    assert terms["pipeline_bubble"] == pytest.approx(line.makespan_s - sum(line.busy_s) / 4, rel=1e-6)


@pytest.mark.parametrize("device", ["cpu", "h100-sxm"])
def test_plans_say_why_their_schedule(device: str, tmp_path: Path) -> None:
    reasons = " ".join(plan_of(text("pipeline: 4", device=device, batch=16), folder=tmp_path).reasons)
    assert "ranks idle" in reasons
    assert "With the same ranks and micro-batches" in reasons
    assert "WeiPipe" in reasons
    assert ("Blocks are compiled" in reasons) == (device != "cpu")


def test_weipipe_is_weighed_by_what_travels(tmp_path: Path) -> None:
    """Weights are less from as many tokens on as a stage's copies weigh activations of so many."""
    reasons = plan_of(text("micro_batch: 1, pipeline: {stages: 4, schedule: 1f1b}"), folder=tmp_path).reasons
    (said,) = [reason for reason in reasons if reason.startswith("WeiPipe")]
    assert "weights are less from" in said
    assert "there are 128" in said
    odd = plan_of(text("micro_batch: 1, pipeline: {stages: 4, schedule: 1f1b}", batch=6), folder=tmp_path).reasons
    assert any("multiples of 4 micro-batches, not 6" in reason for reason in odd)


ASKED: dict[str, tuple[str, tuple[str, ...]]] = {
    "waves": ("{waves: 2}", ("waves: 2 asks for a pipeline", "waves: 2 asks for hanayo", "rules it out (waves: 2)")),
    "in flight": ("{stages: 2, in_flight: 2}", ("in_flight: 2 leaves zb-v and hanayo", "(in_flight: 2)")),
    "chunks": ("{chunks: 2}", ("chunks: 2 asks for a pipeline", "leaves interleaved, zb-v, hanayo and weipipe")),
    "layers": ("{layers: [1, 3, 3, 1]}", ("layers gives 4 stages",)),
    "a file": ("{schedule: {file: my.csv}}", ("Pipeline 2: the schedule's file has 2 rows",)),
    "weights travel": ("{stages: 4, schedule: weipipe}", ("Recompute full: WeiPipe keeps the inputs of stages only",)),
}


@pytest.mark.parametrize(("pipeline", "wanted"), ASKED.values(), ids=ASKED)
def test_reasons_name_what_the_spec_asks_for(pipeline: str, wanted: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "my.csv").write_text(to_text(generate("1f1b", 2, 4)))
    reasons = " ".join(plan_of(text(f"pipeline: {pipeline}"), folder=tmp_path).reasons)
    for words in wanted:
        assert words in reasons
    for false in ("parallelism fits", "layouts that keep more", "it does not fit"):
        assert false not in reasons


def test_a_batch_that_only_a_pipeline_takes_is_no_matter_of_memory(tmp_path: Path) -> None:
    reasons = plan_of(text("tensor: 1, sequence: 1", batch=2), folder=tmp_path).reasons
    assert any(
        reason.endswith("the spec's sizes leave no layout without pipeline parallelism.") for reason in reasons
    ), reasons


def test_a_pinned_v_is_doubted_where_it_idles_more(tmp_path: Path) -> None:
    """Its list is made for equal times; stages whose times are far from these wait for each other."""
    uneven = plan_of(text("micro_batch: 1, pipeline: {stages: 4, schedule: zb-v}"), folder=tmp_path)
    (said,) = [reason for reason in uneven.reasons if "made for equal times" in reason]
    other = plan_of(text("micro_batch: 1, pipeline: {stages: 4, schedule: interleaved, chunks: 2}"), folder=tmp_path)
    assert said.startswith(f"interleaved × 2 chunks would idle {planned(other, 10**6).bubble:.1%}")
    even = text("micro_batch: 1, pipeline: {stages: 4, schedule: 1f1b}")
    assert not any("made for equal times" in reason for reason in plan_of(even, folder=tmp_path).reasons)


@pytest.mark.parametrize(
    ("parallel", "device"),
    [
        ("pipeline: {stages: 2}, micro_batch: 1, recompute: [full × 3, none × 5]", "h100-sxm"),
        ("pipeline: {stages: 2, schedule: interleaved, chunks: 2}, micro_batch: 1", "h100-sxm"),
        ("pipeline: {stages: 4, schedule: weipipe}, micro_batch: 1, data: {zero: 0}", "cpu"),
        ("pipeline: {stages: 4, schedule: hanayo, waves: 1}, micro_batch: 1", "cpu"),
    ],
)  # fmt: skip
def test_a_plan_and_its_timeline_say_the_same_idle_share(parallel: str, device: str, tmp_path: Path) -> None:
    """The share of all ranks, not that of the busiest one, which is the term ``pipeline_bubble``."""
    plan = plan_of(text(parallel, device=device), folder=tmp_path)
    (said,) = [reason for reason in plan.reasons if reason.startswith("Schedule")]
    drawing = planned(plan, 10**6)
    assert f"ranks idle {drawing.bubble:.1%} of the passes' time" in said
    assert f"ranks idle {drawing.bubble:.1%} of it" in summary(drawing)
    assert drawing.bubble > 0.01


def _layout(**fields: Any) -> Any:
    one = {
        "zero": 0,
        "micro_batch": 1,
        "accumulation": 1,
        "recompute": ("none",),
        "compile": "none",
        "stages": ((0, 1),),
    }
    return new_layout(**one, **fields)


_PROVEN = SimpleNamespace(spec=SimpleNamespace(limits=SimpleNamespace(prefer="proven")), asked=frozenset())


@dataclass
class _Fitting:
    """A layout that is sure to fit, as far as reasons read it."""

    step_time_s: float
    memory: Any
    terms_s: Any = field(default_factory=dict)
    layout: Any = field(default_factory=_layout)
    fits: bool = True
    safe: bool = True
    host_bytes: int = 0
    risk: float = 0.0
    unfit: float = 0.0
    score_s: float = 1.0
    problem: Any = field(default_factory=lambda: _PROVEN)

    @property
    def factor(self) -> float:
        return 1.0 + self.risk + 0.25 * self.unfit


def test_layouts_that_are_hardly_faster_say_why_they_are_not_taken() -> None:
    def priced(step_time_s: float, **values: Any) -> Any:
        memory = SimpleNamespace(total_bytes=2**30, capacity_bytes=2**31, fit_probability=0.5)
        return _Fitting(step_time_s, memory, **values)

    best, offloaded = priced(1.0), _layout(offload_optimizer="cpu")
    error = "predictions for an offloaded optimizer err by 20%"
    assert why_lost(best, priced(0.9, layout=offloaded, risk=0.2)) == f"10.0 % faster on paper, but {error}"
    assert why_lost(best, priced(0.9991)).endswith(
        "its memory and settings are charged 0.00%, those of this plan 0.00%"
    )
    assert why_lost(best, priced(0.9, unfit=0.5)).endswith("but it fits with 50% where this one does with 97%")
    assert why_lost(best, priced(1.0, unfit=0.5)) == "as fast; fits with a probability of 50% only"
    assert why_lost(best, priced(0.9, fits=False, host_bytes=3 * 2**30)).startswith("3.0 GiB of host memory")


@pytest.mark.parametrize("name", ["hanayo", "weipipe"])
def test_examples_plan_and_can_run(name: str) -> None:
    root = Path(__file__).parents[3]
    plan = plan_of((root / f"specs/{name}.yaml").read_text(), folder=root / "specs")
    assert plan.layout.pipeline.schedule == name
    assert plan.runnable


def test_runners_up_without_stages_are_looked_at() -> None:
    """Bounds of pipelines are low: by these alone, pipelines far slower would stand before other ZeRO stages."""
    root = Path(__file__).parents[3]
    plan = plan_of((root / "specs/quickstart.yaml").read_text(), folder=root / "specs")
    assert any(other.summary.startswith("ZeRO-0 over 2 ranks, micro-batch") for other in plan.alternatives)
    next_best = [one.step_time_s for one in plan.alternatives if one.step_time_s and not one.role]
    assert all(step_s < 1.1 * plan.prediction.time.step_time_s for step_s in next_best)
