"""Plans on fewer nodes: the same sequences per step and the same degrees, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _launch_case import launch_plan
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from layouts import laid, new_layout
from planned import plan_of

from partool.plan.layout import Mesh
from partool.plan.types import Plan
from partool.planner import make_plan
from partool.planner.elastic import check_elastic, resized, sizes
from partool.planner.rules.hardware import check_hardware, is_superchip
from partool.spec import load_text
from partool.spec.launch import LaunchSpec

LLAMA = """\
spec: 1
model: {layers: 32, hidden: 4096, ffn_hidden: 14336, heads: 32, kv_heads: 8, vocab: 128256}
hardware: {accelerator: h100-sxm, nodes: NODES}
training: {sequence_length: 8192, global_batch: BATCH, steps: 100}
data: python-stdlib
"""


def planned(nodes: int = 4, batch: int = 192, more: str = "") -> Plan:
    return plan_of(LLAMA.replace("NODES", str(nodes)).replace("BATCH", str(batch)) + more, name="llama")


def with_layout(plan: Plan, mesh: Mesh, **layout: Any) -> Plan:
    return plan.model_copy(update={"layout": laid(plan.layout, mesh=mesh, **layout)})


def tiny(plan: Plan) -> Plan:
    """Return a plan of two narrow layers, which fits anywhere."""
    fields = {"layers": 2, "hidden": 64, "ffn_hidden": 64, "vocab": 512, "head_dim": 2}
    return plan.model_copy(update={"model": plan.model.model_copy(update=fields), "runnable": False})


TINY: dict[str, Any] = {"recompute": ("none", "none"), "stages": ((0, 2),)}


@pytest.fixture(scope="module")
def plan() -> Plan:
    parallel = "parallel: {data: {zero: 3}, sequence: 1, offload: {activations: none}}\n"
    return planned(more="launch: {target: slurm, min_nodes: 1}\n" + parallel)


def test_a_plan_for_fewer_nodes_is_a_plan_of_its_own(plan: Plan) -> None:
    found, reasons = sizes(plan)
    assert (list(found), reasons) == ([1, 2, 3], [])
    for nodes, smaller in found.items():
        mesh = smaller.layout.mesh
        assert mesh.world_size == 8 * nodes == smaller.devices.nodes * smaller.devices.per_node
        assert smaller.layout.micro_batch * smaller.layout.derived.accumulation * mesh.dp == 192
        assert smaller.hash != plan.hash
        assert smaller.launch == plan.launch.model_copy(update={"shutdown_timeout_s": smaller.launch.window_s})
        assert smaller.launch.window_s >= plan.launch.window_s  # longer steps, and more to write per node
        assert smaller.training == plan.training
        assert Plan.from_json(smaller.to_json()) == smaller


def limits(plan: Plan, time: str, *, target: str = "slurm", requeues: int = 20) -> list[tuple[str, str, str]]:
    """Return (code, severity, message) of the findings about sizes with a time limit of Slurm."""
    slurm = {"time": time, "partition": "gpu"}
    launch = LaunchSpec.model_validate({"target": target, "min_nodes": 1, "requeues": requeues, "slurm": slurm})
    launch = launch.model_copy(update={"shutdown_timeout_s": plan.launch.window_s})
    found = check_elastic(plan.model_copy(update={"launch": launch}))
    assert all(finding.path == ("launch", "slurm", "time") for finding in found)
    return [(finding.code, finding.severity, finding.message) for finding in found]


def test_the_fewest_nodes_are_compared_with_the_time_limit(plan: Plan) -> None:
    """Training takes about four times as long on one node as on four."""
    smaller = resized(plan, 1)
    assert isinstance(smaller, Plan)
    most_s, least_s = smaller.prediction.time.total_s, plan.prediction.time.total_s
    assert most_s > 3 * least_s
    between = f"{int((most_s + least_s) / 120)}"
    assert limits(plan, f"{int(2 * most_s / 60)}") == []
    [(code, severity, message)] = limits(plan, between)
    assert (code, severity) == ("PT527", "note")
    assert message.startswith("with 1 node, the fewest that min_nodes allows, training takes ")
    assert ": it is requeued once" in message
    [(code, severity, message)] = limits(plan, between, requeues=0)
    assert (code, severity) == ("PT527", "warning")
    assert message.endswith("it is requeued once, and requeues: 0 allows fewer")
    both = f"{int(least_s / 120)}"  # with all nodes the run is cut off as well, which is said there
    assert limits(plan, both, requeues=0) == []


def test_predictions_are_those_of_a_plan_made_for_that_size(plan: Plan) -> None:
    smaller = resized(plan, 2)
    assert isinstance(smaller, Plan)
    layout = smaller.layout
    recompute = str(list(layout.recompute)).replace("'", "")
    pinned = f"data: {{zero: 3, shard: 16}}, micro_batch: {layout.micro_batch}, recompute: {recompute}"
    made = planned(
        nodes=2, more=f"parallel: {{tensor: 1, pipeline: 1, sequence: 1, offload: {{activations: none}}, {pinned}}}\n"
    )
    assert made.layout == layout
    assert made.prediction.time == smaller.prediction.time
    assert made.prediction.memory == smaller.prediction.memory
    assert smaller.prediction.memory.total_bytes > plan.prediction.memory.total_bytes
    assert smaller.prediction.time.step_time_s > 1.7 * plan.prediction.time.step_time_s
    assert smaller.alternatives == smaller.candidates == ()
    assert "data-parallel ranks 32 → 16" in smaller.reasons[0]


@pytest.mark.parametrize(
    ("mesh", "fields", "nodes", "reason"),
    [
        (Mesh(pp=4, tp=8), {}, 3, "tensor 8 × pipeline 4 needs 32 ranks, 3 nodes have 24"),
        (Mesh(pp=2, tp=8, dp_shard=2), {}, 1, "tensor 8 × pipeline 2 needs 16 ranks, 1 node has 8"),
        (Mesh(cp=16, dp_shard=2), {}, 3, "sequence 16 takes 16 ranks at a time, 3 nodes have 24"),
        (Mesh(dp_shard=32), {"expert": 16}, 3, "expert 16 does not divide the 24 ranks that would share the experts"),
        (
            Mesh(dp_shard=4, tp=8),
            {"expert": 16},
            3,
            "expert 16 does not divide the 24 ranks that would share the experts",
        ),
        (Mesh(dp_shard=32), {}, 4, "the plan has 4 nodes, fewer are asked for"),
        (Mesh(dp_shard=32), {}, 0, "the plan has 4 nodes, fewer are asked for"),
    ],
)
def test_why_there_is_no_smaller_plan(plan: Plan, mesh: Mesh, fields: dict[str, Any], nodes: int, reason: str) -> None:
    assert resized(with_layout(plan, mesh, **fields), nodes) == reason


def test_the_batch_has_to_divide(plan: Plan) -> None:
    training = plan.training.model_copy(update={"global_batch": 512})
    odd = plan.model_copy(update={"training": training})
    assert resized(odd, 3) == "global batch 512 does not divide by 24 data-parallel ranks"
    rounds = with_layout(plan, Mesh(pp=4, dp_shard=8), schedule="interleaved", chunks=2, micro_batch=2, accumulation=12)
    uneven = rounds.model_copy(update={"training": plan.training.model_copy(update={"global_batch": 18})})
    assert resized(uneven, 3) == (
        "3 sequences per rank cannot be cut for the schedule: "
        "interleaved: 1 micro-batches are no multiple of the 4 pipeline ranks"
    )


def test_micro_batches_shrink_where_the_old_ones_do_not_divide(plan: Plan) -> None:
    four = with_layout(tiny(plan), Mesh(dp_shard=32), **TINY, micro_batch=4, accumulation=2)
    training = plan.training.model_copy(update={"global_batch": 288})
    smaller = resized(four.model_copy(update={"training": training}), 2)
    assert isinstance(smaller, Plan)
    assert (smaller.layout.micro_batch, smaller.layout.derived.accumulation) == (3, 6)


@pytest.mark.parametrize(
    ("mesh", "nodes", "expected"),
    [
        (Mesh(dp_replicate=4, dp_shard=8), 3, (3, 8)),
        (Mesh(dp_replicate=2, dp_shard=16), 3, (1, 24)),
        (Mesh(dp_replicate=2, dp_shard=16), 1, (1, 8)),
        (Mesh(dp_replicate=32), 2, (16, 1)),
        (Mesh(dp_shard=32), 2, (1, 16)),
        (Mesh(dp_shard=16, tp=2), 3, (1, 12)),
    ],
)
def test_groups_that_share_the_state_do_not_become_smaller_without_need(
    plan: Plan, mesh: Mesh, nodes: int, expected: tuple[int, int]
) -> None:
    zero = 0 if mesh.dp_shard == 1 else 2
    layout = {"micro_batch": 1, "accumulation": 192 // mesh.dp}
    smaller = resized(with_layout(tiny(plan), mesh, zero=zero, **layout, **TINY), nodes)
    assert isinstance(smaller, Plan), smaller
    assert (smaller.layout.mesh.dp_replicate, smaller.layout.mesh.dp_shard) == expected


def test_more_state_per_rank_than_fits_is_refused_with_the_numbers() -> None:
    text = "launch: {target: slurm}\nparallel: {tensor: 1, pipeline: 1, sequence: 1, data: {zero: 3}}\n"
    large = LLAMA.replace("layers: 32, hidden: 4096, ffn_hidden: 14336", "layers: 80, hidden: 8192, ffn_hidden: 28672")
    loaded = load_text(large.replace("NODES", "16").replace("BATCH", "1920") + text)
    assert loaded.spec is not None
    plan = make_plan(loaded.spec, base_dir=Path("/"), default_name="large").plan
    assert plan is not None
    assert isinstance(resized(plan, 15), Plan)
    reason = resized(plan, 1)
    assert isinstance(reason, str)
    assert "GiB per rank would be needed" in reason
    assert reason.endswith("fewer ranks share the state")


def test_host_memory_counts_too() -> None:
    text = "parallel: {data: {zero: 2}, offload: {optimizer: cpu, gpu_fraction: 0.0}, tensor: 1, pipeline: 1}\n"
    loaded = load_text(LLAMA.replace("NODES", "4").replace("BATCH", "192").replace("h100-sxm", "gh200-96") + text)
    assert loaded.spec is not None
    plan = make_plan(loaded.spec, base_dir=Path("/"), default_name="large").plan
    assert plan is not None
    assert isinstance(resized(plan, 1), Plan)
    devices = plan.devices.model_copy(update={"host_memory_bytes": 64 * 2**30})
    reason = resized(plan.model_copy(update={"devices": devices}), 1)
    assert isinstance(reason, str)
    assert "GiB of host memory per node would be needed, of 58" in reason


def test_a_size_that_the_runtime_cannot_run_is_refused(plan: Plan) -> None:
    fused = with_layout(plan, Mesh(dp_shard=16, tp=2), accumulation=12, micro_batch=1, tensor_overlap="symmetric")
    message = "the runtime does not run tensor parallelism through symmetric memory yet"
    assert resized(fused.model_copy(update={"runnable": True}), 2) == message


def test_ranks_that_share_sequences_stay_as_many(plan: Plan) -> None:
    shared = resized(with_layout(plan, Mesh(cp=2, dp_shard=16), accumulation=12, micro_batch=1), 2)
    assert isinstance(shared, Plan)
    assert (shared.layout.mesh.cp, shared.layout.mesh.dp_shard) == (2, 8)


def diagnosed(nodes: int, batch: int, more: str) -> dict[str, tuple[str, str]]:
    loaded = load_text(LLAMA.replace("NODES", str(nodes)).replace("BATCH", str(batch)) + more)
    assert loaded.spec is not None, loaded.diagnostics
    result = make_plan(loaded.spec, base_dir=Path("/"), default_name="llama")
    assert (result.plan is None) == any(d.severity == "error" for d in result.diagnostics)
    return {d.code: (d.severity, d.message) for d in result.diagnostics}


def test_the_planner_says_so_where_the_run_cannot_shrink() -> None:
    slurm = "launch: {target: slurm, min_nodes: 3}\n"
    found = diagnosed(4, 192, slurm + "parallel: {tensor: 8, pipeline: 4}\n")
    severity, message = found["PT530"]
    assert severity == "error"
    assert "tensor 8 × pipeline 4 needs 32 ranks, 3 nodes have 24" in message
    simple = "parallel: {tensor: 1, pipeline: 1, sequence: 1, data: {zero: 3}}\n"
    found = diagnosed(4, 256, slurm.replace("3", "2") + simple)
    assert found["PT531"] == (
        "note", "no plan for 3 nodes: global batch 256 does not divide by 24 data-parallel ranks",
    )  # fmt: skip
    assert "PT530" not in found
    assert {"PT530", "PT531"} & set(diagnosed(4, 256, slurm.replace("3", "4") + simple)) == set()


def test_degrees_that_are_open_are_chosen_so_that_the_run_can_shrink() -> None:
    mesh = planned(nodes=4, batch=96, more="launch: {target: slurm, min_nodes: 3}\n").layout.mesh
    assert 24 % (mesh.tp * mesh.pp * mesh.cp) == 0


def test_no_smaller_size_is_asked_for(plan: Plan) -> None:
    fixed = plan.model_copy(update={"launch": LaunchSpec(target="slurm")})
    assert sizes(fixed) == ({}, [])
    assert check_elastic(fixed) == []


@settings(deadline=None, max_examples=100)
@given(
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3]),
    cp=st.sampled_from([1, 2]),
    replicas=st.integers(1, 6),
    shard=st.integers(1, 6),
    micro=st.integers(1, 6),
    accumulation=st.integers(1, 12),
    per_node=st.sampled_from([1, 2, 4, 6, 8]),
    chunks=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_a_smaller_plan_keeps_the_batch_and_fills_its_ranks(
    tp: int, pp: int, cp: int, replicas: int, shard: int, micro: int, accumulation: int, per_node: int, chunks: int,
    data: st.DataObject,
) -> None:  # fmt: skip
    mesh = Mesh(tp=tp, pp=pp, cp=cp, dp_replicate=replicas, dp_shard=shard)
    assume(mesh.world_size % per_node == 0 and mesh.world_size > per_node)
    assume(chunks == 1 or (pp > 1 and accumulation % pp == 0))
    plan = launch_plan(nodes=mesh.world_size // per_node, per_node=per_node)
    batch = micro * accumulation * mesh.dp
    layers = pp * chunks
    layout = new_layout(
        mesh=mesh, zero=0 if shard == 1 else 3, micro_batch=micro, accumulation=accumulation, chunks=chunks,
        recompute=("none",) * layers, compile="none", stages=tuple((i, i + 1) for i in range(layers)),
        schedule="interleaved" if chunks > 1 else "1f1b",
    )  # fmt: skip
    training = plan.training.model_copy(update={"global_batch": batch, "sequence_length": 64})
    heads = {"layers": layers, "heads": 4, "kv_heads": 4, "hidden": 64, "ffn_hidden": 64, "head_dim": 16}
    model = plan.model.model_copy(update=heads)
    plan = plan.model_copy(update={"layout": layout, "training": training, "model": model, "runnable": False})
    nodes = data.draw(st.integers(1, plan.devices.nodes - 1))
    smaller = resized(plan, nodes)
    if isinstance(smaller, str):
        ranks, fixed = nodes * per_node, tp * pp * cp
        rounds = pp if chunks > 1 else 1
        divides = ranks % fixed == 0 and batch % (ranks // fixed) == 0
        assert not divides or batch // (ranks // fixed) % rounds, smaller
        return
    new, old = smaller.layout, layout
    assert new.micro_batch * new.derived.accumulation * new.mesh.dp == batch
    assert new.mesh.world_size == nodes * per_node == smaller.devices.nodes * smaller.devices.per_node
    assert (new.mesh.tp, new.mesh.pp, new.mesh.cp, new.expert, new.data.zero) == (tp, pp, cp, old.expert, old.data.zero)
    assert new.micro_batch <= micro
    assert new.mesh.dp_shard >= min(shard, new.mesh.dp)
    assert chunks == 1 or new.derived.accumulation % pp == 0
    assert (new.pipeline, new.recompute) == (old.pipeline, old.recompute)


def image(name: str, accelerator: str, **launch: Any) -> list[str]:
    plan = launch_plan(1, 1, accelerator, {"mi300x": "rocm", "cpu": "cpu"}.get(accelerator, "cuda"), target="k8s")
    spec = LaunchSpec(**{"target": "k8s", "image": name} | launch)
    return [f"{d.code} {d.severity}" for d in check_hardware(spec, plan.devices)]


@pytest.mark.parametrize(
    ("name", "accelerator", "codes"),
    [
        ("ghcr.io/team/train:1.2-amd64", "gh200-96", ["PT533"]),
        ("team/train-x86_64", "gb200", ["PT533"]),
        ("amd64/ubuntu:24.04", "gh200-144", ["PT533"]),
        ("registry/train:cuda12-x86", "gb300", ["PT533"]),
        ("ghcr.io/team/train:1.2-arm64", "gh200-96", []),
        ("ghcr.io/team/train:1.2", "gh200-96", []),
        ("ghcr.io/team/train:1.2-aarch64", "h100-sxm", ["PT533"]),
        ("arm64v8/python:3.12", "mi300x", ["PT533"]),
        ("ghcr.io/team/train:1.2-arm64", "cpu", []),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "mi300x", ["PT534"]),
        ("pytorch/pytorch:2.9.0-cuda12.8-cudnn9-runtime", "mi300x", ["PT534"]),
        ("team/train:cu128", "mi300x", ["PT534"]),
        ("rocm/pytorch:rocm6.4_ubuntu24.04_py3.12", "mi300x", []),
        ("rocm/pytorch:rocm6.4_ubuntu24.04_py3.12", "h100-sxm", ["PT534"]),
        ("nvidia/cuda:12.8.0-runtime-ubuntu24.04", "h100-sxm", []),
        ("nvcr.io/team/rocm-train:1", "mi300x", []),
        ("team/barracuda:1", "mi300x", []),
        ("team/procmail:1", "h100-sxm", []),
        ("team/train:1-arm64-rocm6.4", "h100-sxm", ["PT533", "PT534"]),
        ("team/train:1-cu128", "cpu", []),
    ],
)
def test_images_for_other_machines(name: str, accelerator: str, codes: list[str]) -> None:
    assert image(name, accelerator) == [f"{code} error" for code in codes]
    slurm = {"target": "slurm", "slurm": {"container": "pyxis"}}
    assert image(name, accelerator, **slurm) == [f"{code} error" for code in codes]
    assert image(name, accelerator, target="local") == []


def test_node_selectors_for_other_machines() -> None:
    def selected(arch: str) -> dict[str, Any]:
        return {"k8s": {"node_selector": {"kubernetes.io/arch": arch}}}

    assert image("team/train:1", "gh200-96", **selected("amd64")) == ["PT533 error"]
    assert image("team/train:1", "gh200-96", **selected("arm64")) == []
    assert image("team/train:1", "h100-sxm", **selected("arm64")) == ["PT533 error"]
    assert image("team/train:1", "h100-sxm", **selected("amd64")) == []


def test_superchips() -> None:
    names = ("gh200-96", "gh200-144", "gb200", "gb300", "h100-sxm", "b200", "mi300x", "cpu", "mine")
    assert [is_superchip(name) for name in names] == [True] * 4 + [False] * 5
