"""LAMB in float64: one process follows the paper, every layout follows that process, and copies have equal bits."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import _hf_models
import pytest
import torch
from _hf_models import plan_of
from _jobs import Jobs
from _lamb_worker import NOTED, train_and_note_blocks
from _plans import write_text
from _ranks import Pools
from _tensor_plans import EVEN, FIVE, HALVES, ONE, QUARTERS, SHARED, TIED, tensor_plan
from often import often
from test_experts import SHORT
from test_tensor_trainer import assert_same_state

from partool.cost.codec import encode
from partool.cost.training.optimizer import norm_bytes
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.planner.elastic import job_of_plan
from partool.spec.training import CheckpointSpec, LrSchedule, OptimizerSpec

STEPS, STOP = 5, 2
TOLERANCE = 1e-12
LR, WARMUP, BETAS, EPS, DECAY = 2e-2, 2, (0.8, 0.9), 1e-9, 0.2
LAMB = OptimizerSpec(
    name="lamb",
    lr=LR,
    betas=list(BETAS),
    eps=EPS,
    weight_decay=DECAY,
    schedule=LrSchedule(kind="constant", warmup_steps=WARMUP),
    groups={"layers.1.*": {"lr_factor": 0.5, "weight_decay": 0.0}},
)
ALL = LAMB.model_copy(update={"adapt": "all", "norm_bounds": [0.5, 1.0]})
"""A sum that counts a matrix twice is seen where a bound holds; else both norms are wrong by the same factor."""
SPECS = {"five": LAMB, "all": ALL, "tied": ALL, "shared": ALL, "experts": LAMB, "even": ALL}
MODELS = {"five": FIVE, "all": FIVE, "tied": TIED, "shared": SHARED, "experts": SHORT, "even": EVEN}
CORE = ("four ranks zero-3", "tied pipeline of tensor ranks")
"""Cases that run every time; the others are long."""
FIRST = ("five", "tied")
"""Models of those cases."""


def lamb_plan(text: Path, mesh: Mesh, zero: int, model: str = "five", every: int = 0, **layout: Any) -> Plan:
    """Return a plan of five steps, which saves its state at the end."""
    plan = tensor_plan(text, mesh, model=MODELS[model], settings={"zero": zero, "steps": STEPS}, **layout)
    return plan.model_copy(update={"optimizer": SPECS[model], "checkpoint": CheckpointSpec(every=every, keep=STEPS)})


@cache
def cases(text: Path) -> dict[str, tuple[Plan, str]]:
    """Return plans by name, each with the model of the run of one process that it must equal."""
    make = partial(lamb_plan, text)
    ring = {"sequence_method": "ring", "sequence_order": "zigzag"}
    experts, piped = partial(make, model="experts"), {"stages": HALVES, "schedule": "1f1b"}
    return {
        "two ranks zero-0": (make(Mesh(dp_shard=2), 0), "five"),
        "two ranks zero-2": (make(Mesh(dp_shard=2), 2, "all"), "all"),
        "three ranks zero-1": (make(Mesh(dp_shard=3), 1, "all", micro_batches=2), "all"),
        "four ranks zero-3": (make(Mesh(dp_shard=4), 3, micro_batches=3), "five"),
        "two copies zero-2": (make(Mesh(dp_replicate=2, dp_shard=2), 2, micro_batches=1), "five"),
        "tensor ranks zero-1": (make(Mesh(dp_shard=2, tp=2), 1, "shared"), "shared"),
        "four tensor ranks": (make(Mesh(tp=4), 0, sequence_norms=True), "five"),
        "two dimensions": (make(Mesh(tp=4), 0, "even", tensor_inner=2), "even"),
        "pipeline zero-1": (make(Mesh(dp_shard=2, pp=2), 1, "tied", **piped), "tied"),
        "tied pipeline of tensor ranks": (make(Mesh(tp=2, pp=2), 0, "tied", **piped), "tied"),
        "folded pipeline": (make(Mesh(pp=2), 0, "tied", schedule="zb-v", stages=QUARTERS), "tied"),
        "weipipe": (make(Mesh(dp_shard=2, pp=2), 0, stages=HALVES, schedule="weipipe"), "five"),
        "experts zero-3": (experts(Mesh(dp_shard=4), 3, expert=2), "experts"),
        "experts uncut": (experts(Mesh(dp_shard=2, tp=2), 1), "experts"),
        "experts on tensor ranks": (experts(Mesh(dp_shard=2, tp=2), 1, expert=2, expert_tensor=2), "experts"),
        "sequence ranks": (make(Mesh(dp_shard=2, cp=2), 1, **ring), "five"),
    }


class Ran:
    """Runs of cases and references, each made when it is first asked for."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.text = jobs.folder / "text"
        write_text(self.text)
        self._done: set[str] = set()

    def run(self, name: str, plan: Plan) -> str:
        """Return the folder of the run of a plan."""
        if name not in self._done:
            self._done.add(name)
            self.jobs.train(name, plan, run=name)
        assert self.jobs.ended(name) == "done"
        return name

    def reference(self, model: str) -> str:
        """Return the folder of the run of one process, which saves its state after each step."""
        return self.run(f"reference {model}", lamb_plan(self.text, ONE, 0, model, every=1))


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(Jobs(tmp_path_factory.mktemp("lamb"), pools, train_and_note_blocks))


