"""The whole trainer with pipelines: every schedule and ZeRO stage against one process, resume across layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _plans import small_plan, write_text
from _ranks import Pools
from layouts import laid
from often import chosen, often
from test_checkpoint import stored_values

from partool.layout.parameters import parameters
from partool.plan.layout import Mesh
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.schedule import to_text
from partool_runtime.checkpoint import step_folder

LAYERS = 8
STEPS = 3
TWO = ((0, 3), (3, 8))
FOUR = ((0, 2), (2, 3), (3, 6), (6, 8))
EIGHT = tuple((layer, layer + 1) for layer in range(8))
ZEROS = range(4)


def plan(
    text: Path,
    mesh: Mesh,
    schedule: str = "1f1b",
    *,
    stages: tuple[tuple[int, int], ...] = TWO,
    micro_batches: int = 3,
    recompute: str = "none",
    model: dict[str, Any] | None = None,
    frozen: tuple[str, ...] = (),
    compile_: str = "none",
    controls: dict[str, Any] | None = None,
    **settings: Any,
) -> Plan:
    """Return a plan of eight layers, with 12 sequences of 16 tokens a step."""
    fields = {"layers": LAYERS} | (model or {})
    settings = {"zero": 1, "precision": "fp64", "steps": STEPS} | settings
    plain = small_plan(text, ranks=mesh.dp, accumulation=micro_batches, model=fields, **settings)
    fields = {
        "mesh": mesh, "schedule": schedule, "stages": stages, "chunks": len(stages) // mesh.pp,
        "recompute": (recompute,) * LAYERS, "compile": compile_,
    }  # fmt: skip
    layout = laid(plain.layout, **(fields | (controls or {})))
    devices = plain.devices.model_copy(update={"per_node": mesh.world_size})
    return plain.model_copy(update={"layout": layout, "devices": devices, "frozen": frozen})


def with_list(case: Plan) -> Plan:
    """Return the plan with its schedule as a list of the user's own."""
    update = {"schedule": "file", "schedule_text": to_text(schedule_of(case.layout))}
    return case.model_copy(update={"layout": laid(case.layout, **update)})


ONE = Mesh()
TWO_BY_TWO = Mesh(pp=2, dp_shard=2)
LINE = Mesh(pp=4)
TIED = {"tied_embeddings": True, "position": "learned", "max_position": 16}
APART = {"gather": "sequential", "prefetch": 2, "persistent": 40, "leaves": ("layers.*.ffn",)}
FROZEN = ("embed.*", "layers.[012].*", "layers.4.ffn.*")


Cases = dict[str, tuple[Plan, str]]
"""Plans of four ranks by name, each with the run of one process that it must equal."""


@cache
def core_cases(text: Path) -> Cases:
    """Return a few plans that together use everything once."""
    make = partial(plan, text, TWO_BY_TWO)
    return {
        "zero-0 interleaved": (make("interleaved", stages=FOUR, micro_batches=2, zero=0), "one"),
        "zero-1 1f1b tied apart": (make(model=TIED, zero=1), "tied"),
        "zero-2 zb-v tied on one rank": (make("zb-v", stages=FOUR, model=TIED, zero=2), "tied"),
        "zero-3 hanayo recomputed": (make("hanayo", stages=FOUR, recompute="full", zero=3), "one"),
        "zero-3 zb-h1 frozen": (make("zb-h1", frozen=FROZEN, zero=3), "frozen"),
        "zero-3 zb-v gathered apart": (make("zb-v", stages=FOUR, model=TIED, zero=3, controls=APART), "tied"),
        "zero-2 zb-h1 replicas": (plan(text, Mesh(pp=2, dp_replicate=2), "zb-h1", zero=2), "one"),
        "weipipe": (make("weipipe", micro_batches=2, zero=0, recompute="full"), "one"),
        "own list": (with_list(plan(text, LINE, "hanayo", stages=EIGHT, micro_batches=3, zero=1)), "one"),
        "line": (plan(text, LINE, "1f1b", stages=FOUR, micro_batches=6), "one"),
    }


