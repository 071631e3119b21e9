"""Findings that arise only when a job is rendered for Kubernetes."""

from __future__ import annotations

from typing import Any

import pytest
from _k8s_case import EVERY_KIND, k8s_job, k8s_plan
from _launch_case import launch_job
from layouts import laid

from partool.diagnostics.record import Diagnostic
from partool.render.job import Job
from partool.render.k8s import findings
from partool.spec.data import DataSpec
from partool.spec.training import CheckpointSpec, KernelsSpec


def found(job: Job, code: str) -> list[Diagnostic]:
    """Return the findings with a code."""
    return [each for each in findings(job) if each.code == code]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_nothing_is_found_in_a_plain_job(kind: str) -> None:
    expected = ["PT563"] if kind == "pytorchjob" else []
    assert [each.code for each in findings(k8s_job(kind))] == expected


def test_a_plan_that_a_config_map_cannot_hold() -> None:
    plan = k8s_plan()
    small = plan.model_copy(update={"reasons": ("x" * 800_000,)})
    large = plan.model_copy(update={"reasons": ("x" * 900_000,)})
    assert found(launch_job(small), "PT561") == []
    (finding,) = found(launch_job(large), "PT561")
    assert finding.severity == "error"
    assert "900,000" in finding.message


@pytest.mark.parametrize(
    ("kind", "launch", "name"),
    [
        ("trainjob", {"restarts": 2}, "restarts"),
        ("trainjob", {"k8s": {"host_network": True}}, "host_network"),
        ("trainjob", {"k8s": {"image_pull_policy": "Always"}}, "image_pull_policy"),
        ("trainjob", {"k8s": {"priority": "high"}}, "priority"),
        ("trainjob", {"k8s": {"keep_finished_s": 5}}, "keep_finished_s"),
        ("trainjob", {"env": {f"V{index}": "x" for index in range(126)}}, "128 environment variables"),
        ("volcano", {"k8s": {"deadline_s": 60}}, "deadline_s"),
    ],
)
def test_what_a_kind_has_no_field_for(kind: str, launch: dict[str, Any], name: str) -> None:
    (finding,) = found(k8s_job(kind, **launch), "PT562")
    assert finding.severity == "error"
    assert name in finding.message
    assert "kind: jobset" in finding.help
    assert found(k8s_job("jobset", **launch), "PT562") == []
    assert found(k8s_job("trainjob", k8s={"priority": "high", "queue": "research"}), "PT562") == []


@pytest.mark.parametrize(
    ("kind", "restarts", "words"),
    [
        ("pytorchjob", 0, "ends for good"),
        ("pytorchjob", 2, "among its 2 restarts"),
        ("volcano", 2, "among its 2 restarts"),
        ("volcano", 0, None),
        ("jobset", 2, None),
        ("job", 2, None),
    ],
)
def test_kinds_that_take_a_preemption_for_a_failure(kind: str, restarts: int, words: str | None) -> None:
    messages = [each.message for each in found(k8s_job(kind, restarts=restarts), "PT563")]
    assert [words in message for message in messages if words] == ([True] if words else [])
    assert bool(messages) == bool(words)


def test_names_that_kubernetes_does_not_take() -> None:
    (finding,) = found(launch_job(k8s_plan(), run_id="7b-12345678"), "PT564")
    assert finding.path == ("name",)
    (finding,) = found(k8s_job(k8s={"device_resource": "gpu"}), "PT564")
    assert finding.path == ("launch", "k8s", "device_resource")
    (finding,) = found(k8s_job(k8s={"rdma": {"resource": "hca"}}), "PT564")
    assert finding.path == ("launch", "k8s", "rdma", "resource")


def test_arrays_and_changing_sizes_are_for_slurm() -> None:
    plan = k8s_plan()
    (finding,) = found(launch_job(plan, tasks=(plan, plan)), "PT565")
    assert "2 tasks" in finding.message
    (finding,) = found(launch_job(plan, sizes={1: plan}), "PT565")
    assert finding.path == ("launch", "min_nodes")


def test_paths_that_no_pod_has() -> None:
    plan = k8s_plan(mounts=[{"source": "pvc:data", "target": "/data"}])
    data = DataSpec(source=["/data/tokens/*.bin", "/home/me/more.bin"], cache="/datastore/cache")
    job = launch_job(plan.model_copy(update={"data": data, "checkpoint": CheckpointSpec(dir="/partool/checkpoints")}))
    assert [each.severity for each in found(job, "PT566")] == ["warning", "error"]  # the cache cannot be written there
    assert [each.message.split()[0] for each in found(job, "PT566")] == ["/home/me/more.bin", "/datastore/cache"]
    assert [each.path for each in found(job, "PT566")] == [("data", "source"), ("data", "cache")]
    open_image = k8s_plan(k8s={"writable_root": True}).model_copy(update={"data": data})
    assert {each.severity for each in found(launch_job(open_image), "PT566")} == {"warning"}
    scratch = data.model_copy(update={"source": "/data/tokens", "cache": "/tmp/cache"})
    tuned = KernelsSpec(tuned=["/home/me/tuned"])
    layout = laid(plan.layout, offload_optimizer="nvme", dir="/nvme")
    job = launch_job(plan.model_copy(update={"data": scratch, "kernels": tuned, "layout": layout}))
    assert [(each.severity, each.path) for each in found(job, "PT566")] == [
        ("warning", ("kernels", "tuned", 0)), ("error", ("parallel", "offload", "dir")),
    ]  # fmt: skip


def test_annotations_that_an_object_cannot_hold() -> None:
    notes = {f"note-{index}": "x" * 60_000 for index in range(5)}
    (finding,) = found(k8s_job(k8s={"annotations": notes}), "PT567")
    assert finding.severity == "error"
    notes.popitem()
    assert found(k8s_job(k8s={"annotations": notes}), "PT567") == []


def test_a_memory_that_shared_memory_alone_fills() -> None:
    for memory, expected in (("0", 1), ("64Gi", 1), ("65Gi", 0)):
        job = launch_job(k8s_plan(k8s={"memory": memory}))  # eight devices of 8Gi each
        assert len(found(job, "PT528")) == expected, memory
    assert found(launch_job(k8s_plan(k8s={"memory": "2Gi", "shared_memory": "1Gi"})), "PT528") == []