def by_formula(
    model: str, name: str, weight: torch.Tensor, moments: tuple[torch.Tensor, torch.Tensor], step: int
) -> torch.Tensor:
    """Return the next weight of a matrix by the paper's algorithm 2, from its moments after step ``step``."""
    spec, grouped = SPECS[model], name.startswith("layers.1.")
    decay = DECAY if weight.ndim > 1 and not grouped else 0.0
    lr = LR * min(1.0, step / WARMUP) * (0.5 if grouped else 1.0)
    first, second = (moment / (1.0 - beta**step) for moment, beta in zip(moments, BETAS, strict=True))
    move = first / (second.sqrt() + EPS) + decay * weight
    size, ratio = weight.norm(), 1.0
    if spec.norm_bounds is not None:
        size = size.clamp(*spec.norm_bounds)
    if (spec.adapt == "all" or weight.ndim > 1) and weight.any() and move.any():
        ratio = float(size / move.norm())
    return weight - lr * ratio * move


@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", often(MODELS, FIRST))
def test_one_process_steps_by_the_formula(ran: Ran, model: str) -> None:
    run = ran.reference(model)
    before = ran.jobs.state(run, 1)
    for step in range(2, STEPS + 1):
        after = ran.jobs.state(run, step)
        names = [key.removeprefix("exp_avg.") for key in after if key.startswith("exp_avg.")]
        assert len(names) == sum(key.startswith("model.") and "router.bias" not in key for key in after)
        for name in names:
            assert_moments(before, after, name)
            # Experts are stacked row under row.
            count = SHORT["moe"]["experts"] if ".experts." in name else 1
            old, new = (state[f"model.{name}"].chunk(count) for state in (before, after))
            first, second = (after[f"{kind}.{name}"].chunk(count) for kind in ("exp_avg", "exp_avg_sq"))
            for number in range(count):
                expected = by_formula(model, name, old[number], (first[number], second[number]), step)
                torch.testing.assert_close(new[number], expected, rtol=TOLERANCE, atol=TOLERANCE)
                assert not torch.equal(new[number], old[number]), name
        before = after


def assert_moments(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], name: str) -> None:
    """Raise AssertionError unless one gradient explains both moments."""
    old, new = (state["exp_avg." + name] for state in (before, after))
    gradient = (new - BETAS[0] * old) / (1.0 - BETAS[0])
    old, new = (state["exp_avg_sq." + name] for state in (before, after))
    torch.testing.assert_close(new, BETAS[1] * old + (1.0 - BETAS[1]) * gradient**2, rtol=1e-7, atol=1e-15)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", often(cases(Path("text")), CORE))
