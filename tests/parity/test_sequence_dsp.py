"""DSP: grids of tokens whose sharded axis changes between layers, against one process and a mask of all tokens."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import _sequence_dsp_worker as worker
import pytest
from _expected_traffic import sent_by_stages
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools, named
from _tensor_plans import HALVES, QUARTERS, tensor_plan
from often import chosen, often

from partool.cost.time.pipeline import stages_of_ranks
from partool.plan.layout import Mesh
from partool.plan.types import Plan

LAYERS = named(worker.CASES)
CHECKS = {"turns": worker.check_turns, "two models": worker.check_two_models}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [*LAYERS, *CHECKS])
@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.long) for ranks in (2, 4, 8))])
def test_layers_along_two_axes_equal_one_process(pools: Pools, ranks: int, name: str) -> None:
    """Loss, gradients and elements sent: odd grids, stages that end on rows, documents, recomputation, two models."""
    if name in LAYERS:
        pools.run(ranks, worker.check, LAYERS[name])
    else:
        pools.run(ranks, CHECKS[name])


# --- the whole trainer ---

ONE, FOUR, TWO_BY_TWO, PIPED, CUT = Mesh(), Mesh(cp=4), Mesh(cp=2, dp_shard=2), Mesh(cp=2, pp=2), Mesh(cp=2, tp=2)
GRID = (5, 7)
MODELS: dict[str, dict[str, Any]] = {
    "rows first": {"layer_types": ("row", "column", "row", "column"), "heads": 6, "kv_heads": 2, "head_dim": 4},
    "columns first": {
        "layer_types": ("column", "row", "row", "column"), "position": "learned", "max_position": 35,
        "tied_embeddings": True,
    },
}  # fmt: skip
STEPS = 3
ULYSSES = {"sequence_method": "ulysses", "sequence_order": "contiguous"}
"""The other method that knows grids: every rank has whole sequences within attention."""
Cases = dict[str, tuple[Plan, str]]
"""Plans by name, each with the model of the run of one process that it must equal."""


def make_plan(text: Path, model: str, mesh: Mesh, *, zero: int = 1, **layout: Any) -> Plan:
    plan = tensor_plan(
        text,
        mesh,
        model={"layers": 4, "grid": GRID} | MODELS[model],
        training={"sequence_length": GRID[0] * GRID[1]},
        settings={"steps": STEPS, "zero": zero},
        **{"sequence_method": "dsp", "sequence_order": "grid"} | layout,
    )
    documents = {"attend": "document"} if model == "columns first" else {}
    return plan.model_copy(update={"data": plan.data.model_copy(update=documents)})


@cache
def core_cases(text: Path) -> Cases:
    """Return plans of four ranks; boundaries of stages lie between layers that hold rows and columns."""
    rows, columns = (partial(make_plan, text, model) for model in MODELS)
    return {
        "zero-3 recomputed": (rows(FOUR, zero=3, recompute="full"), "rows first"),
        "zero-2 documents": (columns(TWO_BY_TWO, zero=2, recompute="selective"), "columns first"),
        "zb-v documents": (columns(PIPED, schedule="zb-v", stages=QUARTERS), "columns first"),
        "heads traded": (columns(FOUR, **ULYSSES), "columns first"),
        "tensor shares": (columns(CUT, sequence_norms=True, recompute="selective"), "columns first"),
    }


def further_cases(text: Path) -> Cases:
    """Return the rest of the combinations of four ranks."""
    found: Cases = {}
    for model in MODELS:
        make = partial(make_plan, text, model)
        for zero in range(4):
            found[f"{model} zero-{zero}"] = (make(FOUR, zero=zero), model)
        for policy in ("attention", "selective", "keep_attention", "full"):
            found[f"{model} {policy}"] = (make(TWO_BY_TWO, zero=3, recompute=policy), model)
        for schedule, stages in {"1f1b": HALVES, "zb-h1": HALVES, "zb-v": QUARTERS, "hanayo": QUARTERS}.items():
            found[f"{model} {schedule}"] = (make(PIPED, zero=3, schedule=schedule, stages=stages), model)
        found[f"{model} ulysses"] = (make(FOUR, zero=2, recompute="keep_attention", **ULYSSES), model)
        found[f"{model} tensor zero-0"] = (make(CUT, zero=0, recompute="attention"), model)
        found[f"{model} tensor"] = (make(CUT, tensor_overlap="backward"), model)
        found[f"{model} tensor shares"] = (make(CUT, zero=3, sequence_norms=True, tensor_overlap="backward"), model)
        found[f"{model} tensor shares compiled"] = (make(CUT, sequence_norms=True, compile="block"), model)
        found[f"{model} compiled"] = (make(TWO_BY_TWO, compile="block", recompute="selective"), model)
        found[f"{model} compiled whole"] = (make(FOUR, compile="block"), model)
    return found


def launch(pools: Pools, folder: Path, cases: Cases) -> Jobs:
    """Run the cases, their references, and one run that begins on four ranks and ends on one."""
    text = folder / "text"
    pools.close(4)  # cases of layers above keep a group open, and runs open their own
    jobs = Jobs(folder, pools)
    for name, (case, _) in cases.items():
        jobs.train(name, case, run=f"case {name}")
    jobs.train("stopped", make_plan(text, "rows first", FOUR, zero=2), run="crossed", stop_at=2)
    for model in MODELS:
        jobs.train(f"reference {model}", make_plan(text, model, ONE), run=f"reference {model}")
    jobs.train("alone", make_plan(text, "rows first", ONE), run="crossed", resume=True)
    return jobs


OFTEN = ("zero-3 recomputed", "tensor shares")
"""Cases that run each time."""


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text")
    return launch(pools, folder, chosen(request, core_cases(folder / "text")))


def assert_equal(jobs: Jobs, name: str, case: Plan, model: str) -> None:
    for rank in range(case.layout.mesh.world_size):
        assert jobs.ended(name, rank) == "done", name
    assert_same_state(jobs, f"case {name}", f"reference {model}")
    for kind, keys in {"step": ("loss", "grad_norm", "tokens"), "validation": ("loss",)}.items():
        wanted, got = (jobs.events(run, kind) for run in (f"reference {model}", f"case {name}"))
        assert len(wanted) > 0
        for key in keys:
            assert [event[key] for event in got] == pytest.approx([event[key] for event in wanted], rel=1e-10), name


def assert_same_state(jobs: Jobs, run: str, reference: str, *, at: int = STEPS) -> None:
    wanted, got = jobs.state(reference, step=at), jobs.state(run, step=STEPS)
    assert wanted.keys() == got.keys()
    for name, expected in wanted.items():
        assert float((got[name] - expected).abs().max()) <= 1e-10 * max(1.0, float(expected.abs().max())), name


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(core_cases(Path("text")), OFTEN))
def test_training_equals_one_process(ran: Jobs, name: str) -> None:
    assert_equal(ran, name, *core_cases(Path("text"))[name])


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often((name for name in core_cases(Path("text")) if name != "heads traded"), OFTEN))
def test_bytes_between_ranks_are_those_of_the_formula(ran: Jobs, name: str) -> None:
    plan, _ = core_cases(Path("text"))[name]
    layout, mesh, kinds = plan.layout, plan.layout.mesh, plan.model.layer_types
    tensor = mesh.tp if layout.tensor.sequence_norms else 1
    width = layout.micro_batch * layout.derived.accumulation * plan.model.hidden
    sent_bytes = []
    for rank in range(mesh.world_size):
        stages = stages_of_ranks(layout)[rank // (mesh.world_size // mesh.pp)]
        axes = [kinds[slice(*layout.pipeline.bounds[stage])] for stage in stages]
        place = rank // mesh.tp % mesh.cp * tensor + rank % mesh.tp % tensor
        expected = sent_by_stages(GRID, mesh.cp, place, axes, width, tensor=tensor)
        summary = next(event for event in ran.events(f"case {name}", "summary", rank) if event["scope"] == "rank")
        sent_bytes.append(summary["measures"]["traffic"]["sequence"]["value"])
        assert sent_bytes[-1] == sum(expected.bytes(8)), rank
    assert max(sent_bytes) > 0


@pytest.mark.timeout(500)
def test_a_run_goes_on_without_the_others(ran: Jobs) -> None:
    assert ran.ended("stopped", rank=3) == "Preempted: stopped by SIGTERM after step 2"
    assert ran.ended("alone") == "done"
    assert_same_state(ran, "crossed", "reference rows first")
    with pytest.raises(AssertionError):
        assert_same_state(ran, "crossed", "reference rows first", at=2)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_combination_equals_one_process(pools: Pools, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    cases = further_cases(tmp_path / "text")
    jobs = launch(pools, tmp_path, cases)
    for name, (case, model) in cases.items():
        assert_equal(jobs, name, case, model)
