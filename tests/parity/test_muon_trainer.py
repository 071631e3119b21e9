"""Muon in float64 on every layout trains as one process does; a run goes on in another layout as if unbroken."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tensor_plans import EVEN, FIVE, HALVES, ONE, SHARED, tensor_plan
from test_experts import SHORT
from test_tensor_trainer import assert_same_state

from partool.cost.codec import encode
from partool.cost.training.optimizer import matrix_bytes
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.planner.elastic import job_of_plan
from partool.spec.training import CheckpointSpec, LrSchedule, OptimizerSpec

STEPS, STOP = 5, 2
TOLERANCE = 1e-12
MUON = OptimizerSpec(
    name="muon",
    lr=1e-2,
    momentum=0.95,
    newton_schulz="working",
    schedule=LrSchedule(kind="constant", warmup_steps=2),
    groups={"layers.1.*": {"momentum": 0.8, "lr_factor": 0.5}},
)
MODELS = {"five": FIVE, "shared": SHARED, "experts": SHORT, "even": EVEN}
CORE = ("two ranks zero-3", "four ranks zero-1")
"""Cases that run every time; the others are long."""


def muon_plan(text: Path, mesh: Mesh, zero: int, model: str = "five", **layout: Any) -> Plan:
    """Return a plan of five steps, which saves its state at the end."""
    plan = tensor_plan(text, mesh, model=MODELS[model], settings={"zero": zero, "steps": STEPS}, **layout)
    return plan.model_copy(update={"optimizer": MUON, "checkpoint": CheckpointSpec(every=0)})


@cache
def cases(text: Path) -> dict[str, tuple[Plan, str]]:
    """Return plans by name, each with the model of the run of one process that it must equal."""
    make = partial(muon_plan, text)
    ring = {"sequence_method": "ring", "sequence_order": "zigzag"}
    experts = partial(make, model="experts")
    return {
        "two ranks zero-0": (make(Mesh(dp_shard=2), 0), "five"),
        "two ranks zero-2": (make(Mesh(dp_shard=2), 2), "five"),
        "two ranks zero-3": (make(Mesh(dp_shard=2), 3), "five"),
        "four ranks zero-1": (make(Mesh(dp_shard=4), 1, micro_batches=3), "five"),
        "two copies zero-2": (make(Mesh(dp_replicate=2, dp_shard=2), 2, micro_batches=1), "five"),
        "tensor ranks zero-1": (make(Mesh(dp_shard=2, tp=2), 1, "shared"), "shared"),
        "four tensor ranks": (make(Mesh(tp=4), 0, sequence_norms=True), "five"),
        "two dimensions": (make(Mesh(tp=4), 0, "even", tensor_inner=2), "even"),
        "pipeline zero-1": (make(Mesh(dp_shard=2, pp=2), 1, stages=HALVES, schedule="1f1b"), "five"),
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
        """Return the folder of the run of one process."""
        return self.run(f"reference {model}", muon_plan(self.text, ONE, 0, model))


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(Jobs(tmp_path_factory.mktemp("muon"), pools))


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "name", [name if name in CORE else pytest.param(name, marks=pytest.mark.long) for name in cases(Path("text"))]
)
def test_training_equals_one_process(ran: Ran, name: str) -> None:
    plan, model = cases(ran.text)[name]
    run, reference = ran.run(name, plan), ran.reference(model)
    assert_same_state(ran.jobs, run, reference, at=STEPS, of=STEPS, tolerance=TOLERANCE)
    sent = [
        next(event for event in ran.jobs.events(run, "summary", rank) if event["scope"] == "rank")["measures"][
            "traffic"
        ]
        for rank in range(plan.layout.mesh.world_size)
    ]
    mean = sum(each["optimizer"]["value"] for each in sent) / len(sent)
    # Sizes are odd, so that an owner's own part of a matrix is not the mean.
    assert mean == pytest.approx(float(matrix_bytes(job_of_plan(plan, plan.devices), encode(plan.layout))), rel=0.1)


@pytest.mark.timeout(200)
def test_a_stopped_run_goes_on_in_another_layout(ran: Ran) -> None:
    sharded, cut = muon_plan(ran.text, Mesh(dp_shard=2), 3), muon_plan(ran.text, Mesh(tp=2), 0)
    ran.jobs.train("stopped", sharded, run="broken", stop_at=STOP)
    assert ran.jobs.ended("stopped", rank=1) == f"Preempted: stopped by SIGTERM after step {STOP}"
    ran.jobs.train("rest", cut, run="broken", resume=True)
    assert ran.jobs.ended("rest") == "done"
    assert_same_state(ran.jobs, "broken", ran.reference("five"), at=STEPS, of=STEPS, tolerance=TOLERANCE)
    with pytest.raises(AssertionError, match="differs"):  # the comparison sees two steps less
        assert_same_state(ran.jobs, "broken", ran.reference("five"), at=STEPS, of=STOP, tolerance=TOLERANCE)
