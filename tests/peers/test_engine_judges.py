"""The systems' own classes take the settings that partool writes for them, and have the plan's values afterwards.

DeepSpeed 0.19.8, megatron-core 0.19.2, accelerate 1.15.0, transformers 5.24.0 and torchtitan 0.2.2; ``make peers``
installs them. A system that is not installed is skipped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from _writes import command
from conftest import Judges
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from test_engine_terms import (
    DENSE,
    EXPERTS,
    TITAN,
    accelerate_layouts,
    deepspeed_layouts,
    megatron_layouts,
    on_its_ranks,
    planned,
    spec_of,
    torchtitan_layouts,
)

from partool.engines.write import terms_of
from partool.plan.learning_rate import lr_factor
from partool.plan.types import Plan
from partool.render.program import program

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
OFTEN = settings(
    max_examples=100, deadline=None, phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
ADAMW = {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


@st.composite
def trainings(draw: st.DrawFn, names: tuple[str, ...], precisions: tuple[str, ...]) -> dict[str, Any]:
    """Return sections of a spec: precision, optimizer, clipping and schedule."""
    name = draw(st.sampled_from(names))
    kind = draw(st.sampled_from(("constant", "cosine", "linear", "wsd")))
    return {
        "precision": draw(st.sampled_from(precisions)),
        "name": name,
        "lr": draw(st.sampled_from((1e-3, 3e-4))),
        "betas": draw(st.sampled_from(([0.9, 0.95], [0.9, 0.999]))),
        "momentum": draw(st.sampled_from((0.0, 0.9))),
        "weight_decay": draw(st.sampled_from((0.0, 0.1))),
        "clip": draw(st.sampled_from((None, 1.0, 0.5))),
        "kind": kind,
        "warmup_steps": draw(st.sampled_from((0, 1, 2, 4, 10))),
        "min_ratio": draw(st.sampled_from((0.0, 0.1))),
    }


def trained_so(plan: Plan, told: dict[str, Any]) -> Plan:
    """Return a plan with other settings of its training."""
    schedule = {name: told[name] for name in ("kind", "warmup_steps", "min_ratio")}
    own = {name: told[name] for name in ("name", "lr", "betas", "momentum", "weight_decay")}
    clip = 0.0 if told["clip"] is None else told["clip"]
    optimizer = plan.optimizer.model_copy(
        update=own | {"clip": clip, "schedule": plan.optimizer.schedule.model_copy(update=schedule)}
    )
    training = plan.training.model_copy(update={"precision": told["precision"], "steps": 100})
    return plan.model_copy(update={"training": training, "optimizer": optimizer})


def rates(plan: Plan) -> list[float]:
    """Return the learning rate of each step of partool's runtime."""
    steps, schedule = plan.training.steps, plan.optimizer.schedule
    return [plan.optimizer.lr * lr_factor(schedule, step, steps) for step in range(steps)]


