"""The whole trainer with tensor parallelism, alone and with all else, against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from _expected_traffic import tensor_calls
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tensor_plans import EVEN, FIVE, HALVES, LATENT, ONE, QUARTERS, SHARED, STEPS, TIED, tensor_plan
from often import chosen, often
from safetensors.torch import load_file
from test_checkpoint import stored_values

from partool.cost.time.pipeline import stages_of_ranks
from partool.plan.event_log import read_events
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.work.training import TrainingWork
from partool_runtime.checkpoint import step_folder

TWO_BY_TWO = Mesh(tp=2, dp_shard=2)
PIPED = Mesh(tp=2, pp=2)
FOUR = Mesh(tp=4)
MODELS: dict[str, dict[str, Any]] = {
    "five": FIVE,
    "tied": TIED,
    "shared": SHARED,
    "even": EVEN,
    "latent": LATENT,
    "frozen latent": LATENT,
}
NORMS = {"sequence_norms": True}
APART: dict[str, Any] = {"gather": "sequential", "prefetch": 2, "persistent": 40}
FROZEN = ("embed.*", "layers.[01].*", "layers.2.attention_norm.weight")
Cases = dict[str, tuple[Plan, str]]
"""Plans by name, each with the run of one process that it must equal."""


@cache
def core_cases(text: Path) -> Cases:
    """Return a few plans of four ranks that together use everything once."""
    make = partial(tensor_plan, text)
    return {
        "four shares": (make(FOUR, model=TIED, **NORMS), "tied"),
        "zero-0 recomputed": (make(Mesh(tp=2, dp_replicate=2), settings={"zero": 0}, recompute="full"), "five"),
        "zero-1 shared keys": (make(TWO_BY_TWO, model=SHARED, tensor_overlap="backward"), "shared"),
        "zero-3 tied in chunks": (make(TWO_BY_TWO, model=TIED, settings={"zero": 3}, tensor_chunks=2, **APART), "tied"),
        "1f1b shares": (make(PIPED, schedule="1f1b", stages=HALVES, model=TIED, **NORMS), "tied"),
        "zb-v": (make(PIPED, schedule="zb-v", stages=QUARTERS, model=SHARED), "shared"),
        "zb-v latent shares": (make(PIPED, schedule="zb-v", stages=QUARTERS, model=LATENT, **NORMS), "latent"),
        "two dimensions in a pipeline": (
            make(Mesh(tp=2, pp=2), schedule="1f1b", stages=HALVES, model=EVEN, tensor_inner=2),
            "even",
        ),
    }


def further_cases(text: Path) -> Cases:
    """Return the rest of the combinations of four ranks."""
    make = partial(tensor_plan, text)
    found: Cases = {}
    for zero in range(4):
        for title, fields in {"plain": {}, "shares": NORMS, "overlapped": {"tensor_overlap": "backward"}}.items():
            mesh = Mesh(tp=2, dp_replicate=2) if zero == 0 else TWO_BY_TWO
            found[f"zero-{zero} {title}"] = (make(mesh, settings={"zero": zero}, **fields), "five")
    for name, stages in {"1f1b": HALVES, "zb-h1": HALVES, "zb-v": QUARTERS, "hanayo": QUARTERS}.items():
        for title, fields in {"plain": {}, "shares": NORMS, "chunks": {"tensor_chunks": 3}}.items():
            found[f"{name} {title}"] = (make(PIPED, schedule=name, stages=stages, model=TIED, **fields), "tied")
    for policy in ("selective", "attention", "full"):
        for title, fields in {"plain": {}, "shares": NORMS | {"tensor_overlap": "backward"}}.items():
            found[f"{policy} {title}"] = (make(TWO_BY_TWO, recompute=policy, model=SHARED, **fields), "shared")
        found[f"{policy} two dimensions"] = (make(FOUR, recompute=policy, model=EVEN, tensor_inner=2), "even")
    compiled = partial(make, TWO_BY_TWO, compile="block")
    return found | {
        "compiled": (compiled(), "five"),
        "compiled shares": (compiled(model=SHARED, tensor_overlap="backward", **NORMS), "shared"),
        "compiled recomputed": (compiled(recompute="selective", tensor_chunks=2), "five"),
        "compiled two dimensions": (make(FOUR, model=EVEN, tensor_inner=2, compile="block"), "even"),
        "four": (make(FOUR), "five"),
        "leaves": (
            make(Mesh(tp=2, dp_replicate=2), model=SHARED, settings={"zero": 0}, leaves=("layers.*.ffn",)),
            "shared",
        ),
        "zero-3 leaves shares": (
            make(TWO_BY_TWO, model=SHARED, settings={"zero": 3}, leaves=("layers.*.ffn",), **APART, **NORMS),
            "shared",
        ),
        "zero-2 shares overlapped": (
            make(TWO_BY_TWO, model=SHARED, settings={"zero": 2}, tensor_overlap="backward", **NORMS),
            "shared",
        ),
        "two dimensions": (make(FOUR, model=EVEN, tensor_inner=2), "even"),
        "frozen": (make(TWO_BY_TWO, frozen=FROZEN, **NORMS), "frozen"),
        "frozen in a pipeline": (make(PIPED, schedule="zb-h1", stages=HALVES, frozen=FROZEN), "frozen"),
        "replicas": (make(Mesh(tp=2, dp_replicate=2), settings={"zero": 1}), "five"),
    }


def latent_cases(text: Path) -> Cases:
    """Return combinations of latent attention on four ranks."""
    make = partial(tensor_plan, text, model=LATENT)
    found: Cases = {
        "four shares": (make(FOUR, **NORMS), "latent"),
        "compiled": (make(TWO_BY_TWO, compile="block"), "latent"),
        "compiled shares": (make(TWO_BY_TWO, compile="block", recompute="selective", **NORMS), "latent"),
        "frozen": (make(TWO_BY_TWO, frozen=FROZEN, **NORMS), "frozen latent"),
        "leaves": (make(TWO_BY_TWO, settings={"zero": 3}, leaves=("layers.*.attention",), **APART, **NORMS), "latent"),
    }
    for zero, policy in enumerate(("full", "attention", "selective", "keep_attention")):
        for title, fields in {"plain": {}, "shares": NORMS | {"tensor_overlap": "backward"}}.items():
            mesh = Mesh(tp=2, dp_replicate=2) if zero == 0 else TWO_BY_TWO
            plan = make(mesh, recompute=policy, settings={"zero": zero}, **fields)
            found[f"zero-{zero} {policy} {title}"] = plan, "latent"
    for name, stages in {"1f1b": HALVES, "zb-h1": HALVES, "zb-v": QUARTERS, "hanayo": QUARTERS}.items():
        found[name] = make(PIPED, schedule=name, stages=stages), "latent"
    return found


def launch(pools: Pools, folder: Path, cases: Cases) -> Jobs:
    """Run the cases, their references, and one run that goes through three layouts."""
    text = folder / "text"
    jobs, make = Jobs(folder, pools), partial(tensor_plan, text)
    for name, (case, _) in cases.items():
        jobs.train(name, case, run=f"case {name}")
    overlapped = make(TWO_BY_TWO, model=SHARED, settings={"zero": 3}, tensor_overlap="backward", **NORMS)
    jobs.train("stopped", overlapped, run="crossed", stop_at=1)
    piped = make(PIPED, schedule="1f1b", stages=HALVES, model=SHARED, settings={"steps": 2}, **NORMS)
    jobs.train("resumed", piped, run="crossed", resume=True)
    for name in {reference for _, reference in cases.values()} | {"shared"}:
        plain = make(ONE, model=MODELS.get(name), frozen=FROZEN if name.startswith("frozen") else ())
        jobs.train(f"reference {name}", plain, run=f"reference {name}")
    jobs.train("alone", make(ONE, model=SHARED), run="crossed", resume=True)
    return jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text")
    return folder


OFTEN = ("four shares", "zero-3 tied in chunks", "zb-v latent shares")
"""Cases that run each time."""
LOOKED_AT = ("four shares", "zb-v latent shares")
"""Cases that tests without parameters look at."""


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, pools: Pools, folder: Path) -> Jobs:
    cases = core_cases(folder / "text")
    return launch(pools, folder, chosen(request, cases) | {name: cases[name] for name in LOOKED_AT})


def assert_equal(jobs: Jobs, name: str, case: Plan, reference: str) -> None:
    for rank in range(case.layout.mesh.world_size):
        assert jobs.ended(name, rank) == "done", name
    steps = case.training.steps
    assert_same_state(jobs, f"case {name}", f"reference {reference}", at=steps, of=steps)
    for kind in ("step", "validation"):
        wanted, got = (jobs.events(run, kind) for run in (f"reference {reference}", f"case {name}"))
        for key in ("loss", "grad_norm") if kind == "step" else ("loss",):
            assert [event[key] for event in got] == pytest.approx([event[key] for event in wanted], rel=1e-11), name


def assert_same_state(
    jobs: Jobs, run: str, reference: str, *, at: int = STEPS, of: int = STEPS, tolerance: float = 1e-10
) -> None:
    """Compare a run's state after ``of`` steps with that of the reference after ``at`` steps."""
    wanted, got = jobs.state(reference, step=at), jobs.state(run, step=of)
    assert wanted.keys() == got.keys()
    for name, expected in wanted.items():
        limit = tolerance * max(1.0, float(expected.abs().max()))
        assert got[name].shape == expected.shape
        assert float((got[name] - expected).abs().max()) <= limit, f"{run}: {name} differs"


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(core_cases(Path("text")), OFTEN))
def test_training_on_tensor_ranks_equals_one_process(ran: Jobs, name: str) -> None:
    assert_equal(ran, name, *core_cases(Path("text"))[name])


