"""0/1 Adam in the trainer: AdamW without compressed steps, the same in other layouts and in runs that go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _one_bit_worker import sent_in_steps
from _plans import write_text
from _ranks import Pools
from _tensor_plans import FIVE, HALVES, SHARED, tensor_plan
from test_tensor_trainer import assert_same_state

from partool.cost.training.traffic import exchanges
from partool.layout.one_bit import exchange_schedule
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.planner.elastic import job_of_plan
from partool.spec.training import CheckpointSpec, LrSchedule, OneBit, OptimizerSpec

STEPS = 13
ONE_BIT = OneBit(variance_doubling=2, freeze_step=5, local_doubling=2, local_most=3)
KINDS = "fffofoololloo"
"""First letters of the kinds of steps."""
OPTIMIZER = OptimizerSpec(
    name="zero_one_adam",
    lr=1e-3,
    one_bit=ONE_BIT,
    schedule=LrSchedule(kind="cosine", warmup_steps=2),
    groups={"layers.1.*": {"lr_factor": 0.5, "weight_decay": 0.0}},
)
TWO = Mesh(dp_shard=2)


def plan_of(
    text: Path, mesh: Mesh, optimizer: OptimizerSpec = OPTIMIZER, model: dict[str, Any] = FIVE, **layout: Any
) -> Plan:
    """Return a plan with ZeRO-0, which saves its state at the end and on a stop request."""
    settings = {"zero": 0, "steps": STEPS, **layout.pop("settings", {})}
    plan = tensor_plan(text, mesh, model=model, settings=settings, **layout)
    data = plan.data.model_copy(update={"validation": 0.0})  # ranks would exchange before each validation
    return plan.model_copy(update={"optimizer": optimizer, "checkpoint": CheckpointSpec(every=0), "data": data})


class Ran:
    """Runs of plans, each made when it is first asked for."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs, self.text = jobs, jobs.folder / "text"
        write_text(self.text)
        self._done: set[str] = set()

    def run(self, name: str, mesh: Mesh, *rest: Any, **layout: Any) -> str:
        """Return the folder of the run of a plan."""
        if name not in self._done:
            self._done.add(name)
            self.jobs.train(name, plan_of(self.text, mesh, *rest, **layout), run=name)
        assert self.jobs.ended(name) == "done"
        return name


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(Jobs(tmp_path_factory.mktemp("one-bit"), pools))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_without_compressed_steps_it_is_adamw_bit_for_bit(ran: Ran, ranks: int) -> None:
    always = OptimizerSpec(
        name="zero_one_adam", lr=1e-3, one_bit=OneBit(variance_doubling=0, freeze_step=STEPS), groups=OPTIMIZER.groups
    )
    settings = {"precision": "fp32"}
    ours = ran.run(f"always {ranks}", Mesh(dp_shard=ranks), always, settings=settings)
    adamw = always.model_copy(update={"name": "adamw"})
    theirs = ran.run(f"adamw {ranks}", Mesh(dp_shard=ranks), adamw, settings=settings)
    ours_state, theirs_state = ran.jobs.state(ours, STEPS), ran.jobs.state(theirs, STEPS)
    assert not theirs_state.keys() - ours_state.keys()
    for name, value in theirs_state.items():
        assert torch.equal(ours_state[name], value), name
    losses = [[event["loss"] for event in ran.jobs.events(run, "step")] for run in (ours, theirs)]
    assert losses[0] == losses[1]


def test_steps_are_of_all_kinds() -> None:
    plan = plan_of(Path("text"), TWO)
    schedule = exchange_schedule(plan.optimizer, plan.training, plan.checkpoint, plan.data.validation)
    assert "".join(schedule.kind(step)[0] for step in range(STEPS)) == KINDS