def further_cases(text: Path) -> Cases:
    """Return the rest of the combinations."""
    make = partial(plan, text, TWO_BY_TWO)
    found: Cases = {
        f"zero-{zero} {name}": (make(name, zero=zero), "one") for name in ("1f1b", "zb-h1") for zero in ZEROS
    }
    for name in ("zb-v", "hanayo"):
        found |= {f"zero-{zero} {name}": (make(name, stages=FOUR, zero=zero), "one") for zero in ZEROS}
    return found | {
        "leaves": (make("zb-h1", zero=0, controls={"leaves": ("layers.*.ffn", "head")}), "one"),
        "leaves recomputed": (make(zero=3, recompute="full", controls=APART | {"prefetch": 0}), "one"),
        "persistent": (make("hanayo", stages=FOUR, zero=3, controls={"persistent": 40}), "one"),
        "replicas": (plan(text, Mesh(pp=2, dp_replicate=2), zero=1), "one"),
        "replicas frozen": (plan(text, Mesh(pp=2, dp_replicate=2), "zb-v", stages=FOUR, frozen=FROZEN), "frozen"),
        "weipipe tied": (make("weipipe", stages=FOUR, micro_batches=2, zero=0, recompute="full", model=TIED), "tied"),
        "weipipe frozen": (make("weipipe", micro_batches=6, zero=0, recompute="full", frozen=FROZEN), "frozen"),
        "weipipe-naive": (make("weipipe-naive", micro_batches=6, zero=0, recompute="full"), "one"),
        "weipipe-zb": (plan(text, LINE, "weipipe-zb", stages=FOUR, micro_batches=4, zero=0, recompute="full"), "one"),
        "compiled": (make("hanayo", stages=FOUR, zero=3, compile_="block"), "one"),
        "compiled tied": (make(zero=1, model=TIED, compile_="block", recompute="full"), "tied"),
        "gpipe": (make("gpipe", micro_batches=6), "one"),
        "hanayo with 2 waves": (make("hanayo", stages=EIGHT, micro_batches=2, zero=3), "one"),
        "selective": (make(recompute="selective", zero=3), "one"),
        "attention": (make("zb-h1", recompute="attention", zero=1), "one"),
        "full in halves": (make("zb-v", stages=FOUR, recompute="full", zero=2), "one"),
        "tied apart zero-3": (make("zb-h1", model=TIED, zero=3), "tied"),
        "tied on one rank zero-3": (make("hanayo", stages=FOUR, model=TIED, zero=3), "tied"),
        "tied on one rank zero-0": (make("zb-v", stages=FOUR, model=TIED, zero=0), "tied"),
        "frozen": (make(frozen=FROZEN, zero=0), "frozen"),
        "frozen hanayo": (make("hanayo", stages=FOUR, frozen=FROZEN, zero=2), "frozen"),
    }


def launch(pools: Pools, folder: Path, cases: Cases, *, narrow: bool = True) -> Jobs:
    """Run the cases, the references, one run that goes through three layouts, and one in bf16.

    ``narrow``: one more in bf16, with shards.
    """
    text = folder / "text"
    jobs = Jobs(folder, pools)
    for name, (case, _) in cases.items():
        jobs.train(name, case, run=f"case {name}")
    crossed = plan(text, TWO_BY_TWO, "zb-v", stages=FOUR, zero=3, model=TIED)
    jobs.train("stopped", crossed, run="crossed", stop_at=1)
    jobs.train(
        "resumed",
        plan(text, LINE, "hanayo", stages=EIGHT, micro_batches=6, model=TIED, steps=2),
        run="crossed",
        resume=True,
    )
    if narrow:
        jobs.train("bf16", plan(text, TWO_BY_TWO, "zb-h1", precision="bf16", zero=2), run="bf16")
    jobs.train("bf16 line", plan(text, LINE, "zb-h1", stages=FOUR, precision="bf16", zero=1), run="bf16 line")
    for name, settings in {"one": {}, "tied": {"model": TIED}, "frozen": {"frozen": FROZEN}}.items():
        jobs.train(f"reference {name}", plan(text, ONE, stages=((0, LAYERS),), **settings), run=f"reference {name}")
    same_sums = plan(text, ONE, stages=((0, LAYERS),), precision="bf16", zero=0)
    jobs.train("reference bf16", same_sums, run="reference bf16")
    jobs.train("alone", plan(text, ONE, stages=((0, LAYERS),), model=TIED), run="crossed", resume=True)
    return jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_text(folder / "text")
    return folder


