"""DPO and an adapter in one run, in float64: the reference is the model without the adapter, or as it started.

Adapters start with B ≠ 0, so that the base, the first model and the trained one differ from the first step on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _adapter_worker import UNCHANGED, noise, train_adapter
from _jobs import Jobs
from _preference_reference import train_alone
from _ranks import Pools
from _tensor_plans import HALVES, ONE, QUARTERS
from often import often
from test_adapters import EXPERTS
from test_preferences import STEPS, plan_of, write_pairs

from partool.layout.adapters import frozen_beside
from partool.layout.parameters import parameters
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.adapter import AdapterSpec
from partool_runtime.jobs.train.reference import FILE

OBJECTIVES: dict[str, dict[str, Any]] = {
    "kept": {"kind": "dpo", "beta": 0.7, "smoothing": 0.1},
    "off": {"kind": "dpo", "beta": 0.7, "reference": "adapter_off"},
    "copy": {"kind": "dpo", "beta": 0.7, "smoothing": 0.1, "reference": "copy"},
}
ADAPTER = AdapterSpec(rank=3, alpha=5.0)
TWO, FOUR = Mesh(dp_shard=2), Mesh(dp_shard=2, tp=2)
LAYOUTS: dict[str, tuple[str, Mesh, dict[str, Any]]] = {
    **{f"{name} alone": (name, ONE, {}) for name in ("off", "kept")},
    **{f"{name} ZeRO-0": (name, Mesh(dp_replicate=2), {"zero": 0}) for name in ("off", "kept")},
    **{f"{name} ZeRO-{zero}": (name, TWO, {"zero": zero}) for zero in (1, 2, 3) for name in ("off", "kept")},
    "off tensor": ("off", Mesh(tp=2), {}),
    "off tensor shares": ("off", FOUR, {"sequence_norms": True, "loss_tile_tokens": 7, "zero": 3}),
    "kept tensor": ("kept", FOUR, {"zero": 1}),
    "off tiles": ("off", TWO, {"loss_tile_tokens": 7, "mlp_tile_tokens": 11, "zero": 2}),
    "off recomputed": ("off", TWO, {"zero": 3, "recompute": "full"}),
    "off compiled": ("off", ONE, {"compile": "block"}),
    "off offload": ("off", TWO, {"offload_optimizer": "cpu"}),
    "off parameters on the host": ("off", TWO, {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
    "off 1f1b": ("off", Mesh(pp=2, dp_shard=2), {"stages": HALVES, "zero": 2}),
    "kept 1f1b": ("kept", Mesh(pp=2), {"stages": HALVES}),
    "off zb-h1 tensor": ("off", Mesh(pp=2, tp=2), {"stages": HALVES, "schedule": "zb-h1"}),
    "off zb-v": ("off", Mesh(pp=2), {"stages": QUARTERS, "schedule": "zb-v"}),
    "off interleaved": ("off", Mesh(pp=2), {"stages": QUARTERS, "schedule": "interleaved"}),
    "off hanayo": ("off", Mesh(pp=2), {"stages": QUARTERS, "schedule": "hanayo"}),
    "off ulysses": ("off", Mesh(cp=2, dp_shard=2), {"sequence_method": "ulysses", "zero": 3}),
    "kept ulysses": ("kept", Mesh(cp=2), {"sequence_method": "ulysses"}),
    "off ring": ("off", Mesh(cp=2), {"sequence_method": "ring", "sequence_order": "zigzag"}),
    "off usp": ("off", Mesh(cp=4), {"sequence_method": "usp", "sequence_order": "zigzag", "sequence_inner": 2}),
    "copy ZeRO-3": ("copy", TWO, {"zero": 3}),
    "copy tensor": ("copy", FOUR, {"sequence_norms": True}),
    "copy experts": ("copy", Mesh(dp_shard=4), {"model": EXPERTS, "zero": 2, "expert": 2}),
    "copy offload": ("copy", TWO, {"offload_optimizer": "cpu"}),
    "copy parameters on the host": ("copy", TWO, {"zero": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"}),
    "off experts alone": ("off", ONE, {"model": EXPERTS}),
    "off experts": ("off", Mesh(dp_shard=4), {"model": EXPERTS, "zero": 3, "expert": 2}),
    "kept experts": ("kept", Mesh(dp_shard=2), {"model": EXPERTS, "zero": 1, "expert": 2}),
}
KEPT = ["off zb-v"]


def adapter_plan(place: Path, objective: str, mesh: Mesh, model: dict[str, Any] | None = None, **layout: Any) -> Plan:
    fields = {"adapter": ADAPTER.form} | {k: v for k, v in (model or {}).items() if k not in ("vocab", "layers")}
    plan = plan_of(place, OBJECTIVES[objective], mesh, model=fields, **layout)
    frozen = frozen_beside([info.name for info in parameters(plan.model)], ADAPTER.train)
    return plan.model_copy(update={"adapter": ADAPTER, "frozen": frozen})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from _chat_case import folder

    place = tmp_path_factory.mktemp("preferences-and-adapters")
    write_pairs(place / "pairs.jsonl")
    folder(place / "tokenizer")
    return place


@pytest.fixture(scope="module")
def jobs(pools: Pools, place: Path) -> Jobs:
    return Jobs(place, pools, train_adapter)


@pytest.fixture(scope="module")
def alone(place: Path) -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # beside the ranks, more threads would wait for each other
    models = {False: None, True: EXPERTS}
    yield cache(lambda objective, experts: train_alone(adapter_plan(place, objective, ONE, models[experts]), noise(0)))
    torch.set_num_threads(threads)


@pytest.mark.timeout(170)
@pytest.mark.parametrize("name", often(LAYOUTS, KEPT))
def test_every_layout_equals_one_process(jobs: Jobs, alone: Any, name: str) -> None:
    objective, mesh, layout = LAYOUTS[name]
    plan = adapter_plan(jobs.folder, objective, mesh, **layout)
    jobs.train(name, plan, run=name)
    assert jobs.ended(name) == "done"
    # A frozen copy and what is kept say the same.
    want = alone("kept" if objective == "copy" else objective, "model" in layout)
    steps = jobs.events(name, "step")
    assert [step["loss"] for step in steps] == pytest.approx(want["losses"], abs=1e-10)
    assert [step["preferences"]["kl"] for step in steps] == pytest.approx(want["kl"], abs=1e-10)
    validation = jobs.events(name, "validation")[-1]
    of_pairs = validation["preferences"]
    got = validation["loss"], of_pairs["accuracy"], of_pairs["kl"]
    assert got == pytest.approx(want["validation"], abs=1e-10)
    state = jobs.state(name, STEPS)
    assert {key.removeprefix("model.") for key in state if key.startswith("model.")} == want["weights"].keys()
    for weight, expected in want["weights"].items():
        difference = float((state[f"model.{weight}"] - expected).abs().max())
        assert difference <= 1e-8, f"{weight} differs by {difference}"
    for rank in range(mesh.world_size):
        unchanged = json.loads((jobs.folder / name / UNCHANGED.format(rank)).read_text())
        assert [each for each, same in unchanged.items() if not same] == []
    assert (jobs.folder / name / FILE).exists() == (objective == "kept")


@pytest.mark.timeout(170)
def test_the_base_and_the_first_model_are_different_references(alone: Any) -> None:
    """So that a run which takes one for the other is seen; the first model is its own reference in the first step."""
    off, kept = alone("off", False), alone("kept", False)
    assert kept["kl"][0] == pytest.approx(0.0, abs=1e-12)
    assert abs(off["kl"][0]) > 1e-3
    assert np.abs(np.subtract(off["kl"], kept["kl"])).min() > 1e-3


@pytest.mark.long
@pytest.mark.timeout(170)
def test_a_stopped_run_goes_on_in_another_layout(jobs: Jobs, alone: Any) -> None:
    first, second = (adapter_plan(jobs.folder, "off", mesh, zero=3) for mesh in (TWO, Mesh(dp_shard=3)))
    jobs.train("stopped", first, run="broken", stop_at=3)
    assert "Preempted" in jobs.ended("stopped")
    jobs.train("rest", second, run="broken", resume=True)
    assert jobs.ended("rest") == "done"
    losses = [step["loss"] for step in jobs.events("broken", "step")]
    assert losses == pytest.approx(alone("off", False)["losses"], abs=1e-10)
