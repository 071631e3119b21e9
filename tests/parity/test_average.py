"""The moving average of weights, the best checkpoints and early stops, in float64, against one process."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _plans import write_text
from _ranks import Pools
from _tensor_plans import EVEN, FIVE, HALVES, ONE, QUARTERS, SHARED, TIED, tensor_plan
from often import often
from test_experts import SHORT
from test_tensor_trainer import assert_same_state

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.plan.validations import read_validations
from partool.spec.averaging import EmaSpec
from partool.spec.judging import BestSpec, EarlyStop
from partool.spec.training import CheckpointSpec
from partool_runtime.data import open_data
from partool_runtime.weights import build, fill, materialise

STEPS, STOP, EVERY = 6, 4, 2
EMA = EmaSpec(decay=0.6, validation="both")
WARM = EmaSpec(decay=0.999, warm_up=True, validation="average")
TOLERANCE = 1e-12
MODELS: dict[str, dict[str, Any]] = {"five": FIVE, "tied": TIED, "shared": SHARED, "even": EVEN, "experts": SHORT}
FROZEN = ("embed.*", "layers.1.*")
CORE = ("pipeline of tensor ranks",)


def averaged(text: Path, mesh: Mesh, zero: int, model: str = "five", ema: EmaSpec | None = EMA, **more: Any) -> Plan:
    """Return a plan of six steps that validates every second one, of which it keeps the best, and the last state."""
    checkpoint = CheckpointSpec(every=more.pop("every", 0), keep=more.pop("keep", STEPS), best=BestSpec())
    optimizer = more.pop("optimizer", None)
    training = {"ema": ema, "validation": {"every": EVERY, "samples": 5}} | more.pop("training", {})
    settings = {"zero": zero, "steps": STEPS}
    plan = tensor_plan(text, mesh, model=MODELS[model], settings=settings, training=training, **more)
    update: dict[str, Any] = {"checkpoint": checkpoint}
    if optimizer is not None:
        update["optimizer"] = plan.optimizer.model_copy(update={"name": optimizer})
    return plan.model_copy(update=update)


@cache
def cases(text: Path) -> dict[str, tuple[Plan, str]]:
    """Return plans by name, each with the model of the run of one process that it must equal."""
    make = partial(averaged, text)
    piped = {"stages": HALVES, "schedule": "1f1b"}
    return {
        "two ranks zero-0": (make(Mesh(dp_shard=2), 0), "five"),
        "three ranks zero-1": (make(Mesh(dp_shard=3), 1), "five"),
        "two ranks zero-2": (make(Mesh(dp_shard=2), 2), "five"),
        "four ranks zero-3": (make(Mesh(dp_shard=4), 3, micro_batches=3), "five"),
        "two copies zero-3": (make(Mesh(dp_replicate=2, dp_shard=2), 3, micro_batches=1), "five"),
        "tensor ranks zero-3": (make(Mesh(dp_shard=2, tp=2), 3, "shared"), "shared"),
        "two dimensions": (make(Mesh(tp=4), 0, "even", tensor_inner=2), "even"),
        "pipeline of tensor ranks": (make(Mesh(tp=2, pp=2), 1, "tied", **piped), "tied"),
        "pipeline zero-2": (make(Mesh(dp_shard=2, pp=2), 2, "tied", **piped), "tied"),
        "folded pipeline": (make(Mesh(pp=2), 0, "tied", schedule="zb-v", stages=QUARTERS), "tied"),
        "weipipe": (make(Mesh(dp_shard=2, pp=2), 0, stages=HALVES, schedule="weipipe"), "five"),
        "experts zero-3": (make(Mesh(dp_shard=4), 3, "experts", expert=2), "experts"),
        "experts on tensor ranks": (
            make(Mesh(dp_shard=2, tp=2), 1, "experts", expert=2, expert_tensor=2),
            "experts",
        ),
        "sequence ranks": (
            make(Mesh(dp_shard=2, cp=2), 1, sequence_method="ring", sequence_order="zigzag"),
            "five",
        ),
    }


class Ran:
    """Runs of cases and references, each made when it is first asked for."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.text = jobs.folder / "text"
        write_text(self.text)
        self._done: set[str] = set()

    def run(self, name: str, plan: Plan, **more: Any) -> str:
        """Return the folder of the run of a plan."""
        if name not in self._done:
            self._done.add(name)
            self.jobs.train(name, plan, run=more.pop("run", name), **more)
        return name

    def reference(self, model: str, **more: Any) -> str:
        """Return the folder of the run of one process, which saves its state after each step."""
        name = f"reference {model} {sorted(more)}"
        self.run(name, averaged(self.text, ONE, 0, model, every=1, **more))
        assert self.jobs.ended(name) == "done"
        return name

    def losses(self, run: str, key: str = "loss") -> list[float]:
        return [event[key] for event in self.jobs.events(run, "validation")]


