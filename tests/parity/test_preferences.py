"""Objectives of pairs of answers: the whole trainer in each layout against plain torch, in float64."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _jobs import Jobs
from _preference_reference import pair_loss, train_alone
from _ranks import Pools
from _tensor_plans import HALVES, ONE, QUARTERS, tensor_plan
from often import often

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.data import DataSpec, MixedSource
from partool.spec.objective import ObjectiveSpec
from partool.spec.training import Validation
from partool_runtime.data import open_data
from partool_runtime.model.preferences import pair_losses

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from _chat_case import folder

STEPS, LENGTH, VOCAB = 6, 53, 405
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "dpo", "beta": 0.7},
    "cdpo": {"kind": "dpo", "beta": 0.7, "smoothing": 0.2},
    "ipo": {"kind": "dpo", "beta": 0.7, "form": "ipo"},
    "hinge": {"kind": "dpo", "beta": 0.7, "form": "hinge"},
    "orpo": {"kind": "orpo", "weight": 0.4},
    "simpo": {"kind": "simpo", "gamma": 0.3},
    "copy": {"kind": "dpo", "beta": 0.7, "reference": "copy"},
}
WITH_REFERENCE = ("dpo", "cdpo", "ipo", "hinge", "copy")
TWO = Mesh(dp_shard=2)
LAYOUTS: dict[str, tuple[str, Mesh, dict[str, Any]]] = {
    **{f"{name} alone": (name, ONE, {}) for name in OBJECTIVES},
    "dpo ZeRO-0": ("dpo", Mesh(dp_replicate=2), {"zero": 0}),
    **{f"{name} ZeRO-{zero}": (name, TWO, {"zero": zero}) for zero in (1, 2, 3) for name in ("dpo", "orpo")},
    "dpo three ranks": ("dpo", Mesh(dp_shard=3), {"zero": 3}),
    **{f"{name} tensor": (name, Mesh(tp=2), {}) for name in ("dpo", "orpo", "simpo")},
    "dpo tensor with shares": ("dpo", Mesh(tp=2), {"sequence_norms": True, "loss_tile_tokens": 7}),
    "simpo tied": ("simpo", TWO, {"model": {"tied_embeddings": True}}),
    "dpo tiles": ("dpo", ONE, {"loss_tile_tokens": 7, "mlp_tile_tokens": 11}),
    "dpo recomputed": ("dpo", TWO, {"zero": 2, "recompute": "full"}),
    "dpo offload": ("dpo", TWO, {"offload_optimizer": "cpu"}),
    "dpo compiled": ("dpo", ONE, {"compile": "block"}),
    **{
        f"{name} {method}": (name, Mesh(cp=2), {"sequence_method": method})
        for name in ("dpo", "orpo")
        for method in ("ulysses", "ring")
    },
    "ipo zigzag beside ranks": ("ipo", Mesh(cp=2, dp_shard=2), {"sequence_method": "ring", "sequence_order": "zigzag"}),
    "dpo 1f1b": ("dpo", Mesh(pp=2), {"stages": HALVES}),
    "orpo zero-bubble": ("orpo", Mesh(pp=2), {"stages": HALVES, "schedule": "zb-h1"}),
    "simpo stages and tensor": ("simpo", Mesh(pp=2, tp=2), {"stages": HALVES}),
    "dpo interleaved": ("dpo", Mesh(pp=2), {"stages": QUARTERS, "schedule": "interleaved"}),
    "ipo zb-v": ("ipo", Mesh(pp=2), {"stages": QUARTERS, "schedule": "zb-v"}),
    "dpo hanayo": ("dpo", Mesh(pp=2), {"stages": QUARTERS, "schedule": "hanayo"}),
    "orpo usp": ("orpo", Mesh(cp=4), {"sequence_method": "usp", "sequence_order": "zigzag", "sequence_inner": 2}),
    "simpo startrail": (
        "simpo",
        Mesh(cp=4),
        {"sequence_method": "startrail", "sequence_order": "zigzag", "sequence_teams": 2},
    ),
    "cdpo all-gather": ("cdpo", Mesh(cp=2), {"sequence_method": "all_gather"}),
    "copy alone": ("copy", ONE, {}),
    **{f"copy ZeRO-{zero}": ("copy", TWO, {"zero": zero}) for zero in (1, 2, 3)},
    "copy tensor": ("copy", Mesh(tp=2, dp_shard=2), {"zero": 3, "sequence_norms": True}),
    "copy 1f1b": ("copy", Mesh(pp=2, dp_shard=2), {"stages": HALVES, "zero": 2}),
    "copy zero-bubble": ("copy", Mesh(pp=2), {"stages": QUARTERS, "schedule": "zb-v"}),
    "copy ulysses": ("copy", Mesh(cp=2), {"sequence_method": "ulysses"}),
    "copy compiled": ("copy", ONE, {"compile": "block", "recompute": "selective"}),
}
# The formulas of all objectives are compared without ranks.
KEPT = ["dpo ZeRO-3", "orpo ring", "simpo tied", "copy ZeRO-1"]


def write_pairs(path: Path, seed: int = 7) -> Path:
    """Write pairs of unequal lengths, a few of them longer than a row."""
    rng = np.random.default_rng(seed)
    words = ["the", "cat", "sat", "on", "mat", "hello", "what", "is", "two", "plus"]

    def text(least: int, most: int) -> str:
        return " ".join(rng.choice(words, rng.integers(least, most)))

    records = [
        {"prompt": f"{n} {text(1, 5)}?", "chosen": f" {text(1, 9)}", "rejected": f" {text(2, 7)} no"} for n in range(45)
    ]
    long = [{"prompt": f"{n} {text(2, 3)}", "chosen": f" {text(20, 50)}", "rejected": " a"} for n in range(45, 50)]
    records += long
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def plan_of(
    place: Path,
    objective: dict[str, Any],
    mesh: Mesh,
    *,
    model: dict[str, Any] | None = None,
    precision: str = "fp64",
    **layout: Any,
) -> Plan:
    settings = {"steps": STEPS, "checkpoint": {"every": 3}, "precision": precision}
    training = {
        "sequence_length": LENGTH,
        "objective": ObjectiveSpec(**objective),
        "log_every": 1,
        "validation": Validation(samples=64),
    }
    plan = tensor_plan(
        place, mesh, model={"vocab": VOCAB} | (model or {}), training=training, settings=settings, **layout
    )
    data = DataSpec(
        source=str(place / "pairs.jsonl"), records="preference", tokenizer=str(place / "tokenizer"), attend="document",
        validation=0.2, cache=str(place / "cache"),
    )  # fmt: skip
    return plan.model_copy(update={"data": data})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("preferences")
    write_pairs(place / "pairs.jsonl")
    folder(place / "tokenizer")
    return place


@pytest.fixture(scope="module")
def jobs(pools: Pools, place: Path) -> Jobs:
    return Jobs(place, pools)


@pytest.fixture(scope="module")
def alone(place: Path) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside the ranks, more threads would wait for each other
    yield cache(
        lambda objective, tied=False: train_alone(
            plan_of(place, OBJECTIVES[objective], ONE, model={"tied_embeddings": tied})
        )
    )
    torch.set_num_threads(threads)


def run(jobs: Jobs, name: str) -> None:
    objective, mesh, layout = LAYOUTS[name]
    jobs.train(name, plan_of(jobs.folder, OBJECTIVES[objective], mesh, **layout), run=name)
    assert jobs.ended(name) == "done"


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", often(LAYOUTS, KEPT))
def test_every_layout_equals_one_process(jobs: Jobs, alone: Any, name: str) -> None:
    run(jobs, name)
    objective, _, layout = LAYOUTS[name]
    want = alone(objective, tied="model" in layout)
    steps = jobs.events(name, "step")
    assert [step["loss"] for step in steps] == pytest.approx(want["losses"], abs=1e-11)
    # Before the first step both rewards of dpo are 0, but for rounding.
    accuracies = [step["preferences"]["accuracy"] for step in steps]
    assert accuracies[1:] == pytest.approx(want["accuracies"][1:])
    validation = jobs.events(name, "validation")[-1]
    of_pairs = validation["preferences"]
    assert (validation["loss"], of_pairs["accuracy"]) == pytest.approx(want["validation"][:2], abs=1e-11)
    if objective in WITH_REFERENCE:
        assert [step["preferences"]["kl"] for step in steps] == pytest.approx(want["kl"], abs=1e-11)
        assert of_pairs["kl"] == pytest.approx(want["validation"][2], abs=1e-11)
    state = jobs.state(name, STEPS)
    for weight, expected in want["weights"].items():
        difference = float((state[f"model.{weight}"] - expected).abs().max())
        assert difference <= 1e-10, f"{weight} differs by {difference}"


@pytest.mark.long
@pytest.mark.timeout(170)
def test_a_resumed_run_reads_the_reference_and_other_weights_are_another(jobs: Jobs, alone: Any) -> None:
    """The reference is the model before the first step, also for a run that goes on in another layout."""
    first, second = (plan_of(jobs.folder, OBJECTIVES["dpo"], mesh, zero=3) for mesh in (TWO, Mesh(dp_shard=3)))
    jobs.train("stopped", first, run="broken", stop_at=3)
    assert "Preempted" in jobs.ended("stopped")
    file = jobs.folder / "broken" / "reference.npz"
    written = file.stat().st_mtime_ns
    jobs.train("rest", second, run="broken", resume=True)
    assert file.stat().st_mtime_ns == written
    losses = [step["loss"] for step in jobs.events("broken", "step")]
    assert losses == pytest.approx(alone("dpo")["losses"], abs=1e-11)
    with np.load(file) as content:
        sums, key = content["sums"], content["key"]
    jobs.train("again", first, run="damaged", stop_at=3)
    np.savez(jobs.folder / "damaged" / "reference.npz", key=np.array("of other weights"), sums=0 * sums)
    jobs.train("rest again", second, run="damaged", resume=True)
    with np.load(jobs.folder / "damaged" / "reference.npz") as content:
        assert content["key"] == key
        np.testing.assert_allclose(content["sums"], sums, atol=1e-11)
    assert [step["loss"] for step in jobs.events("damaged", "step")] == pytest.approx(losses, abs=1e-11)


@pytest.mark.long
@pytest.mark.timeout(170)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("objective", "mesh"), [("dpo", TWO), ("copy", Mesh(pp=2)), ("orpo", Mesh(tp=2))])
def test_half_precision_is_near(jobs: Jobs, alone: Any, precision: str, objective: str, mesh: Mesh) -> None:
    """Loss and gradient norm are those of pairs, whatever the loss is scaled by; fp16 may skip steps at first."""
    name = f"{precision} {objective}"
    stages = {"stages": HALVES} if mesh.pp > 1 else {}
    jobs.train(name, plan_of(jobs.folder, OBJECTIVES[objective], mesh, precision=precision, **stages), run=name)
    assert jobs.ended(name) == "done"
    want, steps = alone(objective), jobs.events(name, "step")
    done = [step for step in steps if not step["skipped"]]
    assert len(done) == STEPS or (precision == "fp16" and len(done) > 1)
    assert steps[0]["loss"] == pytest.approx(want["losses"][0], rel=0.02)
    low, high = min(want["norms"]), max(want["norms"])
    assert all(low / 2 < step["grad_norm"] < high * 2 for step in done)
    if len(done) == STEPS:
        assert [step["loss"] for step in steps] == pytest.approx(want["losses"], abs=0.03)


@pytest.mark.long
@pytest.mark.timeout(170)
def test_a_mixture_of_pairs_goes_on_in_another_layout(jobs: Jobs, place: Path) -> None:
    """Documents of all sources have numbers of their own, by which the reference's sums are kept."""
    for number, name in enumerate(("second.jsonl", "held-out.jsonl")):
        write_pairs(place / name, seed=number)
    mix = [
        MixedSource(source=str(place / "pairs.jsonl"), weight=0.4),
        MixedSource(source=str(place / "second.jsonl"), weight=0.6),
    ]
    mixed = {"mix": mix, "source": [], "validation": 0.0, "validation_source": str(place / "held-out.jsonl")}

    def plan(mesh: Mesh, objective: str) -> Plan:
        plain = plan_of(place, OBJECTIVES[objective], mesh, zero=3)
        return plain.model_copy(update={"data": plain.data.model_copy(update=mixed)})

    jobs.train("mixed", plan(TWO, "dpo"), run="mixture", stop_at=3)
    assert "Preempted" in jobs.ended("mixed")
    jobs.train("mixed on", plan(Mesh(dp_shard=3), "dpo"), run="mixture", resume=True)
    assert jobs.ended("mixed on") == "done"
    want = train_alone(plan(ONE, "dpo"))
    assert [step["loss"] for step in jobs.events("mixture", "step")] == pytest.approx(want["losses"], abs=1e-11)
    assert jobs.events("mixture", "validation")[-1]["loss"] == pytest.approx(want["validation"][0], abs=1e-11)
    with open_data(plan(ONE, "dpo"), dp_rank=0, dp_size=1, barrier=lambda: None) as data:
        numbers = data.read_documents
        assert len(set(numbers.tolist())) == len(numbers)
        assert (numbers[::2] % 2 == 0).all()
        assert (numbers[1::2] == numbers[::2] + 1).all(), "both answers of a pair are in one row"
        assert {int(number) // 100 for number in numbers} == {0, 1, 2}, "each source has 100 documents"


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_are_those_of_the_papers(name: str) -> None:
    spec = ObjectiveSpec(**OBJECTIVES[name])
    torch.manual_seed(3)
    sums = (-5 * torch.rand(14, dtype=torch.float64) - 0.1).requires_grad_()
    lengths = torch.randint(1, 9, (14,))
    reference = -5 * torch.rand(14, dtype=torch.float64)
    losses = pair_losses(spec, sums, lengths, reference)
    answers = list(zip(sums, lengths.tolist(), strict=True))
    expected = [
        pair_loss(spec, answers[at], answers[at + 1], (float(reference[at]), float(reference[at + 1])))
        for at in range(0, 14, 2)
    ]
    want = torch.stack([loss for loss, _ in expected])
    torch.testing.assert_close(losses.loss_P, want, atol=1e-12, rtol=1e-12)
    assert (losses.chosen_P > losses.rejected_P).tolist() == [right for _, right in expected]
    (gradient,), (wanted,) = (torch.autograd.grad(each.sum(), sums) for each in (losses.loss_P, want))
    torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=1e-12)