OFTEN = (
    "zero-1 1f1b tied apart",
    "zero-2 zb-v tied on one rank",
    "zero-3 hanayo recomputed",
)
"""Cases that run each time."""
LOOKED_AT = ("zero-1 1f1b tied apart", "zero-2 zb-v tied on one rank", "zero-3 hanayo recomputed")
"""Cases that tests without parameters look at."""
LOW_PRECISION = "test_low_precision_stays_near"


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, pools: Pools, folder: Path) -> Jobs:
    cases = core_cases(folder / "text")
    narrow = any(item.name == LOW_PRECISION for item in request.session.items)
    return launch(pools, folder, chosen(request, cases) | {name: cases[name] for name in LOOKED_AT}, narrow=narrow)


def assert_equal(jobs: Jobs, name: str, reference: str) -> None:
    for rank in range(4):
        assert jobs.ended(name, rank) == "done", name
    assert_same_state(jobs, f"case {name}", f"reference {reference}")
    for kind in ("step", "validation"):
        wanted, got = (jobs.events(run, kind) for run in (f"reference {reference}", f"case {name}"))
        for key in ("loss", "grad_norm") if kind == "step" else ("loss",):
            assert [event[key] for event in got] == pytest.approx([event[key] for event in wanted], rel=1e-12), name