@OFTEN
@given(deepspeed_layouts(), trainings(("adamw", "lion", "sgd", "adagrad"), ("bf16", "fp16", "fp32")))
def test_deepspeed_has_the_plans_values(judges: Judges, changes: dict[str, Any], told: dict[str, Any]) -> None:
    judge = judges["deepspeed"]
    plan = trained_so(planned(spec_of("deepspeed")), told)
    layout = plan.layout.changed(changes)
    ranks = layout.tensor.degree * layout.sequence.degree
    layout = layout.changed({"derived.accumulation": 192 // layout.micro_batch // (16 // ranks)})
    plan = plan.model_copy(update={"layout": layout})
    assume(not terms_of(plan).findings)
    config = json.loads(program(plan).files["ds_config.json"])
    found = judge({"config": config, "world": 16, "steps": plan.training.steps})
    assert found["unknown"] == []
    offload = layout.offload
    assert found["stage"] == layout.data.zero
    assert found["micro"] == layout.micro_batch
    assert found["accumulation"] == layout.derived.accumulation
    if layout.tensor.degree == 1:
        assert found["batch"] == 192
        assert found["data_ranks"] == 16 // layout.sequence.degree
    assert found["tensor"] == (layout.tensor.degree if layout.tensor.degree > 1 else 0)
    assert found["optimizer_device"] == offload.optimizer
    if offload.optimizer != "none":
        assert found["optimizer_ratio"] == 1.0 - offload.gpu_fraction
        assert found["optimizer_folder"] == offload.dir
    assert found["parameter_device"] == offload.parameters
    assert found["parameter_folder"] == (offload.dir if offload.parameters == "nvme" else None)
    assert (found["bf16"], found["fp16"]) == (told["precision"] == "bf16", told["precision"] == "fp16")
    assert found["clip"] == plan.optimizer.clip
    assert found["optimizer"].lower() == told["name"]
    near(found["rates"], plan)


def near(found: list[float], plan: Plan) -> None:
    """Check the rates of DeepSpeed's schedule, which are the plan's once the warm-up is over."""
    schedule, peak = plan.optimizer.schedule, plan.optimizer.lr
    wanted, warmup = rates(plan), schedule.warmup_steps
    assert max(found) <= peak * (1 + 1e-9)
    over = max(warmup, 3)
    exact = schedule.kind != "cosine" or warmup >= 3
    assert found[over:] == pytest.approx(wanted[over:], abs=peak * (1e-9 if exact else 0.05))
    if warmup >= 4:
        late = peak * max(2 / warmup, schedule.min_ratio)
        assert found[:over] == pytest.approx(wanted[:over], abs=late * 1.01)


@OFTEN
@given(megatron_layouts(), trainings(("adamw", "sgd"), ("bf16", "fp16", "fp32", "fp8")))
def test_megatron_has_the_plans_values(
    judges: Judges, tmp_path: Path, drawn: tuple[bool, dict[str, Any]], told: dict[str, Any]
) -> None:
    judge = judges["megatron"]
    experts, changes = drawn
    plan = trained_so(on_its_ranks(planned(spec_of("megatron", EXPERTS if experts else DENSE)), changes), told)
    assume(not terms_of(plan).findings)
    words, environment = command(plan, tmp_path)
    layout, training = plan.layout, plan.training
    arguments, connections = words[words.index("mine.py") + 1 :], environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    found = judge({"arguments": arguments, "world": layout.mesh.world_size, "connections": connections})
    model, args, optimizer = found["model"], found["arguments"], found["optimizer"]
    _same_model(plan, model)
    assert args["seq_length"] == training.sequence_length
    assert (args["micro_batch_size"], args["global_batch_size"]) == (layout.micro_batch, training.global_batch)
    assert args["data_parallel_size"] == layout.mesh.dp
    assert (model["bf16"], model["fp16"]) == (told["precision"] in ("bf16", "fp8"), told["precision"] == "fp16")
    assert model["fp8"] == ("hybrid" if told["precision"] == "fp8" else None)
    assert model["tensor_model_parallel_size"] == layout.tensor.degree
    assert model["sequence_parallel"] == layout.tensor.sequence_norms
    assert model["pipeline_model_parallel_size"] == layout.pipeline.stages
    assert (model["virtual_pipeline_model_parallel_size"] or 1) == layout.pipeline.chunks
    assert model["context_parallel_size"] == layout.sequence.degree
    if experts:
        assert model["expert_model_parallel_size"] == layout.expert
        assert model["expert_tensor_parallel_size"] == layout.expert_tensor
    assert optimizer["use_distributed_optimizer"] == (layout.data.zero > 0)
    assert args["use_megatron_fsdp"] == (layout.data.zero > 1)
    if layout.data.zero > 1:
        sharding = found["data_parallel"]["data_parallel_sharding_strategy"]
        assert sharding == {2: "optim_grads", 3: "optim_grads_params"}[layout.data.zero]
    assert optimizer["optimizer_cpu_offload"] == (layout.offload.optimizer != "none")
    if layout.offload.optimizer != "none":
        assert optimizer["optimizer_offload_fraction"] == 1.0 - layout.offload.gpu_fraction
    full, chunk = model["recompute_granularity"] == "full", layout.pipeline.bounds[0]
    assert full == ("full" in layout.recompute)
    assert (model["recompute_granularity"] == "selective") == ("attention" in layout.recompute)
    if full and model["recompute_method"] == "block":
        assert model["recompute_num_layers"] == layout.recompute[slice(*chunk)].count("full")
    assert optimizer["clip_grad"] == plan.optimizer.clip
    assert optimizer["weight_decay"] == plan.optimizer.weight_decay
    assert optimizer["optimizer"] == {"adamw": "adam", "sgd": "sgd"}[told["name"]]
    wanted = rates(plan)
    # The scheduler's step 0 is before the first: all rates are one step late.
    assert found["rates"][1:] == pytest.approx(wanted[:-1], abs=1e-9)


def _same_model(plan: Plan, found: dict[str, Any]) -> None:
    model = plan.model
    assert found["num_layers"] == model.layers
    assert found["hidden_size"] == model.hidden
    assert found["ffn_hidden_size"] == model.ffn_hidden
    assert found["num_attention_heads"] == model.heads
    assert (found["num_query_groups"] or model.heads) == model.kv_heads
    assert found["layernorm_epsilon"] == model.norm_eps
    assert found["normalization"] == {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}[model.norm]
    assert found["gated_linear_unit"] == (model.activation == "swiglu")
    assert found["add_bias_linear"] == model.out_bias
    assert found["hidden_dropout"] == found["attention_dropout"] == 0.0
    assert found["init_method_std"] == model.init_std
    if model.moe is not None:
        assert found["num_moe_experts"] == model.moe.experts
        assert found["moe_router_topk"] == model.moe.top_k
        assert found["moe_ffn_hidden_size"] == model.moe.ffn_hidden


@OFTEN
@given(accelerate_layouts(), trainings(("adamw", "lion", "sgd", "adagrad"), ("bf16", "fp16", "fp32")))
def test_accelerate_has_the_plans_values(
    judges: Judges, tmp_path: Path, changes: dict[str, Any], told: dict[str, Any]
) -> None:
    judge = judges["accelerate"]
    plan = trained_so(on_its_ranks(planned(spec_of("accelerate")), changes), told)
    assume(not terms_of(plan).findings)
    words, _ = command(plan, tmp_path)
    assert words[0] == "launch"
    at = words.index("mine.py")
    found = judge({"options": words[1:at], "arguments": words[at + 1 :]})
    layout, launch, sharding, training = plan.layout, found["launch"], found["sharding"], found["training"]
    zero, mesh = layout.data.zero, layout.mesh
    assert found["rest"] == ["--max_length", str(plan.training.sequence_length)]
    assert (launch["num_machines"], launch["num_processes"]) == (plan.devices.nodes, mesh.world_size)
    assert (launch["use_fsdp"], launch["multi_gpu"]) == (zero > 0, zero == 0)
    assert launch["mixed_precision"] == {"fp32": "no"}.get(told["precision"], told["precision"])
    if zero:
        assert sharding["fsdp_version"] == 2
        assert sharding["reshard_after_forward"] == (zero == 3)
        assert (sharding["offloads"] == "CPUOffloadPolicy") == (layout.offload.parameters == "cpu")
    if found["mesh"]:
        shards = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard} if zero else {}
        assert found["mesh"] | {"tp": mesh.tp, "cp": mesh.cp} | shards == found["mesh"]
    else:
        assert (mesh.tp, mesh.cp) == (1, 1)
        assert not zero or mesh.dp_replicate == 1
    if mesh.cp > 1:
        assert found["rotation"] == {"ring": "alltoall", "all_gather": "allgather"}[layout.sequence.method]
    assert training["per_device_train_batch_size"] == layout.micro_batch
    assert training["gradient_accumulation_steps"] == layout.derived.accumulation
    assert training["max_steps"] == plan.training.steps
    assert training["gradient_checkpointing"] == ("full" in layout.recompute)
    assert training["torch_compile"] == (layout.compile == "block")
    assert (training["bf16"], training["fp16"]) == (told["precision"] == "bf16", told["precision"] == "fp16")
    assert training["learning_rate"] == plan.optimizer.lr
    assert training["weight_decay"] == plan.optimizer.weight_decay
    assert training["max_grad_norm"] == plan.optimizer.clip
    # The step that Trainer's schedule calls the first has no learning rate if it warms up: all are one step late.
    assert found["rates"][1:] == pytest.approx(rates(plan)[:-1], abs=1e-9)


@OFTEN
@given(torchtitan_layouts(), trainings(("adamw",), ("bf16", "fp32", "fp8")))
def test_torchtitan_has_the_plans_values(judges: Judges, changes: dict[str, Any], told: dict[str, Any]) -> None:
    judge = judges["torchtitan"]
    plan = trained_so(on_its_ranks(planned(spec_of("torchtitan", TITAN)), changes), told)
    assume(not terms_of(plan).findings)
    found = judge({"config": program(plan).files["job.toml"], "steps": plan.training.steps})
    layout, parallel, training = plan.layout, found["parallelism"], found["training"]
    zero, mesh, pipeline = layout.data.zero, layout.mesh, layout.pipeline
    assert parallel["data_parallel_replicate_degree"] == (mesh.dp_replicate if zero else mesh.dp)
    assert parallel["data_parallel_shard_degree"] == (mesh.dp_shard if zero else 1)
    assert (parallel["tensor_parallel_degree"], parallel["context_parallel_degree"]) == (mesh.tp, mesh.cp)
    assert parallel["pipeline_parallel_degree"] == pipeline.stages
    assert parallel["expert_parallel_degree"] == layout.expert
    if zero and mesh.dp_shard * mesh.cp > 1:
        assert parallel["fsdp_reshard_after_forward"] == ("never" if zero == 2 else "default")
    assert training["global_batch_size"] == plan.training.global_batch
    local = layout.micro_batch * (layout.derived.accumulation if pipeline.stages > 1 else 1)
    assert training["local_batch_size"] == local
    assert training["steps"] == plan.training.steps
    assert training["enable_cpu_offload"] == (layout.offload.optimizer == "cpu")
    assert training["max_norm"] == (plan.optimizer.clip or pytest.approx(1e9))
    assert found["compile"]["enable"] == (layout.compile == "block")
    assert found["optimizer"]["lr"] == plan.optimizer.lr
    assert found["optimizer"]["weight_decay"] == plan.optimizer.weight_decay
