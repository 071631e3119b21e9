"""Kubernetes objects: golden files of every kind on every sort of machine, and properties that hold in all of them.

``PARTOOL_GOLDEN=write pytest tests/unit/render/test_render_k8s.py`` writes the golden files anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from _k8s_case import (
    ACCELERATORS,
    EVERY_KIND,
    an_environment,
    containers,
    documents,
    expanded,
    k8s_job,
    k8s_plan,
    pods,
    workload,
)
from _launch_case import launch_job

from partool.launch.k8s.validate import validate_offline
from partool.plan.types import Plan
from partool.render.job import Job
from partool.render.k8s import findings, render

GOLDEN = Path(__file__).parents[1] / "golden" / "k8s"
CASES = [(kind, machine, nodes) for kind in EVERY_KIND for machine in ACCELERATORS for nodes in (1, 2, 16)]
INDEX = {"jobset": "JOB_COMPLETION_INDEX", "job": "JOB_COMPLETION_INDEX", "trainjob": "JOB_COMPLETION_INDEX",
         "pytorchjob": "RANK", "volcano": "VC_TASK_INDEX"}  # fmt: skip
HOST = {"jobset": "llama-12345678-node-0-0.llama-12345678", "trainjob": "llama-12345678-node-0-0.llama-12345678",
        "job": "llama-12345678-0.llama-12345678", "pytorchjob": "llama-12345678-master-0",
        "volcano": "llama-12345678-node-0.llama-12345678"}  # fmt: skip


def golden_job(kind: str, machine: str, nodes: int) -> Job:
    """Return a job with the options that one would use on such machines."""
    launch: dict[str, Any] = {"restarts": 0 if kind == "trainjob" else 3}
    k8s: dict[str, Any] = {}
    if machine == "nvidia":
        k8s = {"namespace": "team", "queue": "research", "priority": "high", "rdma": {"resource": "rdma/hca"}}
        launch["secrets"] = {"HF_TOKEN": {"secret": "hub", "key": "token"}}
    elif machine == "amd":
        k8s = {"labels": {"team": "nlp"}, "tolerations": [{"key": "dedicated", "value": "nlp"}], "user": 0}
        launch["mounts"] = [{"source": "pvc:datasets", "target": "/data", "read_only": True},
                            {"source": "/mnt/scratch", "target": "/scratch"}]  # fmt: skip
    elif machine == "gh200":
        k8s = {"queue": "superchips", "image_pull_secrets": ["registry"], "service_account": "trainer"}
        if kind != "volcano":
            k8s["topology"] = {"level": "cloud.provider.com/topology-rack"}
    else:
        k8s = {"storage": None, "cpu": "4", "memory": "16Gi", "shared_memory": "1Gi"}
        launch["env"] = {"PRICE": "5$ $(HOME) $$", "LIMIT": "1e3", "WHY": "no: because #1"}
    plan = k8s_plan(kind, nodes, machine, k8s=k8s, **launch)
    return launch_job(plan.model_copy(update={"environment": an_environment()}))


def shown(job: Job) -> str:
    """Return the manifest without the plan, whose text and hash change with every new field."""
    text = re.sub(r"(?<=  plan.json: \|\n)(    .*\n)+", "    (the plan)\n", render(job).text)
    return text.replace(f'"{job.plan.hash}"', "PLAN-HASH").replace(job.plan.hash, "PLAN-HASH")


@pytest.mark.parametrize(("kind", "machine", "nodes"), CASES)
def test_golden(kind: str, machine: str, nodes: int) -> None:
    job = golden_job(kind, machine, nodes)
    file = GOLDEN / f"{kind}-{machine}-{nodes}.yaml"
    if os.environ.get("PARTOOL_GOLDEN") == "write":
        GOLDEN.mkdir(parents=True, exist_ok=True)
        file.write_text(shown(job), encoding="utf-8")
    assert shown(job) == file.read_text(encoding="utf-8")
    assert [finding for finding in findings(job) if finding.severity == "error"] == []


@pytest.mark.parametrize(("kind", "machine", "nodes"), CASES)
def test_own_rules_and_core_schemas(kind: str, machine: str, nodes: int) -> None:
    levels = validate_offline(render(golden_job(kind, machine, nodes)).text)
    assert [level.name for level in levels if level.ran][:2] == ["own rules", "core schemas"]
    assert [finding for level in levels for finding in level.findings if finding.severity == "error"] == []


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_schemas_of_installed_types(kind: str) -> None:
    from k8s_schemas import CRDS, custom_types, faults

    if not CRDS.exists():
        pytest.skip(f"there are no definitions in {CRDS}")
    known = {(f"{each.group}/{each.version}", each.kind): each.schema for each in custom_types()}
    for machine in ACCELERATORS:
        for nodes in (1, 16):
            for item in documents(golden_job(kind, machine, nodes)):
                schema = known.get((item["apiVersion"], item["kind"]))
                assert (schema is None) == (item["apiVersion"] in ("v1", "batch/v1"))
                assert faults(item, schema) == []


@pytest.mark.parametrize("version", ["1.30", "1.34", "1.37"])
def test_a_job_is_valid_in_older_and_newer_versions(version: str) -> None:
    for item in documents(golden_job("job", "nvidia", 2)):
        kubernetes_validate.validate(item, version, strict=True)


def test_documents_come_in_the_order_in_which_they_are_needed() -> None:
    kinds = [[item["kind"] for item in documents(k8s_job(kind))] for kind in EVERY_KIND]
    assert kinds == [
        ["ConfigMap", "Service", "Job"],
        ["ConfigMap", "JobSet"],
        ["ConfigMap", "PyTorchJob"],
        ["ConfigMap", "TrainJob"],
        ["ConfigMap", "Job"],
    ]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_plan_travels_as_it_is(kind: str) -> None:
    job = k8s_job(kind)
    rendered = render(job)
    config = documents(job)[0]
    assert config["data"] == {"plan.json": job.plan.to_json()} == {"plan.json": rendered.files["plan.json"]}
    assert Plan.from_json(config["data"]["plan.json"]).hash == job.plan.hash
    for item in documents(job):
        assert item["metadata"]["annotations"]["partool.dev/plan-hash"] == job.plan.hash
        assert item["metadata"]["labels"]["partool.dev/run"] == job.run_id
        assert item["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "partool"
    for container in containers(job):
        assert job.plan.hash in container["command"]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_head_says_how_the_job_comes_to_own_the_rest(kind: str, tmp_path: Path) -> None:
    """Runs the header's lines with a kubectl that records its calls: the same steps that ``launch`` takes."""
    job = k8s_job(kind, k8s={"network_policy": True, "namespace": "team"})
    head = render(job).text.partition("\napiVersion")[0]
    script = "\n".join(line.removeprefix("# ") for line in head.splitlines() if line.startswith("#   "))
    kubectl = f'kubectl() {{ printf "%s\\x1f" "$@" >> {tmp_path}/calls; echo >> {tmp_path}/calls; echo abc-1; }}\n'
    subprocess.run(["bash", "-ceu", kubectl + script], check=True, timeout=20, stdout=subprocess.DEVNULL)
    asked, *patched = [line.split("\x1f")[:-1] for line in (tmp_path / "calls").read_text().splitlines()]
    *others, main = documents(job)
    group = main["apiVersion"].partition("/")[0]
    name = main["metadata"]["name"]
    assert asked == ["-n", "team", "get", f"{main['kind'].lower()}.{group}", name, "-o", "jsonpath={.metadata.uid}"]
    owner = {"apiVersion": main["apiVersion"], "kind": main["kind"], "name": name, "uid": "abc-1"}
    names = [f"secret/{name}-agents", *(f"{each['kind'].lower()}/{each['metadata']['name']}" for each in others)]
    assert [words[:5] for words in patched] == [["-n", "team", "patch", each, "--type=merge"] for each in names]
    assert {words[5] for words in patched} == {"-p"}
    assert all(json.loads(words[6]) == {"metadata": {"ownerReferences": [owner]}} for words in patched)