@pytest.mark.timeout(500)
def test_comparison_can_fail(ran: Jobs) -> None:
    with pytest.raises(AssertionError, match="differs"):
        assert_same_state(ran, "case four shares", "reference tied", at=2)


@pytest.mark.timeout(500)
def test_resume_on_other_ranks_goes_on_as_if_unbroken(ran: Jobs) -> None:
    assert ran.ended("stopped", rank=2) == "Preempted: stopped by SIGTERM after step 1"
    assert ran.ended("resumed", 3) == ran.ended("alone") == "done"
    assert [event["resumed_from"] for event in ran.events("crossed", "start")] == [0, 1, 2]
    assert_same_state(ran, "crossed", "reference shared")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(["four shares", "zero-1 shared keys", "zb-v latent shares"], OFTEN))
def test_what_several_ranks_hold_is_saved_once(ran: Jobs, name: str) -> None:
    stored = stored_values(step_folder(ran.folder / f"case {name}" / "checkpoints", STEPS))
    reference = core_cases(Path("text"))[name][1]
    assert stored == sum(tensor.numel() for tensor in ran.state(f"reference {reference}", step=STEPS).values())


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(core_cases(Path("text")), OFTEN))
def test_bytes_between_tensor_ranks_are_those_of_the_cost_model(ran: Jobs, name: str) -> None:
    case = core_cases(Path("text"))[name][0]
    training, mesh = case.training, case.layout.mesh
    job = TrainingWork(
        case.model, case.devices, training.sequence_length, training.precision, global_batch=training.global_batch
    )
    for rank in range(mesh.world_size):
        summary = next(event for event in ran.events(f"case {name}", "summary", rank) if event["scope"] == "rank")
        sent_bytes = summary["measures"]["traffic"]["tensor"]["value"]
        stages = stages_of_ranks(case.layout)[rank // (mesh.dp * mesh.tp)]
        shard = rank // mesh.tp % mesh.dp_shard
        calls = tensor_calls(job, case.layout, stages, rank % mesh.tp, shard)
        assert sent_bytes == sum(call.sent_bytes for call in calls) > 0, rank


@pytest.mark.timeout(500)
def test_waits_for_tensor_ranks_are_measured(ran: Jobs) -> None:
    for name in LOOKED_AT:
        assert ran.events(f"case {name}", "step")[-1]["terms_s"]["tensor_parallel"] > 0


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("further", [further_cases, latent_cases])
def test_every_combination_equals_one_process(pools: Pools, tmp_path: Path, further: Callable[[Path], Cases]) -> None:
    write_text(tmp_path / "text")
    cases = further(tmp_path / "text")
    jobs = launch(pools, tmp_path, cases)
    for name, (case, reference) in cases.items():
        assert_equal(jobs, name, case, reference)


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize("ranks", [2, 3])
def test_fewer_ranks_equal_one_process(pools: Pools, tmp_path: Path, ranks: int) -> None:
    write_text(tmp_path / "text")
    make, jobs = partial(tensor_plan, tmp_path / "text", Mesh(tp=ranks)), Jobs(tmp_path, pools)
    cases = {
        f"{model} {title}": (make(model=MODELS[model], **fields), model)
        for model in ("five", "tied", "shared")
        for title, fields in {"plain": {}, "shares": NORMS, "chunks": {"tensor_chunks": 2}}.items()
    }
    for name, (case, _) in cases.items():
        jobs.train(name, case, run=f"case {name}")
    for model in ("five", "tied", "shared"):
        jobs.train(model, tensor_plan(tmp_path / "text", ONE, model=MODELS[model]), run=f"reference {model}")
    for name, (case, reference) in cases.items():
        assert_equal(jobs, name, case, reference)


SPEC = """
name: cut
model: {model}
hardware: {{accelerator: cpu, per_node: {ranks}}}
data: {{source: {text}, validation: 0.1, cache: {text}.cache}}
training: {{sequence_length: 15, global_batch: 8, steps: {steps}, precision: fp64}}
optimizer: {{lr: 1.0e-2, schedule: {{kind: constant, warmup_steps: 0}}}}
checkpoint: {{every: 2}}
parallel: {{tensor: {tensor}, data: {{zero: {zero}}}, pipeline: {stages}, micro_batch: 2, recompute: {recompute}}}
"""
OWN = "{layers: 4, hidden: 32, ffn_hidden: 37, heads: 5, head_dim: 6, vocab: 257}"


@pytest.mark.long
@pytest.mark.timeout(500)
def test_launch_resume_and_export_from_a_spec(tmp_path: Path, folder: Path) -> None:
    """The command line all through: two tensor ranks with ZeRO, resumed on three, then in a pipeline, exported."""

    def partool(*arguments: str) -> None:
        command = [sys.executable, "-m", "partool", *arguments]
        env = os.environ | {"PARTOOL_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    def spec(name: str, ranks: int, steps: int, tensor: str, **fields: object) -> str:
        given = {"model": OWN, "text": folder / "text", "zero": 0, "stages": 1, "recompute": "none"} | fields
        (tmp_path / name).write_text(SPEC.format(ranks=ranks, steps=steps, tensor=tensor, **given))
        return name

    partool("launch", spec("a.yaml", 4, 2, "{degree: 2, sequence_norms: true, overlap: backward}", zero=2))
    run = next((tmp_path / "home" / "runs").iterdir())
    partool("launch", spec("b.yaml", 3, 4, "{degree: 3, chunks: 2}", recompute="selective"), "--resume", run.name)
    partool("launch", spec("c.yaml", 4, 6, "2", stages=2), "--resume", run.name)
    partool("launch", spec("one.yaml", 1, 6, "1"))
    (alone,) = (other for other in (tmp_path / "home" / "runs").iterdir() if other != run)
    logs = [list(read_events(each / "events" / "rank-0.jsonl")) for each in (run, alone)]
    assert [event["data"]["resumed_from"] for event in logs[0] if event["kind"] == "start"] == [0, 2, 4]
    losses = [[event["data"]["loss"] for event in log if event["kind"] == "step"] for log in logs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    partool("export", run.name, "--out", "model")
    partool("export", alone.name, "--out", "alone")
    mine, wanted = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "alone"))
    assert mine.keys() == wanted.keys()
    for name, expected in wanted.items():
        assert mine[name].shape == expected.shape
        assert float((mine[name] - expected).abs().max()) <= 1e-6, name  # exported in float32 or narrower
