"""The whole trainer with ranks that share sequences, alone and with all else, against one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _sequence_plans import LENGTH, STEPS, sequence_plan, write_short_documents
from _tensor_plans import HALVES, ONE, QUARTERS
from often import chosen, often
from test_checkpoint import stored_values

from partool.cost.traffic.sequence import sequence_bytes
from partool.plan.event_log import read_events
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.work.training import TrainingWork
from partool_runtime.checkpoint import step_folder

FOUR = Mesh(cp=4)
TWO_BY_TWO = Mesh(cp=2, dp_shard=2)
REPLICAS = Mesh(cp=2, dp_replicate=2)
CUT = Mesh(cp=2, tp=2)
PIPED = Mesh(cp=2, pp=2)
NORMS = {"sequence_norms": True}
ZIGZAG = {"order": "zigzag"}
USP = {"order": "zigzag", "inner": 2}
STAR = {"order": "zigzag", "teams": 2}
APART = {"gather": "sequential", "prefetch": 2, "persistent": 40}
APART_DOCUMENTS = {"attend": "document"}
"""Files are longer than sequences, but every one ends within one."""
SHORT = {"pack": False}
LOW_PRECISION = "test_low_precision_stays_near"
Cases = dict[str, tuple[Plan, str]]
"""Plans by name, each with the run of one process that it must equal."""
Make = Callable[..., Plan]

REFERENCES: dict[str, dict[str, Any]] = {
    "five": {},
    "learned": {"model": "learned"},
    "learned documents": {"model": "learned", "data": APART_DOCUMENTS},
    "grouped": {"model": "grouped"},
    "one head of keys": {"model": "one head of keys"},
    "windows": {"model": "windows"},
    "windows documents": {"model": "windows", "data": APART_DOCUMENTS},
    "three": {"model": "three"},
    "short": {"data": SHORT},
    "even": {"model": "even"},
    "latent": {"model": "latent"},
    "latent-lite": {"model": "latent-lite", "data": APART_DOCUMENTS},
    "frozen": {},
}
FROZEN: dict[str, dict[str, Any]] = {"frozen": {"frozen": ("embed.*", "layers.[01].*")}}
DIFFERENT = ("grouped", "windows", "windows documents")


def core_cases(make: Make) -> Cases:
    """Return a few plans of four ranks that together use everything once."""

    def case(reference: str, mesh: Mesh, method: str, zero: int = 1, **fields: Any) -> tuple[Plan, str]:
        settings = {"zero": zero}
        return make(reference, mesh, method, settings=settings, **fields), reference

    return {
        "ulysses": case("learned documents", FOUR, "ulysses"),
        "ring zero-3": case("grouped", FOUR, "ring", 3, recompute="full", **ZIGZAG, **APART),
        "ring documents in windows 1f1b": case("windows documents", PIPED, "ring", 2, stages=HALVES),
        "all_gather short": case("short", FOUR, "all_gather", recompute="selective"),
        "usp zero-0": case("one head of keys", FOUR, "usp", 0, **USP),
        "startrail": case("three", FOUR, "startrail", **STAR),
        "ring kept in replicas": case("grouped", REPLICAS, "ring", recompute="keep_attention", **ZIGZAG),
        "ulysses zb-v": case("learned documents", PIPED, "ulysses", 3, schedule="zb-v", stages=QUARTERS),
        "ring latent and tensor shares": case("latent", CUT, "ring", 3, recompute="selective", **NORMS, **ZIGZAG),
        "ulysses and tensor shares": case("five", CUT, "ulysses", recompute="selective", **NORMS),
        "weipipe documents": case(
            "learned documents", Mesh(pp=4), "ulysses", 0, schedule="weipipe", stages=QUARTERS, micro_batches=4
        ),
    }


def further_cases(make: Make) -> Cases:
    """Return the rest of the combinations of four ranks."""
    found: Cases = {}
    methods: dict[str, dict[str, Any]] = {
        "ulysses": {}, "ring": ZIGZAG, "all_gather": {}, "usp": USP, "startrail": STAR,
    }  # fmt: skip

    def add(name: str, reference: str, *arguments: Any, zero: int = 1, **fields: Any) -> None:
        found[name] = make(reference, *arguments, settings={"zero": zero}, **fields), reference

    for method, own in methods.items():
        for model in ("five", "grouped", "three", "learned documents", "short"):
            add(f"{method} {model}", model, FOUR, method, **own)
        for zero in range(4):
            add(f"{method} zero-{zero}", "grouped", FOUR, method, zero=zero, **own)
        for policy in ("attention", "selective", "keep_attention", "full"):
            add(f"{method} {policy}", "grouped", FOUR, method, recompute=policy, zero=3, **own)
        add(f"{method} compiled", "grouped", FOUR, method, compile="block", recompute="selective", **own)
        if method in ("usp", "startrail"):
            continue
        for zero in range(4):
            mesh = REPLICAS if zero == 0 else TWO_BY_TWO
            add(f"{method} dp zero-{zero}", "five", mesh, method, zero=zero, **own)
        for title, fields in {"plain": {}, "shares": NORMS, "overlapped": {"tensor_overlap": "backward"}}.items():
            add(f"{method} tensor {title}", "one head of keys", CUT, method, **fields, **own)
        add(f"{method} two dimensions", "even", CUT, method, tensor_inner=2, **own)
        for schedule, stages in {"1f1b": HALVES, "zb-h1": HALVES, "zb-v": QUARTERS, "hanayo": QUARTERS}.items():
            for zero in (1, 3):
                where = {"schedule": schedule, "stages": stages}
                add(f"{method} {schedule} zero-{zero}", "learned documents", PIPED, method, zero=zero, **where, **own)
    for method in ("ulysses", "ring", "all_gather", "usp"):
        inner = {"inner": 2} if method == "usp" else {}
        for model in ("windows", "windows documents"):
            add(f"{method} {model}", model, FOUR, method, **inner)
            add(f"{method} {model} full", model, FOUR, method, recompute="full", **inner)
        add(f"{method} contiguous", "five", FOUR, method, **inner)
        add(f"{method} windows zigzag", "windows documents", FOUR, method, **inner, **ZIGZAG)
        add(f"{method} zigzag", "grouped", FOUR, method, **inner, **ZIGZAG)
    add("ulysses windows attention", "windows", TWO_BY_TWO, "ulysses", zero=2, recompute="attention")
    add("ring frozen", "frozen", FOUR, "ring", **FROZEN["frozen"], **ZIGZAG)
    add("ring replicas", "grouped", REPLICAS, "ring", **ZIGZAG)
    return found


def latent_cases(make: Make) -> Cases:
    """Return combinations of latent attention: methods, recomputation, ZeRO, tensor ranks and pipelines."""
    methods: dict[str, dict[str, Any]] = {
        "ulysses": {}, "ring": ZIGZAG, "all_gather": {}, "usp": USP, "startrail": STAR,
    }  # fmt: skip
    policies = ("attention", "selective", "keep_attention", "full")
    found: Cases = {}
    for zero, (method, own) in enumerate(methods.items()):
        settings = {"settings": {"zero": zero % 4}}
        found[f"{method} latent"] = make("latent", FOUR, method, **own, **settings), "latent"
        found[f"{method} lite"] = make("latent-lite", FOUR, method, **own), "latent-lite"
        found[f"{method} compiled"] = make("latent", FOUR, method, compile="block", **own), "latent"
    for policy in policies:
        found[f"all_gather {policy}"] = make("latent-lite", FOUR, "all_gather", recompute=policy), "latent-lite"
        found[f"ulysses {policy}"] = make("latent", CUT, "ulysses", recompute=policy, **NORMS), "latent"
        found[f"ring {policy}"] = make("latent", CUT, "ring", recompute=policy, tensor_overlap="backward"), "latent"
    for schedule, stages in {"1f1b": HALVES, "zb-h1": HALVES, "zb-v": QUARTERS, "hanayo": QUARTERS}.items():
        where = {"schedule": schedule, "stages": stages}
        found[f"ulysses {schedule}"] = make("latent-lite", PIPED, "ulysses", **where), "latent-lite"
        found[f"ring {schedule}"] = make("latent", PIPED, "ring", settings={"zero": 3}, **where), "latent"
    ring = {"schedule": "weipipe", "stages": QUARTERS, "micro_batches": 4, "settings": {"zero": 0}}
    found["weipipe"] = make("latent-lite", Mesh(pp=4), "ulysses", **ring), "latent-lite"
    leaves = {"leaves": ("layers.*.attention",), "settings": {"zero": 3}}
    found["leaves"] = make("latent", TWO_BY_TWO, "ulysses", **leaves, **APART), "latent"
    return found


def three_cases(make: Make) -> Cases:
    """Return plans of three ranks, one of which has less to do than the others, whatever is shared."""
    three = Mesh(cp=3)
    return {
        "three ring": (make("grouped", three, "ring", recompute="full", **ZIGZAG), "grouped"),
        "three all_gather": (make("windows documents", three, "all_gather"), "windows documents"),
    }


def make_plan(folder: Path, reference: str, mesh: Mesh, method: str = "ulysses", **fields: Any) -> Plan:
    """Return the plan of a case whose model and data are those of a reference."""
    own = REFERENCES[reference]
    return sequence_plan(folder / ("short" if own.get("data") == SHORT else "text"), mesh, method, **own, **fields)


def launch(pools: Pools, folder: Path, cases: Cases, threes: Cases, *, narrow: bool = True) -> Jobs:
    """Run the cases, their references, and one run whose sequences are shared by 2, then 1, then 3 ranks.

    ``narrow``: two runs in bfloat16 as well.
    """
    jobs, make = Jobs(folder, pools), partial(make_plan, folder)
    for name, (case, _) in cases.items():
        jobs.train(name, case, run=f"case {name}")
    if narrow:
        low = make("grouped", FOUR, "ring", settings={"zero": 3, "precision": "bf16"}, **ZIGZAG)
        jobs.train("bf16", low, run="bf16")
        jobs.train("bf16 alone", make("grouped", ONE, settings={"precision": "bf16"}), run="bf16 alone")
    jobs.train("stopped", make("grouped", TWO_BY_TWO, settings={"zero": 2}), run="crossed", stop_at=1)
    for name in {reference for _, reference in (cases | threes).values()} | {*DIFFERENT, "short"}:
        jobs.train(f"reference {name}", make(name, ONE, **FROZEN.get(name, {})), run=f"reference {name}")
    jobs.train("alone", make("grouped", ONE), run="crossed", resume=True, stop_at=2)
    for name, (case, _) in threes.items():
        jobs.train(name, case, run=f"case {name}")
    jobs.train("resumed", make("grouped", Mesh(cp=3), "ring", **ZIGZAG), run="crossed", resume=True)
    return jobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("runs"))


def write_data(folder: Path) -> Path:
    write_text(folder / "text")
    write_short_documents(folder / "short")
    return folder


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, pools: Pools, folder: Path) -> Jobs:
    make = partial(make_plan, folder)
    narrow = any(item.name == LOW_PRECISION for item in request.session.items)
    return launch(pools, folder, chosen(request, core_cases(make)), chosen(request, three_cases(make)), narrow=narrow)


def assert_equal(jobs: Jobs, name: str, case: Plan, reference: str) -> None:
    for rank in range(case.layout.mesh.world_size):
        assert jobs.ended(name, rank) == "done", name
    assert_same_state(jobs, f"case {name}", f"reference {reference}")
    for kind, keys in {"step": ("loss", "grad_norm", "tokens"), "validation": ("loss", "tokens")}.items():
        wanted, got = (jobs.events(run, kind) for run in (f"reference {reference}", f"case {name}"))
        assert len(wanted) > 0
        for key in keys:
            assert [event[key] for event in got] == pytest.approx([event[key] for event in wanted], rel=1e-10), name


def assert_same_state(jobs: Jobs, run: str, reference: str) -> None:
    wanted, got = jobs.state(reference, step=STEPS), jobs.state(run, step=STEPS)
    assert wanted.keys() == got.keys()
    for name, expected in wanted.items():
        limit = 1e-10 * max(1.0, float(expected.abs().max()))
        assert got[name].shape == expected.shape
        assert float((got[name] - expected).abs().max()) <= limit, f"{run}: {name} differs"


CORE = core_cases(partial(make_plan, Path()))
SHARED = [name for name, (case, _) in CORE.items() if case.layout.mesh.cp > 1]
THREE = list(three_cases(partial(make_plan, Path())))
OFTEN = (
    "ulysses",
    "ring zero-3",
    "ring documents in windows 1f1b",
    "ulysses and tensor shares",
)
"""Cases that run each time.

