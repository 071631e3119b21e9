"""Pods of several nodes that get no network adapters, though the plan is priced on the nodes' fast fabric."""

from __future__ import annotations

import re

import pytest
from planned import plan_of, problem_of, result_of

from partool.cost.training.predict import predict_time
from partool.diagnostics.record import Diagnostic
from partool.planner.elastic import job_of_plan

SPEC = """
model: {preset: llama3-8b}
training: {sequence_length: 4096, global_batch: 64, steps: 1000, precision: bf16}
data: {source: python-stdlib}
hardware: {accelerator: h100-sxm, nodes: 2, per_node: 8, fabric: ib-ndr}
launch: {target: k8s, image: "registry/train:1", k8s: {storage: "pvc:runs"}}
parallel: {data: {zero: 3}, tensor: {degree: 1}, pipeline: {stages: 1}, sequence: {degree: 1}, recompute: full,
  micro_batch: 1}
"""


def finding(*overrides: str) -> Diagnostic | None:
    return next((each for each in result_of(SPEC, *overrides).diagnostics if each.code == "PT346"), None)


def test_the_likely_step_times_are_those_of_the_layout_on_these_fabrics() -> None:
    found = finding()
    assert found is not None
    assert (found.severity, found.path) == ("warning", ("launch", "k8s"))
    plan = plan_of(SPEC)
    told = [float(text) for text in re.findall(r"([\d.]+) s\b", found.message)]
    for seconds, fabric in zip(told, ("ib-ndr", "ethernet-100g", "ethernet-25g"), strict=True):
        devices = problem_of(SPEC, f"hardware.fabric={fabric}").devices
        time = predict_time(job_of_plan(plan, devices), plan.layout, 1)
        assert float(f"{time.step_time_s:.3g}") == seconds
    assert told[2] > told[1] > told[0]
    assert "NCCL_NET" not in found.message
    forced = finding("launch.network=auto")
    assert forced is not None
    assert "NCCL_NET=IB, which the preset ib sets, ends such a run at its start" in forced.message
    assert all(word in found.help for word in ("rdma:", "host_network: true", "k8s.v1.cni.cncf.io/networks"))


@pytest.mark.parametrize(
    ("override", "warned"),
    [
        ("launch.network=tcp", True),
        ("hardware.fabric=efa", True),
        ("hardware.fabric=ethernet-100g", False),
        ("hardware.nodes=1", False),
        ("launch={target: slurm}", False),
        ("launch.k8s.host_network=true", False),
        ("launch.k8s.rdma={resource: rdma/hca, count: 8}", False),
        ("launch.k8s.annotations={k8s.v1.cni.cncf.io/networks: ib-net}", False),
    ],
)
def test_whether_pods_have_adapters_is_seen_in_the_section(override: str, warned: bool) -> None:
    found = finding(override)
    assert (found is not None) == warned


@pytest.mark.long
def test_a_run_that_cannot_start_is_worth_a_warning_even_where_it_would_be_as_fast() -> None:
    """Pipeline stages on two nodes send little; the preset's NCCL_NET=IB ends the ranks all the same."""
    layout = (
        "model.preset=llama3-70b", "hardware.nodes=4", "training.global_batch=256",
        "parallel={tensor: {degree: 4}, pipeline: {stages: 8}, data: {zero: 0}, recompute: full, micro_batch: 1}",
    )  # fmt: skip
    assert finding(*layout) is None
    found = finding(*layout, "launch.network=auto")
    assert found is not None
    assert "NCCL_NET=IB" in found.message
    assert finding(*layout, "launch.network=auto", "launch.env.NCCL_NET=Socket") is None
