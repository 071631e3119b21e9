"""Host memory of a node: what ranks copy while they save, how checkpoints are written, and limits of pods."""

from __future__ import annotations

from math import ceil, isclose

import pytest
from often import often
from planned import plan_of, result_of

from partool.plan.types import Plan
from partool.planner.elastic import resized
from partool.render.k8s.resources import memory

GIB = 2.0**30
SPEC = """
model: {preset: llama3-8b}
training: {sequence_length: 4096, global_batch: 64, steps: 1000, precision: bf16}
data: {source: python-stdlib}
hardware: {accelerator: h100-sxm, nodes: 1, per_node: 8}
launch: {target: k8s, image: "registry/train:1", k8s: {storage: "pvc:runs"}}
parallel: {data: {zero: 3}, tensor: {degree: 1}, pipeline: {stages: 1}, sequence: {degree: 1}, recompute: full,
  micro_batch: 1}
"""
LLAMA_8B, LLAMA_70B = 8_030_261_248, 70_553_706_496
LLAMA_1B = 1_235_814_400
"""Numbers of parameters by their configurations (https://huggingface.co/meta-llama)."""
MIXTRAL = 46_702_792_704
PROCESSES_GIB, SHARED_GIB = 8 * 4, 8 * 8


def gib_of(plan: Plan) -> int:
    """Return the rendered limit in GiB."""
    text = memory(plan)
    assert text.endswith("Gi")
    return int(text.removesuffix("Gi"))


@pytest.mark.parametrize(
    ("overrides", "mode", "copies_gib"),
    [
        # fp32 masters and two moments: 12 bytes per parameter, of which each node writes its share.
        ((), "async", 12 * LLAMA_8B / GIB),
        (("model.preset=llama3-70b", "hardware.nodes=8"), "async", 12 * LLAMA_70B / 8 / GIB),
        # Replicas share the writing: all eight ranks together write the state once.
        (("parallel.data.zero=0", "parallel.tensor.degree=4"), "async", 12 * LLAMA_8B / GIB),
        # The embedding and the head are the largest blocks: 128,256 x 4,096, of which each rank has an eighth.
        (("hardware.host_memory_gib=160",), "sync", 2 * 4 * 128_256 * 4_096 / GIB),
        (("checkpoint.mode=sync",), "sync", 2 * 4 * 128_256 * 4_096 / GIB),
    ],
)
def test_a_pods_limit_holds_a_save(overrides: tuple[str, ...], mode: str, copies_gib: float) -> None:
    plan = plan_of(SPEC, *overrides)
    assert plan.checkpoint.mode == mode
    expected = 1.1 * (PROCESSES_GIB + SHARED_GIB + copies_gib)
    assert gib_of(plan) in (ceil(expected), ceil(expected * 1.001))  # shards are rounded up


def test_offloaded_state_is_copied_too() -> None:
    plan = plan_of(SPEC, "parallel.offload.optimizer=cpu", "parallel.offload.gpu_fraction=0")
    predicted = plan.prediction.memory
    assert predicted.host_bytes >= 12 * LLAMA_8B
    assert plan.checkpoint.mode == "async"
    expected = 1.1 * (PROCESSES_GIB + SHARED_GIB + predicted.host_bytes / GIB + 12 * LLAMA_8B / GIB)
    assert gib_of(plan) in (ceil(expected), ceil(expected * 1.001))


STATES = [
    ("llama3-8b", LLAMA_8B, "lion", 8, ("parallel.data.zero=1", "parallel.tensor.degree=2")),
    ("mixtral-8x7b", MIXTRAL, "adamw", 12, ("parallel.expert=8", "hardware.nodes=4")),
    ("mixtral-8x7b", MIXTRAL, "lion", 8, ("parallel.expert=2", "parallel.tensor.degree=4", "hardware.nodes=4")),
    ("llama3-8b", LLAMA_8B, "adamw", 12, ("parallel.sequence.degree=2",)),
    ("llama3.2-1b", LLAMA_1B, "adamw", 12, ("parallel.data.zero=0",)),
    ("llama3.2-1b", LLAMA_1B, "adamw", 12, ("hardware.nodes=2", "parallel.data={zero: 3, shard: 8}")),
    ("llama3.2-1b", LLAMA_1B, "adamw", 12, ("parallel.offload.optimizer=cpu",)),
    ("llama3.2-1b", LLAMA_1B, "adamw", 12, ("parallel.offload={optimizer: nvme, dir: /tmp}",)),
]


