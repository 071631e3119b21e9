"""The state of tensor-parallel runs: every layout saves and loads the same bits, and goes on where another stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _tensor_state_worker as worker
import pytest
import torch
import transformers
from _hf_models import plan_of as hf_plan
from _jobs import Jobs
from _plans import small_plan, write_text
from _ranks import Pools
from layouts import laid
from test_checkpoint import stored_values

from partool.layout.tensor import own_partition
from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.spec.model import Weights
from partool.spec.training import OptimizerSpec
from partool_runtime.checkpoint import load_folder, step_folder, tensor_shapes
from partool_runtime.export import export

STEPS = 6
MODELS: dict[str, dict[str, Any]] = {
    # Of 4 tensor ranks two share each head of keys; neither widths nor tokens divide.
    "shared": {"heads": 6, "kv_heads": 2, "head_dim": 4, "qk_norm": True, "qkv_bias": True},
    # 5 heads on 4 ranks are 2, 2, 1, 0.
    "tied": {
        "norm": "layernorm", "position": "learned", "max_position": 16, "activation": "gelu", "qkv_bias": True,
        "out_bias": True, "ffn_bias": True, "tied_embeddings": True,
    },
    "one head": {"heads": 1, "kv_heads": 1, "head_dim": 8},
    "two dimensions": {"heads": 4, "kv_heads": 4, "head_dim": 10, "ffn_hidden": 38, "qkv_bias": True},
}  # fmt: skip
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp 4": {"tp": 4},
    "tp 2, dp 2": {"tp": 2, "dp_shard": 2, "zero": 3},
    "copies": {"tp": 2, "dp_replicate": 2, "sequence_norms": True},
    "pp 2, tp 2": {"tp": 2, "pp": 2},
}


def plan_of(
    text: Path,
    model: str,
    *,
    precision: str = "fp64",
    tp: int = 1,
    pp: int = 1,
    dp_shard: int = 1,
    dp_replicate: int = 1,
    **layout: Any,
) -> Plan:
    """Return a plan for some layout; gradients are clipped in every step."""
    dp = dp_shard * dp_replicate
    plan = small_plan(text, precision=precision, steps=STEPS, model=MODELS[model], training={"log_every": 1})
    fields = {
        "mesh": Mesh(pp=pp, dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp),
        "micro_batch": 2,
        "accumulation": 6 // dp,
        "zero": 1,
        "stages": ((0, 1), (1, 2)) if pp == 2 else ((0, 2),),
        "schedule": "1f1b" if pp == 2 else plan.layout.pipeline.schedule,
    }
    return plan.model_copy(
        update={
            "devices": plan.devices.model_copy(update={"per_node": tp * pp * dp}),
            "layout": laid(plan.layout, **(fields | layout)),
            "partition": own_partition(
                plan.model, tp, layout.get("tensor_inner", 1), layout.get("sequence_norms", False)
            ),
            "optimizer": OptimizerSpec(lr=1e-2, weight_decay=0.3, clip=0.2, schedule=plan.optimizer.schedule),
        }
    )


@pytest.mark.timeout(560)
def test_every_layout_loads_the_bits_that_any_other_saved(pools: Pools, tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    for step, name in enumerate([*LAYOUTS, "tp 4"], start=1):
        plan = plan_of(tmp_path / "text", "shared", **LAYOUTS[name])
        arguments = (plan, name, "sync" if step % 2 else "async", tmp_path, step, list(range(1, step + 1)))
        pools.run(plan.layout.mesh.world_size, worker.save_and_load, *arguments)
    for step, name in enumerate([*LAYOUTS, "tp 4"], start=1):
        folder = step_folder(tmp_path / "crossed", step)
        shapes = tensor_shapes(folder)
        state = {key: torch.full(shape, 99, dtype=dtype) for key, (shape, dtype) in shapes.items()}
        assert load_folder(folder, state) == {"layout": name}
        assert all(torch.equal(value, worker.values(key, tuple(value.shape), step)) for key, value in state.items())
        assert stored_values(folder) == sum(value.numel() for value in state.values()), "each value is saved once"


CHAINS: dict[str, dict[int, dict[str, Any]]] = {
    "shared": {2: {"tp": 2}, 3: {}, STEPS: {"tp": 4}},
    "tied": {
        1: {"tp": 3, "sequence_norms": True}, 2: {"tp": 4}, 3: {"pp": 2, "tp": 2},
        4: {"tp": 2, "dp_shard": 2, "zero": 3}, STEPS: {},
    },
    "two dimensions": {
        1: {"tp": 4, "tensor_inner": 2}, 2: {"tp": 2},
        4: {"tp": 2, "tensor_inner": 2, "dp_shard": 2, "zero": 3}, STEPS: {},
    },
}  # fmt: skip
"""By model, the layouts of one run, each with the step behind which it stops; the next one goes on there."""


def events(run_dir: Path, kind: str) -> dict[int, dict[str, Any]]:
    lines = (run_dir / "events" / "rank-0.jsonl").read_text().splitlines()
    return {event["data"]["step"]: event["data"] for event in map(json.loads, lines) if event["kind"] == kind}


def final(run_dir: Path) -> dict[str, torch.Tensor]:
    folder = step_folder(run_dir / "checkpoints", STEPS)
    state = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in tensor_shapes(folder).items()}
    load_folder(folder, state)
    return state


def assert_goes_on(pools: Pools, folder: Path, unbroken: Plan, plans: dict[int, Plan]) -> None:
    """Compare a run that resumes with another plan after each step given with an unbroken one: losses, norms, state."""
    jobs = Jobs(folder, pools)
    jobs.train("unbroken", unbroken, run="unbroken")
    assert jobs.ended("unbroken") == "done"
    for number, (stop, plan) in enumerate(plans.items()):
        jobs.train(f"to {stop}", plan, run="broken", resume=number > 0, stop_at=stop if stop < STEPS else -1)
    ended = [jobs.ended(f"to {stop}") for stop in plans]
    assert ended[-1] == "done"
    assert all("Preempted" in end for end in ended[:-1])
    for kind, steps in (("step", range(1, STEPS + 1)), ("validation", (3, STEPS))):
        expected, found = events(folder / "unbroken", kind), events(folder / "broken", kind)
        assert list(found) == list(expected) == list(steps)
        for step, event in expected.items():
            assert found[step]["tokens"] == event["tokens"]
            for key in {"loss", "grad_norm", "lr"} & event.keys():
                assert found[step][key] == pytest.approx(event[key], rel=1e-10), (kind, step, key)
    norms = [event["grad_norm"] for event in events(folder / "unbroken", "step").values()]
    assert min(norms) > 0.2, "a norm that is not clipped would decide nothing"
    expected_state, state = final(folder / "unbroken"), final(folder / "broken")
    assert state.keys() == expected_state.keys()
    for name, value in expected_state.items():
        assert (state[name] - value).abs().max() <= 1e-10 * max(1.0, float(value.abs().max())), name


@pytest.mark.timeout(560)
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.long) for name in ("shared", "tied", "two dimensions")]
)
def test_a_run_goes_on_in_any_layout_as_if_nothing_had_happened(pools: Pools, tmp_path: Path, model: str) -> None:
    write_text(tmp_path / "text")
    plans = {stop: plan_of(tmp_path / "text", model, **layout) for stop, layout in CHAINS[model].items()}
    assert_goes_on(pools, tmp_path, plan_of(tmp_path / "text", model), plans)


@pytest.mark.timeout(300)
def test_a_run_in_bf16_goes_on_where_a_rank_has_no_head(pools: Pools, tmp_path: Path) -> None:
    """The attention weights of such a rank are empty and of another type than the weights of other ranks."""
    write_text(tmp_path / "text")
    plan = plan_of(tmp_path / "text", "one head", tp=2, precision="bf16")
    assert_goes_on(pools, tmp_path, plan, {3: plan, STEPS: plan})


def write_mixtral(path: Path) -> None:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 2, "vocab_size": 257, "hidden_size": 18, "intermediate_size": 13, "head_dim": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2,
        "max_position_embeddings": 16,
    }  # fmt: skip
    torch.manual_seed(3)
    config = transformers.MixtralConfig(**sizes, initializer_range=0.2)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).save_pretrained(path)


@pytest.mark.long
@pytest.mark.timeout(560)
def test_a_model_of_transformers_goes_on_in_any_layout_and_is_exported_from_it(pools: Pools, tmp_path: Path) -> None:
    """Weights read from a folder, experts stacked, a router that all ranks have; the same folder comes out."""
    write_text(tmp_path / "text")
    write_mixtral(tmp_path / "mixtral")

    def plan(mesh: Mesh, **fields: Any) -> Plan:
        base = plan_of(tmp_path / "text", "shared", tp=mesh.tp, pp=mesh.pp, dp_shard=mesh.dp_shard)
        weights = Weights(source="hf", path=str(tmp_path / "mixtral"))
        kept = {"schedule": base.layout.pipeline.schedule, "accumulation": base.layout.derived.accumulation}
        stages = {"stages": ((0, 1), (1, 2))} if mesh.pp == 2 else {}
        return hf_plan(base, tmp_path / "mixtral", mesh, **kept, **stages, **fields).model_copy(
            update={"weights": weights}
        )

    meshes = {1: Mesh(tp=2), 2: Mesh(tp=2, pp=2), 3: Mesh(), 4: Mesh(tp=2, dp_shard=2), STEPS: Mesh(tp=3)}
    plans = {stop: plan(mesh, zero=3 if mesh.dp_shard == 2 else 1) for stop, mesh in meshes.items()}
    assert_goes_on(pools, tmp_path, plan(Mesh()), plans)

    (tmp_path / "broken" / "plan.json").write_text(plans[STEPS].to_json())
    export(tmp_path / "broken", tmp_path / "out")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    state = final(tmp_path / "broken")
    for name, parameter in back.named_parameters():
        assert torch.equal(parameter.detach(), state[f"model.{name}"]), name
