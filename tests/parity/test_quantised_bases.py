"""Adapters beside bases of 4 and 8 bits in float64: the matrices that the codes stand for, fixed, are the reference."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import test_adapters
import torch
from _adapter_worker import UNCHANGED, train_adapter
from _bases import NF4, WIDE, numbers
from _jobs import Jobs
from _ranks import Pools
from _tensor_plans import HALVES, ONE, QUARTERS
from test_adapters import ADAPTERS, EXPERTS, HOST, MODELS, STEPS, STOP, TOLERANCE, Ran, adapter_plan, by_torch
from test_tensor_trainer import assert_same_state

from partool.layout.parameters import parameters
from partool.layout.quantised import quantised_names
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.adapter import AdapterSpec
from partool_runtime.checkpoint import load_folder, step_folder, tensor_shapes
from partool_runtime.merge import merged_weights
from partool_runtime.model import Decoder
from partool_runtime.weights import fill_from
from partool_runtime.weights.chosen import ChosenWeights
from partool_runtime.weights.draw import init_source

pytestmark = pytest.mark.long  # test_adapters.py runs one of the cases each time
BASES: dict[str, tuple[dict[str, Any], AdapterSpec]] = {
    "nf4": (WIDE, NF4),
    "nf4 single": (WIDE, AdapterSpec(rank=2, alpha=3.0, base="nf4", double_quant=False, targets=("q", "v", "down"))),
    "int8": (WIDE, AdapterSpec(rank=3, alpha=5.0, base="int8")),
    "nf4 experts": (EXPERTS, AdapterSpec(rank=3, alpha=5.0, base="nf4")),
    "int8 experts": (EXPERTS, AdapterSpec(rank=3, alpha=5.0, base="int8")),
    "nf4 sinks": (MODELS["sinks"], ADAPTERS["sinks"].model_copy(update={"base": "nf4"})),
}


@pytest.fixture(scope="module", autouse=True)
def bases() -> None:
    """Add the bases to the models of the tests of adapters."""
    MODELS.update({name: model for name, (model, _) in BASES.items()})
    ADAPTERS.update({name: adapter for name, (_, adapter) in BASES.items()})


@pytest.fixture(scope="module")
def ran(bases: None, pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return Ran(Jobs(tmp_path_factory.mktemp("bases"), pools, train_adapter))


@cache
def cases(text: Path) -> dict[str, tuple[Plan, str]]:
    """Return plans by name, each with the base that it has."""
    MODELS.update({name: model for name, (model, _) in BASES.items()})
    ADAPTERS.update({name: adapter for name, (_, adapter) in BASES.items()})
    make = partial(adapter_plan, text)
    two, piped, norms = Mesh(tp=2, dp_shard=2), Mesh(tp=2, pp=2), {"sequence_norms": True}
    chosen = {}
    for base in ("nf4", "int8"):
        chosen |= {
            f"{base} zero-3 tensor shares": (make(two, 3, base, **norms), base),
            f"{base} zb-v tensor": (make(piped, 0, base, stages=QUARTERS, schedule="zb-v", **norms), base),
            f"{base} experts zero-3": (make(Mesh(dp_shard=4), 3, f"{base} experts", expert=2), f"{base} experts"),
            f"{base} experts uncut": (make(two, 1, f"{base} experts"), f"{base} experts"),
        }
    chosen["nf4 sinks uncut"] = make(two, 1, "nf4 sinks"), "nf4 sinks"
    chosen |= {f"zero-{zero}": (make(Mesh(dp_shard=2), zero, "nf4"), "nf4") for zero in (1, 2, 3)}
    ring = {"sequence_method": "ring", "sequence_order": "zigzag"}
    others = {
        "zero-0": make(Mesh(dp_replicate=2), 0, "nf4"),
        "three tensor ranks": make(Mesh(tp=3), 0, "nf4"),
        "hybrid zero-3": make(Mesh(dp_replicate=2, dp_shard=2), 3, "nf4"),
        "compiled": make(Mesh(dp_shard=2), 3, "nf4", compile="block"),
        **{
            f"{policy} zero-3": make(Mesh(dp_shard=2), 3, "nf4", recompute=policy)
            for policy in ("selective", "attention", "full", "keep_attention")
        },
        "tiles": make(Mesh(dp_shard=2), 2, "nf4", mlp_tile_tokens=4, loss_tile_tokens=7, recompute="full"),
        "1f1b": make(Mesh(pp=2, dp_shard=2), 2, "nf4", stages=HALVES, schedule="1f1b"),
        "zb-h1 zero-3": make(Mesh(pp=2, dp_shard=2), 3, "nf4", stages=HALVES, schedule="zb-h1"),
        "optimizer on the host": make(Mesh(dp_shard=2), 1, "nf4", **HOST),
        "parameters on the host": make(Mesh(dp_shard=2), 3, "nf4", **HOST, offload_parameters="cpu"),
        "ring": make(Mesh(dp_shard=2, cp=2), 1, "nf4", **ring),
    }
    chosen |= {name: (plan, "nf4") for name, plan in others.items()}
    chosen["ulysses"] = make(Mesh(dp_shard=2, cp=2), 3, "nf4 single", sequence_method="ulysses"), "nf4 single"
    return chosen


@pytest.mark.timeout(200)
@pytest.mark.parametrize("base", BASES)
def test_one_process_follows_the_matrices_of_the_codes(ran: Ran, base: str) -> None:
    plan, adapter = adapter_plan(ran.text, ONE, 0, base), ADAPTERS[base]
    state = ran.jobs.state(ran.reference(base), STEPS)
    expected = by_torch(plan, adapter, partial(numbers, plan, adapter))
    assert {key.removeprefix("model.") for key in state if key.startswith("model.")} == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            state[f"model.{name}"], value, rtol=TOLERANCE, atol=TOLERANCE, msg=partial("{}: {}".format, name)
        )


@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", cases(Path("text")))
def test_training_equals_one_process(ran: Ran, name: str) -> None:
    plan, base = cases(ran.text)[name]
    run = ran.run(name, plan)
    assert_same_state(ran.jobs, run, ran.reference(base), at=STEPS, of=STEPS, tolerance=TOLERANCE)
    for rank in range(plan.layout.mesh.world_size):
        unchanged = json.loads((ran.jobs.folder / run / UNCHANGED.format(rank)).read_text())
        assert [each for each, same in unchanged.items() if not same] == []
        assert any(each.endswith(".codes") for each in unchanged)


@pytest.mark.timeout(200)
def test_a_stopped_run_goes_on_in_another_layout(ran: Ran) -> None:
    """The checksum of codes and scales is that of any layout; another base is refused."""
    sharded = adapter_plan(ran.text, Mesh(tp=2, dp_shard=2), 3, "nf4", sequence_norms=True)
    ran.jobs.train("stopped", sharded, run="broken", stop_at=STOP)
    assert ran.jobs.ended("stopped", rank=1) == f"Preempted: stopped by SIGTERM after step {STOP}"
    one = adapter_plan(ran.text, ONE, 0, "nf4")
    ran.jobs.train("rest", one, run="broken", resume=True)
    assert ran.jobs.ended("rest") == "done"
    assert_same_state(ran.jobs, "broken", ran.reference("nf4"), at=STEPS, of=STEPS, tolerance=TOLERANCE)
    form = one.model.adapter
    assert form is not None
    wide = one.model_copy(
        update={"model": one.model.model_copy(update={"adapter": form.model_copy(update={"base": "bf16"})})}
    )
    ran.jobs.train("other", wide, run="broken", resume=True)
    assert "trained beside other frozen weights" in ran.jobs.ended("other")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("base", BASES)
def test_merged_weights_compute_what_the_adapter_does(ran: Ran, base: str) -> None:
    """The base of a merge is the matrix that the codes stand for."""
    plan, adapter = adapter_plan(ran.text, ONE, 0, base), ADAPTERS[base]
    checkpoint = step_folder(ran.jobs.folder / ran.reference(base) / "checkpoints", STEPS)
    merged = merged_weights(plan, ChosenWeights([checkpoint]), torch.float64)
    plain = Decoder(plan.model.model_copy(update={"adapter": None})).double()
    fill_from(plain, init_source(plan.model, plan.training.seed))
    bases = {name: numbers(plan, adapter, name, parameter.detach()) for name, parameter in plain.named_parameters()}
    kept = {
        key.removeprefix("model."): torch.empty(shape, dtype=torch.float64)
        for key, (shape, _) in tensor_shapes(checkpoint).items()
        if key.startswith("model.")
    }
    load_folder(checkpoint, {f"model.{name}": tensor for name, tensor in kept.items()})
    assert merged.keys() == bases.keys()
    for name, matrix in bases.items():
        a, b = (kept.get(f"{name.removesuffix('.weight')}.{each}") for each in ("lora_a", "lora_b"))
        expected = kept.get(name, matrix)
        if a is not None and b is not None:
            experts = plan.model.moe.experts if ".experts." in name and plan.model.moe else 1
            expected = test_adapters.summed(expected, a, b, None, adapter, experts)
        torch.testing.assert_close(merged[name], expected, rtol=1e-12, atol=1e-12, msg=partial("{}: {}".format, name))


def test_what_is_stored_in_few_bits(ran: Ran) -> None:
    """All frozen projections of the layers, whether they have an adapter or not; nothing else."""
    for base in BASES:
        plan = adapter_plan(ran.text, ONE, 0, base)
        names = {info.name for info in parameters(plan.model) if info.name in quantised_names(plan.model, plan.frozen)}
        assert not [name for name in names if "router" in name or "norm" in name or not name.startswith("layers.")]
        assert ("layers.1.ffn.up.weight" in names) == (base in ("nf4 single", "int8"))
        assert "layers.0.attention.k.weight" in names