def test_training_equals_one_process(ran: Ran, name: str) -> None:
    plan, model = cases(ran.text)[name]
    run, reference = ran.run(name, plan), ran.reference(model)
    assert_same_state(ran.jobs, run, reference, at=STEPS, of=STEPS, tolerance=TOLERANCE)
    assert_equal_copies(ran.jobs.folder / run, plan)
    sent = [
        next(event for event in ran.jobs.events(run, "summary", rank) if event["scope"] == "rank")["measures"][
            "traffic"
        ]["optimizer"]["value"]
        for rank in range(plan.layout.mesh.world_size)
    ]
    assert sent == [int(norm_bytes(job_of_plan(plan, plan.devices), encode(plan.layout)))] * len(sent)


def assert_equal_copies(folder: Path, plan: Plan) -> None:
    """Raise AssertionError unless blocks of parameters that several ranks hold have equal bits on all of them."""
    found: dict[str, list[str]] = defaultdict(list)
    for rank in range(plan.layout.mesh.world_size):
        for name, offsets, sizes, bits in json.loads((folder / NOTED.format(rank)).read_text()):
            found[f"{name} {offsets} {sizes}"].append(bits)
    mesh, zero = plan.layout.mesh, plan.layout.data.zero
    # A folded pipeline has both ends on one rank.
    tied = plan.model.tied_embeddings and plan.layout.pipeline.schedule != "zb-v"
    if mesh.tp > 1 or mesh.dp_replicate > 1 or (not zero and mesh.dp > 1) or tied:
        assert max(len(bits) for bits in found.values()) > 1, "no block has a copy"
    assert [block for block, bits in found.items() if len(set(bits)) > 1] == []


@pytest.mark.timeout(200)
@pytest.mark.long
def test_a_stopped_run_goes_on_in_another_layout(ran: Ran) -> None:
    sharded, cut = lamb_plan(ran.text, Mesh(dp_shard=2), 3), lamb_plan(ran.text, Mesh(tp=2), 0)
    ran.jobs.train("stopped", sharded, run="broken", stop_at=STOP)
    assert ran.jobs.ended("stopped", rank=1) == f"Preempted: stopped by SIGTERM after step {STOP}"
    ran.jobs.train("rest", cut, run="broken", resume=True)
    assert ran.jobs.ended("rest") == "done"
    assert_same_state(ran.jobs, "broken", ran.reference("five"), at=STEPS, of=STEPS, tolerance=TOLERANCE)
    with pytest.raises(AssertionError, match="differs"):  # the comparison sees two steps less
        assert_same_state(ran.jobs, "broken", ran.reference("five"), at=STEPS, of=STOP, tolerance=TOLERANCE)


HF_MESHES = {
    "three ranks zero-3": (Mesh(dp_shard=3), {}),
    "tensor ranks": (Mesh(dp_shard=2, tp=2), {}),
    "pipeline": (Mesh(pp=2), {"stages": ((0, 1), (1, 2)), "chunks": 1, "schedule": "1f1b"}),
}


def hf_plan(text: Path, folder: Path, mesh: Mesh, zero: int, **layout: Any) -> Plan:
    """Return a plan for Mixtral of transformers, which stacks experts in a dimension of their own."""
    plan = lamb_plan(text, Mesh(dp_shard=mesh.dp), zero)
    plan = plan.model_copy(update={"devices": plan.devices.model_copy(update={"per_node": mesh.world_size})})
    same = {"micro_batch": plan.layout.micro_batch, "accumulation": plan.layout.derived.accumulation}
    return plan_of(plan, folder, mesh, **same, **layout)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_model_of_transformers_equals_one_process(ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_hf_models.COMMON, "vocab_size", 257)
    folder = _hf_models.write_model("mixtral", tmp_path)
    reference = ran.run("reference hf", hf_plan(ran.text, folder, ONE, 0))
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert ran.jobs.state(reference, STEPS)[f"model.{experts}"].ndim == 3
    for name, (mesh, layout) in HF_MESHES.items():
        plan = hf_plan(ran.text, folder, mesh, 3 if mesh.dp == 3 else 1, **layout)
        run = ran.run(f"hf {name}", plan)
        assert_same_state(ran.jobs, run, reference, at=STEPS, of=STEPS, tolerance=TOLERANCE)
