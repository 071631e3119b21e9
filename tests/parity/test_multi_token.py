"""Multi-token prediction: the whole trainer in each layout against plain torch and one process, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from _jobs import Jobs
from _multi_token_reference import documents, losses, train_alone
from _plans import write_text
from _ranks import Pools
from _tensor_plans import LATENT, ONE, SHARED, tensor_plan
from test_tensor_trainer import assert_same_state

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.averaging import EmaSpec
from partool.spec.model import MultiToken
from partool_runtime.model import Decoder

STEPS = 6
TWO = Mesh(dp_shard=2)
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 11, "shared_experts": 1, "first_dense_layers": 1}
CHOICE = {"scores": "sigmoid", "bias_rate": 0.01, "aux_loss": 0.01, "aux_scope": "sequence"}
MODELS: dict[str, dict[str, Any]] = {
    "one": {},
    "two": {"multi_token": MultiToken(depth=2)},
    "tied": {"tied_embeddings": True},
    "documents": {"multi_token": MultiToken(depth=3)},
    "shared": SHARED,
    "experts": {"moe": MOE | CHOICE},
    "deepseek": LATENT | {"moe": MOE | CHOICE, "multi_token": MultiToken(depth=2)},
}
"""Models by name; those of the first four also train in plain torch."""
LAYOUTS: dict[str, tuple[str, Mesh, dict[str, Any]]] = {
    **{f"{name} alone": (name, ONE, {}) for name in ("one", "two", "tied", "documents")},
    "two ZeRO-0": ("two", Mesh(dp_replicate=2), {"zero": 0}),
    **{f"two ZeRO-{zero}": ("two", TWO, {"zero": zero}) for zero in (1, 2, 3)},
    "tied ZeRO-3": ("tied", TWO, {"zero": 3}),
    "one three ranks": ("one", Mesh(dp_shard=3), {"zero": 3}),
    "two tensor": ("two", Mesh(tp=2), {}),
    "two tensor with shares": ("two", Mesh(tp=2, dp_shard=2), {"zero": 3, "sequence_norms": True}),
    "tied tensor": ("tied", Mesh(tp=2), {"sequence_norms": True, "loss_tile_tokens": 7}),
    "two ulysses": ("two", Mesh(cp=2), {"sequence_method": "ulysses"}),
    "documents ulysses": ("documents", Mesh(cp=2), {"sequence_method": "ulysses"}),
    "documents ring": ("documents", Mesh(cp=2), {"sequence_method": "ring", "sequence_order": "zigzag"}),
    "two sequences of tensor ranks": ("two", Mesh(cp=2, tp=2), {"sequence_method": "ring", "sequence_norms": True}),
    "two recomputed": ("two", TWO, {"zero": 3, "recompute": "full"}),
    "two selective": ("two", ONE, {"recompute": "selective"}),
    "two tiles": ("two", ONE, {"loss_tile_tokens": 7, "mlp_tile_tokens": 11}),
    "two compiled": ("two", ONE, {"compile": "block"}),
    "shared tensor": ("shared", Mesh(tp=2), {"sequence_norms": True}),
    "experts ZeRO-3": ("experts", TWO, {"zero": 3, "expert": 2}),
    "experts tensor": ("experts", Mesh(tp=2, dp_shard=2), {"expert": 2, "sequence_norms": True}),
    "deepseek ZeRO-2": ("deepseek", Mesh(dp_shard=2, tp=2), {"zero": 2, "expert": 4, "recompute": "full"}),
    "deepseek tensor": ("deepseek", Mesh(tp=2), {"zero": 0, "sequence_norms": True}),
}
IN_PLAIN_TORCH = ("one", "two", "tied", "documents")


def plan_of(folder: Path, model: str, mesh: Mesh, *, steps: int = STEPS, **layout: Any) -> Plan:
    fields = {"layers": 3, "multi_token": MultiToken()} | MODELS[model]
    blocks = fields["layers"] + fields["multi_token"].depth
    settings = {"steps": steps, "zero": layout.pop("zero", 1), "checkpoint": {"every": 3}}
    training = {"multi_token_weight": 0.4, "log_every": 1}
    recompute = layout.pop("recompute", "none")
    plan = tensor_plan(
        folder / "text", mesh, model=fields, settings=settings, training=training, stages=((0, blocks),),
        **{"expert": 1} | layout,
    )  # fmt: skip
    layout_of_blocks = plan.layout.model_copy(update={"recompute": (recompute,) * blocks})
    data = plan.data.model_copy(update={"attend": "document" if model == "documents" else "sequence"})
    return plan.model_copy(update={"layout": layout_of_blocks, "data": data})


@pytest.fixture(scope="module")
def jobs(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    folder = tmp_path_factory.mktemp("multi_token")
    write_text(folder / "text")
    return Jobs(folder, pools)


@pytest.fixture(scope="module")
def reference(jobs: Jobs) -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside the ranks, more threads would wait for each other
    yield cache(lambda model: train_alone(plan_of(jobs.folder, model, ONE)))
    torch.set_num_threads(threads)


def run(jobs: Jobs, name: str) -> None:
    model, mesh, layout = LAYOUTS[name]
    jobs.train(name, plan_of(jobs.folder, model, mesh, **layout), run=name)
    assert jobs.ended(name) == "done"


@pytest.mark.parametrize("name", IN_PLAIN_TORCH)
def test_gradients_equal_the_reference(name: str) -> None:
    """One pass of the decoder without ranks, over two rows, of which each holds two documents if these are apart."""
    config = plan_of(Path("folder"), name, ONE).model
    model = Decoder(config).double()
    model.multi_token.weight = 0.4
    rows = torch.randint(0, config.vocab, (2, 16), generator=torch.Generator().manual_seed(3))
    numbers = (torch.arange(16) >= 7).int().expand(2, 16) if name == "documents" else None
    tokens, labels = rows[:, :-1], rows[:, 1:].clone()
    if numbers is not None:
        labels[:, 6] = -100
    main = model(tokens, labels, None if numbers is None else numbers[:, :-1])
    main.backward()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    each = [
        losses(part, weights, config)
        for row in rows
        for part in documents(row, None if numbers is None else numbers[0])
    ]
    want, *further = torch.stack([torch.stack(sums) for sums in each]).sum(0)
    mean = torch.stack(further).mean()
    (want + 0.4 * mean).backward()
    assert float(main.detach()) == pytest.approx(float(want.detach()), rel=1e-12)
    assert float(model.multi_token.take()) == pytest.approx(float(mean.detach()), rel=1e-12)
    for parameter, p in model.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, weights[parameter].grad, rtol=1e-9, atol=1e-11)


@pytest.mark.long
@pytest.mark.timeout(250)
@pytest.mark.parametrize("name", [name for name, (model, *_) in LAYOUTS.items() if model in IN_PLAIN_TORCH])
def test_training_equals_the_reference(jobs: Jobs, reference: Any, name: str) -> None:
    run(jobs, name)
    want, steps = reference(LAYOUTS[name][0]), jobs.events(name, "step")
    assert [step["loss"] for step in steps] == pytest.approx(want["losses"], rel=1e-11)
    assert [step["multi_token_loss"] for step in steps] == pytest.approx(want["multi_token"], rel=1e-11)
    assert [step["grad_norm"] for step in steps] == pytest.approx(want["norms"], rel=1e-10)
    if not name.startswith("documents"):
        assert jobs.events(name, "validation")[-1]["loss"] == pytest.approx(want["validation"], rel=1e-11)
    state = jobs.state(name, STEPS)
    for weight, expected in want["weights"].items():
        difference = float((state[f"model.{weight}"] - expected).abs().max())
        assert difference <= 1e-10, f"{weight} differs by {difference}"


@pytest.mark.long
@pytest.mark.timeout(250)
@pytest.mark.parametrize("name", [name for name, (model, *_) in LAYOUTS.items() if model not in IN_PLAIN_TORCH])
def test_other_models_equal_one_process(jobs: Jobs, name: str) -> None:
    model = LAYOUTS[name][0]
    if not (jobs.folder / f"alone {model}").exists():
        jobs.train(f"alone {model}", plan_of(jobs.folder, model, ONE), run=f"alone {model}")
    run(jobs, name)
    for key in ("loss", "multi_token_loss", "grad_norm"):
        wanted, got = ([step[key] for step in jobs.events(each, "step")] for each in (f"alone {model}", name))
        assert got == pytest.approx(wanted, rel=1e-10), key
    assert_same_state(jobs, name, f"alone {model}", at=STEPS, of=STEPS)


@pytest.mark.long
@pytest.mark.timeout(250)
def test_a_run_goes_on_in_another_layout(jobs: Jobs, reference: Any) -> None:
    first = plan_of(jobs.folder, "two", TWO, zero=3)
    second = plan_of(jobs.folder, "two", Mesh(tp=2), sequence_norms=True)
    jobs.train("stopped", first, run="broken", stop_at=3)
    assert "Preempted" in jobs.ended("stopped")
    jobs.train("rest", second, run="broken", resume=True)
    assert jobs.ended("rest") == "done"
    want, steps = reference("two"), jobs.events("broken", "step")
    assert [step["loss"] for step in steps] == pytest.approx(want["losses"], rel=1e-11)
    assert [step["multi_token_loss"] for step in steps] == pytest.approx(want["multi_token"], rel=1e-11)


@pytest.mark.long
@pytest.mark.timeout(250)
def test_validations_by_an_average_leave_nothing_gathered(jobs: Jobs) -> None:
    """Passes without gradients skip the modules, whose weights change between them and the next step."""
    for name, mesh, zero in (("averaged alone", ONE, 0), ("averaged ranks", TWO, 3)):
        plan = plan_of(jobs.folder, "two", mesh, zero=zero)
        validation = plan.training.validation.model_copy(update={"every": 1})
        ema = EmaSpec(decay=0.6, validation="average")
        training = plan.training.model_copy(update={"validation": validation, "ema": ema})
        jobs.train(name, plan.model_copy(update={"training": training}), run=name)
        assert jobs.ended(name) == "done"
    for kind in ("step", "validation"):
        wanted, got = ([e["loss"] for e in jobs.events(run, kind)] for run in ("averaged alone", "averaged ranks"))
        assert len(wanted) == STEPS
        assert got == pytest.approx(wanted, rel=1e-11), kind
    assert_same_state(jobs, "averaged ranks", "averaged alone", at=STEPS, of=STEPS)