@pytest.mark.parametrize(
    ("preset", "parameters", "optimizer", "bytes_per_parameter", "overrides"), often(STATES, STATES[:2])
)
def test_all_ranks_together_write_the_state_once(
    preset: str, parameters: int, optimizer: str, bytes_per_parameter: int, overrides: tuple[str, ...]
) -> None:
    plan = plan_of(SPEC, f"model.preset={preset}", f"optimizer.name={optimizer}", *overrides)
    written = plan.prediction.memory.saved_bytes * plan.layout.mesh.world_size
    assert isclose(written, bytes_per_parameter * parameters, rel_tol=2e-3)


def test_what_compression_left_out_is_written_by_each_rank() -> None:
    plan = plan_of(SPEC, "model.preset=llama3.2-1b", "optimizer.name=zero_one_adam", "parallel.data.zero=0")
    written, totals = plan.prediction.memory.saved_bytes * plan.layout.mesh.world_size, plan.prediction.totals
    assert totals is not None
    assert totals.checkpoint_bytes == written > 1.5 * 12 * LLAMA_1B


def test_what_does_not_fit_is_said() -> None:
    small = ("hardware.host_memory_gib=160",)
    noted = [each for each in result_of(SPEC, *small).diagnostics if each.code == "PT345"]
    assert [(each.severity, each.path) for each in noted] == [("note", ("checkpoint", "mode"))]
    assert "copies of the state take 89.7 GiB" in noted[0].message
    asked = result_of(SPEC, *small, "checkpoint.mode=async")
    assert asked.plan is not None
    assert asked.plan.checkpoint.mode == "async"
    assert [each.severity for each in asked.diagnostics if each.code == "PT345"] == ["warning"]
    for mode in ("auto", "async"):  # memory that is too small without a save is not a finding about saves
        least = result_of(SPEC, "hardware.host_memory_gib=20", f"checkpoint.mode={mode}")
        assert not [each for each in least.diagnostics if each.code == "PT345"]
    assert not [each for each in result_of(SPEC, *small, "checkpoint.mode=sync").diagnostics if each.code == "PT345"]


@pytest.mark.parametrize(
    ("target", "field", "enough", "little"),
    [
        ("launch={target: k8s, image: 'a/b:1', k8s: {shared_memory: 8Gi}}", "launch.k8s.memory", "230Gi", "40Gi"),
        ("launch={target: slurm}", "launch.slurm.memory", "130G", "30G"),
    ],
)
def test_a_limit_of_the_users_decides_too(target: str, field: str, enough: str, little: str) -> None:
    assert plan_of(SPEC, target, f"{field}={enough}").checkpoint.mode == "async"
    result = result_of(SPEC, target, f"{field}={little}")
    assert result.plan is not None
    assert result.plan.checkpoint.mode == "sync"
    found = [each for each in result.diagnostics if each.code == "PT345"]
    assert {each.severity: each.path for each in found} == {"warning": tuple(field.split("."))}


def test_state_on_disks_is_never_copied() -> None:
    offload = "parallel.offload={optimizer: nvme, dir: /nvme}"
    assert plan_of(SPEC, offload).checkpoint.mode == "sync"
    assert plan_of(SPEC, offload, "checkpoint.mode=async").checkpoint.mode == "sync"


def test_fewer_nodes_decide_anew() -> None:
    """On one node of two, each rank copies twice as much."""
    plan = plan_of(SPEC, "launch={target: slurm, min_nodes: 1}", "hardware.nodes=2", "hardware.host_memory_gib=130")
    assert plan.checkpoint.mode == "async"
    smaller = resized(plan, 1)
    assert isinstance(smaller, Plan)
    assert smaller.checkpoint.mode == "sync"
    assert smaller.prediction.memory.saved_bytes == pytest.approx(2 * plan.prediction.memory.saved_bytes, rel=0.01)