def assert_same_state(jobs: Jobs, run: str, reference: str, *, at: int = STEPS) -> None:
    wanted, got = jobs.state(reference, step=at), jobs.state(run, step=STEPS)
    assert wanted.keys() == got.keys()
    for name, expected in wanted.items():
        limit = 1e-12 * max(1.0, float(expected.abs().max()))
        assert float((got[name] - expected).abs().max()) <= limit, f"{run}: {name} differs"


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(core_cases(Path("text")), OFTEN))
def test_training_through_a_pipeline_equals_one_process(ran: Jobs, name: str) -> None:
    assert_equal(ran, name, core_cases(Path("text"))[name][1])


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_every_schedule_with_every_zero_stage_equals_one_process(pools: Pools, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    cases = further_cases(tmp_path / "text")
    jobs = launch(pools, tmp_path, cases)
    for name, (_, reference) in cases.items():
        assert_equal(jobs, name, reference)


@pytest.mark.timeout(500)
def test_comparison_can_fail(ran: Jobs) -> None:
    with pytest.raises(AssertionError, match="differs"):
        assert_same_state(ran, "case zero-1 1f1b tied apart", "reference tied", at=2)


@pytest.mark.timeout(500)
def test_resume_in_other_pipelines_goes_on_as_if_unbroken(ran: Jobs) -> None:
    assert ran.ended("stopped", rank=2) == "Preempted: stopped by SIGTERM after step 1"
    assert ran.ended("resumed") == ran.ended("alone") == "done"
    assert [event["resumed_from"] for event in ran.events("crossed", "start")] == [0, 1, 2]
    assert_same_state(ran, "crossed", "reference tied")


@pytest.mark.long
@pytest.mark.timeout(500)
def test_low_precision_stays_near(ran: Jobs) -> None:
    wanted, got = ([event["loss"] for event in ran.events(run, "step")] for run in ("reference one", "bf16"))
    assert got == pytest.approx(wanted, abs=3e-2)
    assert got != wanted


@pytest.mark.timeout(500)
def test_low_precision_sums_as_wide_as_one_process(ran: Jobs) -> None:
    """The same micro-batches without data parallelism: a weight gradient summed in bf16 would show in the last bits."""
    wanted, got = (ran.state(run, step=STEPS) for run in ("reference bf16", "bf16 line"))
    assert wanted.keys() == got.keys()
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []


@pytest.mark.timeout(500)
def test_what_two_ranks_hold_is_saved_once(ran: Jobs) -> None:
    run = ran.folder / "case zero-1 1f1b tied apart" / "checkpoints"
    elements = sum(tensor.numel() for tensor in ran.state("reference tied", step=STEPS).values())
    assert stored_values(step_folder(run, STEPS)) == elements


def sent_bytes(jobs: Jobs, name: str, rank: int) -> tuple[int, int, int]:
    """Return what a rank sent in a step: to gather parameters, to reduce gradients, and to its pipeline's ranks."""
    summary = next(event for event in jobs.events(f"case {name}", "summary", rank) if event["scope"] == "rank")
    traffic = summary["measures"]["traffic"]
    return tuple(traffic[term]["value"] for term in ("parameter_gather", "gradient_sync", "pipeline"))


def shard_bytes(*parts: str, tied: bool = True) -> int:
    """Return the bytes of one of two shards of the parameters whose names begin with one of ``parts``."""
    config = plan(Path("text"), ONE, stages=((0, LAYERS),), model=TIED if tied else None).model
    held = [info for info in parameters(config) if info.name.startswith(parts)]
    return sum(-(-info.shape[0] // 2) * (info.elements // info.shape[0]) for info in held) * 8


BOUNDARY_BYTES = 2 * 16 * 30 * 8
"""A micro-batch's hidden state."""
SMALL_BYTES = 200
"""More than the few sums of single numbers that come on top."""


@pytest.mark.timeout(500)
def test_parameters_are_gathered_and_gradients_reduced_as_often_as_the_stage_says(ran: Jobs) -> None:
    """Each of two ranks sends half of a gathered or reduced tensor: its shard, or the other rank's."""
    embed = shard_bytes("embed")
    gathered, reduced, sent = sent_bytes(ran, "zero-1 1f1b tied apart", rank=0)
    mine = shard_bytes("embed", "position", "layers.0", "layers.1", "layers.2")
    assert gathered == mine
    assert reduced == pytest.approx(mine + embed, abs=SMALL_BYTES)  # and the sum with the last stage's copy
    assert sent == 3 * BOUNDARY_BYTES

    gathered, reduced, sent = sent_bytes(ran, "zero-2 zb-v tied on one rank", rank=0)
    stages = shard_bytes("position", "layers.0", "layers.1", "layers.6", "layers.7", "final_norm")
    assert gathered == stages + embed
    assert sent == 2 * 3 * BOUNDARY_BYTES  # activations of its first stage, gradients of its last
    # Halves may come in one, where the gradients of norms and embedding are ahead of the other weights'.
    assert 2 * (stages + embed) < reduced <= 3 * stages + 2 * 3 * embed + SMALL_BYTES

    gathered, reduced, sent = sent_bytes(ran, "zero-3 hanayo recomputed", rank=2)
    mine = shard_bytes("layers.2", "layers.3", "layers.4", "layers.5", tied=False)
    assert gathered == 3 * 2 * mine  # forward and backward; recomputation is part of the latter
    assert reduced == pytest.approx(3 * mine, abs=SMALL_BYTES)
    assert sent == 2 * 3 * BOUNDARY_BYTES


SPEC = """
name: piped
model: {{layers: 6, hidden: 32, ffn_hidden: 40, heads: 4, vocab: 257}}
hardware: {{accelerator: cpu, per_node: 4}}
data: {{source: {text}, validation: 0.1, cache: {text}.cache}}
training: {{sequence_length: 16, global_batch: 8, steps: {steps}, precision: fp64}}
checkpoint: {{every: 2}}
parallel: {{pipeline: {{{pipeline}}}, data: {{zero: {zero}}}, micro_batch: 1}}
"""


@pytest.mark.long
@pytest.mark.timeout(500)
def test_launch_resume_and_export_from_a_spec(tmp_path: Path, folder: Path) -> None:
    """The command line all through: a pipeline on this machine, resumed as another, exported."""

    def partool(*arguments: str) -> str:
        command = [sys.executable, "-m", "partool", *arguments]
        env = os.environ | {"PARTOOL_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def spec(name: str, **fields: object) -> str:
        (tmp_path / name).write_text(SPEC.format(text=folder / "text", **fields))
        return name

    partool("launch", spec("a.yaml", steps=2, pipeline="stages: 2, schedule: hanayo, waves: 1", zero=2))
    run = next((tmp_path / "home" / "runs").iterdir())
    partool("launch", spec("b.yaml", steps=4, pipeline="stages: 4, schedule: weipipe", zero=0), "--resume", run.name)
    log = [json.loads(line) for line in (run / "events" / "rank-0.jsonl").read_text().splitlines()]
    assert [event["data"]["resumed_from"] for event in log if event["kind"] == "start"] == [0, 2]
    losses = [event["data"]["loss"] for event in log if event["kind"] == "step"]
    assert len(losses) == 4
    partool("export", run.name, "--out", "model")
    assert (tmp_path / "model" / "config.json").exists()