The run that is resumed has three ranks. Of latent attention, `test_sequence_ring` has values of another width, and
`test_sequence_layers` the layers.
"""


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often([*CORE, *THREE], OFTEN))
def test_training_on_shares_equals_one_process(ran: Jobs, name: str) -> None:
    make = partial(make_plan, ran.folder)
    assert_equal(ran, name, *(core_cases(make) | three_cases(make))[name])


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(SHARED, OFTEN))
def test_bytes_between_ranks_of_a_sequence_are_those_of_the_cost_model(ran: Jobs, name: str) -> None:
    case = core_cases(partial(make_plan, ran.folder))[name][0]
    training = case.training
    job = TrainingWork(
        case.model, case.devices, training.sequence_length, training.precision, global_batch=training.global_batch
    )
    sent_bytes = []
    for rank in range(case.layout.mesh.world_size):
        summary = next(event for event in ran.events(f"case {name}", "summary", rank) if event["scope"] == "rank")
        sent_bytes.append(summary["measures"]["traffic"]["sequence"]["value"])
    assert max(sent_bytes) == sequence_bytes(job, case.layout) > 0, sent_bytes


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(["ulysses", "ring zero-3", "all_gather short", "ulysses zb-v"], OFTEN))
def test_waits_for_ranks_of_a_sequence_are_measured(ran: Jobs, name: str) -> None:
    terms_s = ran.events(f"case {name}", "step")[-1]["terms_s"]
    assert terms_s["sequence_parallel"] > 0
    assert "tensor_parallel" not in terms_s


@pytest.mark.timeout(500)
def test_comparison_can_fail(ran: Jobs) -> None:
    with pytest.raises(AssertionError, match="differs"):
        assert_same_state(ran, "reference windows", "reference windows documents")


@pytest.mark.timeout(500)
def test_low_precision_stays_near(ran: Jobs) -> None:
    """Matrices are about as far from those of one process as these are from what exact numbers give.

    Half of it to nine tenths; without gradients through attention they would be five times as far and more.
    """
    exact, alone, shared = (ran.state(run, step=STEPS) for run in ("reference grouped", "bf16 alone", "bf16"))
    matrices = [name for name in exact if name.startswith("model.") and exact[name].dim() == 2]
    assert len(matrices) > 4 * 7
    for name in matrices:
        rounding = float((alone[name] - exact[name]).norm())
        assert 0 < float((shared[name] - alone[name]).norm()) <= 2 * rounding, name


@pytest.mark.timeout(500)
def test_what_documents_see_matters(ran: Jobs) -> None:
    """The references differ, so that a rank which forgets a mask, a window or an ignored label is found."""
    losses = {name: [event["loss"] for event in ran.events(f"reference {name}", "step")] for name in DIFFERENT}
    assert losses["windows"] != pytest.approx(losses["windows documents"], rel=1e-4)
    assert losses["windows"] != pytest.approx(losses["grouped"], rel=1e-4)
    tokens = [event["tokens"] for event in ran.events("reference short", "step")]
    assert all(0 < count < 12 * LENGTH for count in tokens)


@pytest.mark.timeout(500)
def test_resume_on_other_shares_goes_on_as_if_unbroken(ran: Jobs) -> None:
    assert ran.ended("stopped", rank=2) == "Preempted: stopped by SIGTERM after step 1"
    assert ran.ended("alone") == "Preempted: stopped by SIGTERM after step 2"
    assert ran.ended("resumed", rank=2) == "done"
    assert [event["resumed_from"] for event in ran.events("crossed", "start")] == [0, 1, 2]
    assert_same_state(ran, "crossed", "reference grouped")


@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", often(["usp zero-0", "ring zero-3", "ulysses and tensor shares"], OFTEN))
def test_what_several_ranks_hold_is_saved_once(ran: Jobs, name: str) -> None:
    stored = stored_values(step_folder(ran.folder / f"case {name}" / "checkpoints", STEPS))
    reference = core_cases(partial(make_plan, ran.folder))[name][1]
    assert stored == sum(tensor.numel() for tensor in ran.state(f"reference {reference}", step=STEPS).values())


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("further", [further_cases, latent_cases])
def test_every_combination_equals_one_process(pools: Pools, tmp_path: Path, further: Callable[[Make], Cases]) -> None:
    make = partial(make_plan, write_data(tmp_path))
    cases = further(make)
    jobs = launch(pools, tmp_path, cases, {})
    for name, (case, reference) in cases.items():
        assert_equal(jobs, name, case, reference)


SPEC = """
name: shared
model: {{layers: 4, hidden: 32, ffn_hidden: 37, heads: 5, head_dim: 6, vocab: 257, attention: {attention}}}
hardware: {{accelerator: cpu, per_node: {ranks}}}
data: {{source: {text}, validation: 0.1, cache: {text}.cache, attend: document}}
training: {{sequence_length: 31, global_batch: 8, steps: {steps}, precision: fp64}}
optimizer: {{lr: 1.0e-2, schedule: {{kind: constant, warmup_steps: 0}}}}
checkpoint: {{every: 2}}
parallel: {{sequence: {sequence}, data: {{zero: {zero}}}, pipeline: {stages}, tensor: {tensor}}}
"""
WINDOWS = "{window: 9, layer_types: [sliding, full, sliding, full]}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_launch_and_resume_from_a_spec(tmp_path: Path, folder: Path) -> None:
    """The command line all through: a ring of four, resumed on three that trade heads, then in a pipeline."""

    def partool(*arguments: str) -> None:
        command = [sys.executable, "-m", "partool", *arguments]
        env = os.environ | {"PARTOOL_HOME": str(tmp_path / "home")}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr

    def spec(name: str, ranks: int, steps: int, sequence: str, **fields: object) -> str:
        given = {"attention": WINDOWS, "text": folder / "text", "zero": 1, "stages": 1, "tensor": 1} | fields
        (tmp_path / name).write_text(SPEC.format(ranks=ranks, steps=steps, sequence=sequence, **given))
        return name

    partool("launch", spec("a.yaml", 4, 2, "{method: ring, degree: 4}", zero=3))
    run = next((tmp_path / "home" / "runs").iterdir())
    partool("launch", spec("b.yaml", 3, 4, "{method: ulysses, degree: 3}"), "--resume", run.name)
    partool("launch", spec("c.yaml", 4, 6, "2", stages=2), "--resume", run.name)
    partool("launch", spec("d.yaml", 4, 8, "{method: all_gather, degree: 2}", tensor=2), "--resume", run.name)
    partool("launch", spec("one.yaml", 1, 8, "1"))
    (alone,) = (other for other in (tmp_path / "home" / "runs").iterdir() if other != run)
    logs = [list(read_events(each / "events" / "rank-0.jsonl")) for each in (run, alone)]
    assert [event["data"]["resumed_from"] for event in logs[0] if event["kind"] == "start"] == [0, 2, 4, 6]
    losses = [[event["data"]["loss"] for event in log if event["kind"] == "step"] for log in logs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
