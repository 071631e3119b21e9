"""Training on perturbed embeddings in float64: every layout trains as one process does, and a run can be resumed."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tensor_plans import FIVE, ONE, SHARED, TIED, tensor_plan
from often import often
from test_tensor_trainer import assert_same_state

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.training import AdversarialSpec, CheckpointSpec

STEPS, START, STOP = 4, 1, 3
NOISE = AdversarialSpec(epsilon=0.5, step_size=0.4, start_step=START)
SIGNS = AdversarialSpec(epsilon=0.05, norm="linf", start_step=START)
MODELS = {"five": (FIVE, NOISE), "shared": (SHARED, NOISE), "tied": (TIED, SIGNS)}
OFTEN = ["two ranks zero-3"]
"""Cases that run every time; the others are long."""


def plan_of(text: Path, mesh: Mesh, zero: int, model: str = "five", **layout: Any) -> Plan:
    """Return a plan of four steps, the first of which is plain; it saves its state at the end."""
    fields, adversarial = MODELS[model]
    plan = tensor_plan(text, mesh, model=fields, settings={"zero": zero, "steps": STEPS}, **layout)
    training = plan.training.model_copy(update={"adversarial": adversarial})
    return plan.model_copy(update={"training": training, "checkpoint": CheckpointSpec(every=0)})


@cache
def cases(text: Path) -> dict[str, tuple[Plan, str]]:
    """Return plans by name, each with the model of the run of one process that it must equal."""
    make = partial(plan_of, text)
    ring = {"sequence_method": "ring", "sequence_order": "zigzag"}
    two, cut, both = Mesh(dp_shard=2), Mesh(tp=2), Mesh(tp=2, cp=2)
    return {
        "two ranks zero-0": (make(two, 0), "five"),
        "two ranks zero-1": (make(two, 1, recompute="full"), "five"),
        "two ranks zero-2": (make(two, 2, "tied", micro_batches=3), "tied"),
        "two ranks zero-3": (make(two, 3), "five"),
        "two ranks zero-3 tied": (make(two, 3, "tied"), "tied"),
        "kept and sequential": (make(two, 3, gather="sequential", prefetch=0, persistent=64), "five"),
        "compiled": (make(two, 3, compile="block", recompute="selective"), "five"),
        "two copies zero-3": (make(Mesh(dp_replicate=2, dp_shard=2), 3, micro_batches=3), "five"),
        "two copies zero-1": (make(Mesh(dp_replicate=2, dp_shard=2), 1, micro_batches=1), "five"),
        "tensor ranks": (make(cut, 0, "shared"), "shared"),
        "tensor ranks tied": (make(cut, 0, "tied", sequence_norms=True), "tied"),
        "tensor shares": (make(Mesh(dp_shard=2, tp=2), 3, sequence_norms=True), "five"),
        "sequence ranks": (make(Mesh(dp_shard=2, cp=2), 1, **ring), "five"),
        "sequence ranks on shares": (make(both, 1, sequence_norms=True, **ring), "five"),
        "optimizer on the host": (make(two, 2, offload_optimizer="cpu"), "five"),
        "parameters on the host": (make(two, 3, offload_optimizer="cpu", offload_parameters="cpu"), "five"),
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
        """Return the folder of the run of one process, with one micro-batch."""
        return self.run(f"reference {model}", plan_of(self.text, ONE, 0, model, micro_batches=1))


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(Jobs(tmp_path_factory.mktemp("adversarial"), pools))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", often(cases(Path("text")), OFTEN))
def test_training_equals_one_process(ran: Ran, name: str) -> None:
    plan, model = cases(ran.text)[name]
    assert_same_state(ran.jobs, ran.run(name, plan), ran.reference(model), at=STEPS, of=STEPS)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_stopped_run_goes_on_in_another_layout(ran: Ran) -> None:
    sharded, cut = plan_of(ran.text, Mesh(dp_shard=2), 3), plan_of(ran.text, Mesh(tp=2), 0)
    ran.jobs.train("stopped", sharded, run="broken", stop_at=STOP)
    assert ran.jobs.ended("stopped", rank=1) == f"Preempted: stopped by SIGTERM after step {STOP}"
    ran.jobs.train("rest", cut, run="broken", resume=True)
    assert ran.jobs.ended("rest") == "done"
    assert_same_state(ran.jobs, "broken", ran.reference("five"), at=STEPS, of=STEPS)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_comparison_can_fail(ran: Ran) -> None:
    plain = plan_of(ran.text, ONE, 0, micro_batches=1)
    training = plain.training.model_copy(update={"adversarial": AdversarialSpec()})
    ran.jobs.train("plain", plain.model_copy(update={"training": training}), run="plain")
    with pytest.raises(AssertionError, match="differs"):
        assert_same_state(ran.jobs, "plain", ran.reference("five"), at=STEPS, of=STEPS)