@pytest.fixture(scope="module")
def ran(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(Jobs(tmp_path_factory.mktemp("average"), pools))


def first_weights(plan: Plan) -> dict[str, torch.Tensor]:
    model = build(plan.model).double()
    materialise(model, "cpu")
    fill(model, plan.weights, seed=plan.training.seed)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def mean_loss(plan: Plan, weights: dict[str, torch.Tensor]) -> float:
    """Return the mean loss of some weights over the tokens that are held out."""
    model = build(plan.model).double()
    materialise(model, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        data = open_data(plan, dp_rank=0, dp_size=1, barrier=lambda: None)
        pairs = [(micro.tokens_BS, micro.labels_BS) for micro in data.validation()]
        total = sum(float(model(*pair)) for pair in pairs)
        data.close()
    return total / sum(int((labels != -100).sum()) for _, labels in pairs)


def check_formula(ran: Ran, run: str, plan: Plan, ema: EmaSpec) -> None:
    """Raise AssertionError unless a run's averages follow the formula from the weights before the first step."""
    state = {f"model.{name}": weight for name, weight in first_weights(plan).items()}
    average = {name.replace("model.", "ema.", 1): weight for name, weight in state.items()}
    frozen = {name for name in average if name.startswith(("ema.embed.", "ema.layers.1."))} if plan.frozen else set()
    for step in range(1, STEPS + 1):
        state = ran.jobs.state(run, step)
        assert {name for name in state if name.startswith("ema.")} == average.keys() - frozen
        decay = min(ema.decay, (1 + step) / (10 + step)) if ema.warm_up else ema.decay
        for name in average.keys() - frozen:
            weight = state[name.replace("ema.", "model.", 1)]
            average[name] = decay * average[name] + (1.0 - decay) * weight
            torch.testing.assert_close(state[name], average[name], rtol=1e-14, atol=1e-15)
            assert not torch.equal(state[name], weight)


@pytest.mark.timeout(200)
def test_one_process_follows_the_formula_and_validates_by_it(ran: Ran) -> None:
    """Both figures of a validation are those of a model of its own with these weights."""
    run, plan = ran.reference("tied"), averaged(ran.text, ONE, 0, "tied")
    check_formula(ran, run, plan, EMA)
    assert len(ran.losses(run)) == STEPS // EVERY
    for place, step in enumerate(range(EVERY, STEPS + 1, EVERY)):
        state = ran.jobs.state(run, step)
        for kind, key in (("ema.", "loss"), ("model.", "weights_loss")):
            weights = {name.removeprefix(kind): value for name, value in state.items() if name.startswith(kind)}
            assert ran.losses(run, key)[place] == pytest.approx(mean_loss(plan, weights), rel=1e-12)
    assert ran.losses(run) != ran.losses(run, "weights_loss")
    recorded = read_validations(ran.jobs.folder / run / "checkpoints")
    assert [row.figures["loss"] for row in recorded.rows] == ran.losses(run)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", often(cases(Path("text")), CORE))
def test_every_layout_equals_one_process(ran: Ran, name: str) -> None:
    plan, model = cases(ran.text)[name]
    run, reference = ran.run(name, plan), ran.reference(model)
    assert ran.jobs.ended(name) == "done"
    assert_same_state(ran.jobs, run, reference, at=STEPS, of=STEPS, tolerance=TOLERANCE)
    for key in ("loss", "weights_loss"):
        assert ran.losses(run, key) == pytest.approx(ran.losses(reference, key), rel=1e-11)
    best = min(range(STEPS // EVERY), key=ran.losses(run).__getitem__)
    saved = sorted(path.name for path in (ran.jobs.folder / run / "checkpoints").glob("step-*"))
    assert f"step-{EVERY * (best + 1):08d}" in saved


@pytest.mark.timeout(200)
def test_a_run_goes_on_in_another_layout_and_stops_early(ran: Ran) -> None:
    """The average, the best validation and the patience are those of a run that was never stopped."""
    stops = {"training": {"early_stop": EarlyStop(mode="max", patience=1)}, "keep": 1}
    whole = averaged(ran.text, ONE, 0, "tied", **stops)
    ran.run("whole", whole)
    sharded = averaged(ran.text, Mesh(dp_shard=2), 3, "tied", **stops)
    ran.run("stopped", sharded, run="broken", stop_at=STOP)
    assert ran.jobs.ended("stopped", rank=1) == f"Preempted: stopped by SIGTERM after step {STOP}"
    cut = averaged(ran.text, Mesh(tp=2), 0, "tied", **stops)
    ran.run("rest", cut, run="broken", resume=True)
    assert [ran.jobs.ended(name) for name in ("whole", "rest")] == ["done", "done"]
    assert_same_state(ran.jobs, "broken", "whole", at=STOP, of=STOP, tolerance=TOLERANCE)
    for run in ("whole", "broken"):
        (end,) = (event for event in ran.jobs.events(run, "end") if event["exit_code"] == 0)
        assert end["reason"].startswith("early stop: loss has not improved in the last validation; the best was ")
        assert ran.jobs.events(run, "early_stop") == [{"step": STOP, "reason": end["reason"]}]
        folder = ran.jobs.folder / run / "checkpoints"
        recorded = read_validations(folder)
        assert recorded.ended == end["reason"]
        assert [row.step for row in recorded.rows] == [EVERY, STOP]
        assert (folder / f"step-{STOP:08d}").is_dir()
    assert recorded.best(BestSpec(), 1, [EVERY, STOP]) == [STOP]  # the loss falls, and was to rise


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_without_an_average_goes_on_with_one(ran: Ran) -> None:
    ran.run("without", averaged(ran.text, ONE, 0, ema=None), run="late", stop_at=STOP)
    ran.run("with", averaged(ran.text, Mesh(dp_shard=2), 2), run="late", resume=True)
    assert ran.jobs.ended("with") == "done"
    (warning,) = (each["message"] for each in ran.jobs.events("late", "warning") if "PT629" in each["message"])
    assert f"the checkpoint of step {STOP} holds no moving average" in warning
    reference = ran.reference("five")
    average = {k: v for k, v in ran.jobs.state(reference, STOP).items() if k.startswith("model.")}
    for step in range(STOP + 1, STEPS + 1):
        state = ran.jobs.state(reference, step)
        average = {k: EMA.decay * v + (1.0 - EMA.decay) * state[k] for k, v in average.items()}
    ended = ran.jobs.state("late", STEPS)
    for name, value in average.items():
        torch.testing.assert_close(ended[name.replace("model.", "ema.", 1)], value, rtol=1e-11, atol=1e-12)
    ran.run("again without", averaged(ran.text, ONE, 0, ema=None), run="late", resume=True)
    assert ran.jobs.ended("again without") == "done"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("optimizer", ["muon", "lamb"])
def test_other_optimizers_and_frozen_parameters(ran: Ran, optimizer: str) -> None:
    more: dict[str, Any] = {"optimizer": optimizer, "ema": WARM, "frozen": FROZEN}
    run = ran.run(f"{optimizer} alone", averaged(ran.text, ONE, 0, every=1, **more))
    check_formula(ran, run, averaged(ran.text, ONE, 0, **more), WARM)
    several = ran.run(f"{optimizer} on ranks", averaged(ran.text, Mesh(dp_shard=2, tp=2), 3, **more))
    assert_same_state(ran.jobs, several, run, at=STEPS, of=STEPS, tolerance=1e-9)