@pytest.mark.timeout(200)
def test_every_step_sends_what_is_planned_and_local_steps_nothing(ran: Ran, pools: Pools) -> None:
    plan = plan_of(ran.text, TWO)
    planned = exchanges(job_of_plan(plan, plan.devices), plan.layout)
    for steps in pools.run(2, sent_in_steps, plan.to_json(), ran.jobs.folder / "counted"):
        assert len(steps) == STEPS
        for kind, sent in zip(KINDS, steps, strict=True):
            among = {name: size_bytes for name, (_, size_bytes) in sent.items() if size_bytes}
            if kind == "l":
                assert not any(calls for name, (calls, _) in sent.items() if name != "all_gather"), sent
                assert not among  # FSDP2 gathers within one rank
                continue
            # The number of tokens, and the norm with losses, votes and stop flags.
            small = among.pop("all_reduce") - (planned["full"].sent_bytes if kind == "f" else 0)
            assert 0 < small <= 200
            assert sum(among.values()) == (0 if kind == "f" else planned["one_bit"].sent_bytes)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "mesh", "layout"),
    [
        ("accumulated", TWO, {"micro_batches": 3}),
        pytest.param(
            "pipeline", Mesh(dp_shard=2, pp=2), {"stages": HALVES, "schedule": "1f1b"}, marks=pytest.mark.long
        ),
    ],
)
def test_other_layouts_of_the_same_copies_train_alike(ran: Ran, name: str, mesh: Mesh, layout: dict[str, Any]) -> None:
    reference = ran.run("two ranks", TWO)
    run = ran.run(name, mesh, **layout)
    assert_same_state(ran.jobs, run, reference, at=STEPS, of=STEPS, tolerance=1e-9)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "stop_at", [8, pytest.param(2, marks=pytest.mark.long), pytest.param(10, marks=pytest.mark.long)]
)
def test_a_stopped_run_goes_on_bit_for_bit(ran: Ran, stop_at: int) -> None:
    reference, folder = ran.run("two ranks", TWO), f"stopped {stop_at}"
    ran.jobs.train(folder, plan_of(ran.text, TWO), run=folder, stop_at=stop_at)
    acts = next(done for done in range(stop_at, STEPS + 1) if KINDS[done - 1] != "l")
    assert ran.jobs.ended(folder, rank=1) == f"Preempted: stopped by SIGTERM after step {acts}"
    ran.jobs.train(f"rest {stop_at}", plan_of(ran.text, TWO), run=folder, resume=True)
    assert ran.jobs.ended(f"rest {stop_at}") == "done"
    ours, theirs = ran.jobs.state(folder, STEPS), ran.jobs.state(reference, STEPS)
    assert ours.keys() == theirs.keys()
    assert {name.partition(".")[0] for name in ours} == {
        "model",
        "exp_avg",
        "exp_avg_sq",
        "worker_error",
        "server_error",
    }
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name
    assert any(bool(value.any()) for name, value in ours.items() if name.startswith("server_error"))


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_types_go_on_bit_for_bit_and_stay_near(ran: Ran, precision: str) -> None:
    settings = {"precision": precision}
    reference, folder = ran.run(precision, TWO, settings=settings), f"stopped {precision}"
    plan = plan_of(ran.text, TWO, settings=settings)
    ran.jobs.train(folder, plan, run=folder, stop_at=8)
    ran.jobs.train(f"rest {precision}", plan, run=folder, resume=True)
    assert ran.jobs.ended(f"rest {precision}") == "done"
    ours, theirs = ran.jobs.state(folder, STEPS), ran.jobs.state(reference, STEPS)
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    losses = [
        [event["loss"] for event in ran.jobs.events(run, "step")] for run in (reference, ran.run("two ranks", TWO))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mesh", "layout"), [(TWO, {}), (Mesh(dp_shard=2, tp=2), {"sequence_norms": True})])
def test_lamb_goes_on_with_its_ratios_bit_for_bit(ran: Ran, mesh: Mesh, layout: dict[str, Any]) -> None:
    lamb = OPTIMIZER.model_copy(update={"name": "zero_one_lamb"})
    reference, folder = ran.run(f"lamb {mesh.tp}", mesh, lamb, **layout), f"stopped lamb {mesh.tp}"
    plan = plan_of(ran.text, mesh, lamb, **layout)
    ran.jobs.train(folder, plan, run=folder, stop_at=8)
    ran.jobs.train(f"rest lamb {mesh.tp}", plan, run=folder, resume=True)
    assert ran.jobs.ended(f"rest lamb {mesh.tp}") == "done"
    ours, theirs = ran.jobs.state(folder, STEPS), ran.jobs.state(reference, STEPS)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    scaled = {name: float(value) for name, value in ours.items() if name.startswith("lamb_ratio.")}
    assert len(scaled) > 10
    assert all(value != 1.0 for value in scaled.values())


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "mesh", "model"),
    [
        ("one", Mesh(), FIVE),
        ("three", Mesh(dp_shard=3), FIVE),
        ("tensor ranks", Mesh(dp_shard=2, tp=2), FIVE),
        ("shared heads", Mesh(dp_shard=2, tp=2), SHARED),
    ],
)
def test_a_run_goes_on_with_another_number_of_ranks(ran: Ran, name: str, mesh: Mesh, model: dict[str, Any]) -> None:
    folder = f"other {name}"
    ran.jobs.train(folder, plan_of(ran.text, TWO, model=model), run=folder, stop_at=8)
    before = ran.jobs.state(folder, 9)
    ran.jobs.train(f"rest {name}", plan_of(ran.text, mesh, model=model), run=folder, resume=True)
    assert ran.jobs.ended(f"rest {name}") == "done"
    after = ran.jobs.state(folder, STEPS)
    assert before["worker_error.embed.weight"].shape[0] == 2
    assert after["worker_error.embed.weight"].shape[0] == mesh.dp
    assert after["server_error.embed.weight"].shape == before["server_error.embed.weight"].shape
