"""Muon in float64 on every layout trains as one process does; a run goes on in another layout as if unbroken."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tensor_plans import EVEN, FIVE, HALVES, ONE, SHARED, tensor_plan
from test_experts import SHORT
from test_tensor_trainer import assert_same_state

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.training import LrSchedule, OptimizerSpec

STEPS = 5
TOLERANCE = 1e-12
MUON = OptimizerSpec(
    name="muon", lr=1e-2, momentum=0.95, newton_schulz="working", weight_decay=0.1,
    schedule=LrSchedule(kind="constant", warmup_steps=2), groups={"layers.1.*": {"momentum": 0.8, "lr_factor": 0.5}},
)  # fmt: skip
MODELS = {"five": FIVE, "shared": SHARED, "experts": SHORT, "even": EVEN}


def cases(text: Path) -> dict[str, tuple[Plan, str]]:
    """Return plans by name, each with the model of the run of one process that it must equal."""
    make = partial(tensor_plan, text)

    def of(zero: int) -> dict[str, int]:
        return {"zero": zero, "steps": STEPS}

    found = {
        "two ranks zero-0": (make(Mesh(dp_shard=2), settings=of(0)), "five"),
        "two ranks zero-3": (make(Mesh(dp_shard=2), settings=of(3)), "five"),
        "four ranks zero-1": (make(Mesh(dp_shard=4), micro_batches=3, settings=of(1)), "five"),
        "two copies zero-2": (make(Mesh(dp_replicate=2, dp_shard=2), micro_batches=1, settings=of(2)), "five"),
        "tensor ranks zero-1": (make(Mesh(dp_shard=2, tp=2), model=SHARED, settings=of(1)), "shared"),
        "four tensor ranks": (make(Mesh(tp=4), sequence_norms=True, settings=of(0)), "five"),
        "two dimensions": (make(Mesh(tp=4), model=EVEN, tensor_inner=2, settings=of(0)), "even"),
        "pipeline zero-1": (make(Mesh(dp_shard=2, pp=2), stages=HALVES, schedule="1f1b", settings=of(1)), "five"),
        "weipipe": (make(Mesh(dp_shard=2, pp=2), stages=HALVES, schedule="weipipe", settings=of(0)), "five"),
        "experts zero-3": (make(Mesh(dp_shard=4), model=SHORT, expert=2, settings=of(3)), "experts"),
        "experts on tensor ranks": (
            make(Mesh(dp_shard=2, tp=2), model=SHORT, expert=2, expert_tensor=2, settings=of(1)),
            "experts",
        ),
        "experts uncut": (make(Mesh(dp_shard=2, tp=2), model=SHORT, settings=of(1)), "experts"),
        "sequence": (
            make(Mesh(dp_shard=2, cp=2), sequence_method="ring", sequence_order="zigzag", settings=of(1)),
            "five",
        ),
    }
    return {name: (plan.model_copy(update={"optimizer": MUON}), model) for name, (plan, model) in found.items()}


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("muon")
    text = folder / "text"
    write_text(text)
    jobs = Jobs(folder, pools)
    found = cases(text)
    for model in sorted({model for _, model in found.values()}):
        plan = tensor_plan(text, ONE, model=MODELS[model], settings={"zero": 0, "steps": STEPS})
        jobs.train(f"reference {model}", plan.model_copy(update={"optimizer": MUON}), run=f"reference {model}")
    for name, (plan, _) in found.items():
        jobs.train(name, plan, run=f"case {name}")
    return jobs


@pytest.mark.parametrize("name", list(cases(Path("text"))))
def test_training_equals_one_process(ran: Jobs, name: str) -> None:
    model = cases(Path("text"))[name][1]
    assert [ran.ended(run) for run in (name, f"reference {model}")] == ["done"] * 2
    assert_same_state(ran, f"case {name}", f"reference {model}", at=STEPS, of=STEPS, tolerance=TOLERANCE)