def test_the_same_job_gives_the_same_text() -> None:
    assert render(k8s_job()).text == render(k8s_job()).text
    assert render(k8s_job()).main == "manifest.yaml"


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("nodes", [1, 2, 16])
def test_one_world_size(kind: str, nodes: int) -> None:
    job = k8s_job(kind, nodes)
    plan = job.plan
    assert sum(count for count, _ in pods(job)) == nodes
    for container in containers(job):
        words = container["command"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == str(plan.devices.per_node)
        assert "nvidia.com/gpu" not in container["resources"]["requests"]
        if nodes == 1:
            assert not {"--nodes", "--node-rank", "--rendezvous"} & set(words)
            continue
        told = {words[index]: words[index + 1] for index in range(4, len(words) - 1)}
        assert told["--nodes"] == str(nodes)
        assert expanded(told["--node-rank"], {INDEX[kind]: "7"}) == "7"
        assert told["--rendezvous"] == f"{HOST[kind]}:29500"
        assert int(told["--nodes"]) * plan.devices.per_node == plan.layout.mesh.world_size


def test_the_kinds_own_counts_agree_with_the_plan() -> None:
    trainer = workload(k8s_job("trainjob", 16, "gh200"))["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (16, 4)
    assert workload(k8s_job("pytorchjob", 16, "gh200"))["spec"]["nprocPerNode"] == "4"
    volcano = workload(k8s_job("volcano", 16))["spec"]
    assert volcano["minAvailable"] == volcano["tasks"][0]["replicas"] == 16
    job = workload(k8s_job("job", 16))["spec"]
    assert job["completions"] == job["parallelism"] == 16


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_command_is_in_exec_form(kind: str) -> None:
    for container in containers(k8s_job(kind)):
        assert container["command"][:4] == ["python", "-P", "-m", "partool_runtime.agent"]
        assert "args" not in container
        assert container["command"][4:8] == [
            "/etc/partool/plan.json", "--run-dir", "/partool/runs/llama-12345678", "--resume",
        ]  # fmt: skip
        assert {"name": "plan", "mountPath": "/etc/partool", "readOnly": True} in container["volumeMounts"]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_grace_period_outlasts_the_shutdown_timeout(kind: str) -> None:
    job = k8s_job(kind, shutdown_timeout_s=600)
    for _, template in pods(job):
        assert template["spec"]["terminationGracePeriodSeconds"] == 630
