"""The pods of Kubernetes objects: permissions, resource requests, and visible devices and volumes."""

from __future__ import annotations

import json

import pytest
from _k8s_case import EVERY_KIND, an_environment, containers, documents, k8s_job, k8s_plan, pods, workload
from _launch_case import launch_job

from partool.catalog.lookup import table
from partool.launch.k8s.validate import validate_offline
from partool.plan.types import Plan
from partool.planner.findings.saves import with_mode
from partool.render.k8s import render
from partool.spec.training import CheckpointSpec


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_no_secret_and_no_token(kind: str) -> None:
    secrets = {"HF_TOKEN": {"secret": "hub", "key": "token"}}
    job = k8s_job(kind, secrets=secrets)
    for container in containers(job):
        reference = {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert {"name": "HF_TOKEN", "valueFrom": reference} in container["env"]
        assert not any("value" in each for each in container["env"] if each["name"] == "HF_TOKEN")
    for _, template in pods(job):
        if kind != "trainjob":  # its runtime decides
            assert template["spec"]["automountServiceAccountToken"] is False
            assert template["spec"]["enableServiceLinks"] is False
    assert documents(k8s_job(kind))[0]["kind"] != "Secret"


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_pods_meet_the_restricted_security_standard(kind: str) -> None:
    for _, template in pods(k8s_job(kind)):
        security, own = template["spec"]["securityContext"], template["spec"]["containers"][0]["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 1000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        wanted = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        assert own == wanted
    rdma = {"rdma": {"resource": "rdma/hca", "count": 4}}
    for container in containers(k8s_job(kind, k8s=rdma)):
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert container["resources"]["limits"]["rdma/hca"] == "4"
    for _, template in pods(k8s_job(kind, k8s={"user": 0, "writable_root": True})):
        assert template["spec"]["securityContext"]["runAsNonRoot"] is False
        assert "readOnlyRootFilesystem" not in template["spec"]["containers"][0]["securityContext"]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_whatever_ranks_write_to_is_a_volume(kind: str) -> None:
    """The image is read-only, also for root: HOME, /tmp and the run are volumes, and their disk space is requested."""
    for k8s in ({}, {"user": 0}, {"storage": None, "ephemeral_storage": "5Gi"}):
        for _, template in pods(k8s_job(kind, k8s=k8s)):
            container = template["spec"]["containers"][0]
            seen = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            volumes = {each["name"]: each for each in template["spec"]["volumes"]}
            home = next(each["value"] for each in container["env"] if each["name"] == "HOME")
            size = k8s.get("ephemeral_storage", "20Gi")
            assert volumes[seen[home]] == {"name": "tmp", "emptyDir": {"sizeLimit": size}}
            assert container["resources"]["requests"]["ephemeral-storage"] == size
            assert "ephemeral-storage" not in container["resources"]["limits"]
            assert volumes[seen["/partool"]].get("emptyDir") == ({"sizeLimit": size} if "storage" in k8s else None)
    mine = k8s_job(kind, mounts=[{"source": "pvc:fast", "target": "/tmp/"}])
    for _, template in pods(mine):
        assert "tmp" not in {each["name"] for each in template["spec"]["volumes"]}


def test_without_a_claim_there_is_room_for_the_checkpoints() -> None:
    plan = k8s_plan(k8s={"storage": None})
    memory = plan.prediction.memory.model_copy(update={"saved_bytes": 10 << 30})
    large = plan.model_copy(update={"prediction": plan.prediction.model_copy(update={"memory": memory})})
    # 20 + 8 ranks × 10 GiB × (3 + 1 checkpoints) × 1.1
    assert containers(launch_job(large))[0]["resources"]["requests"]["ephemeral-storage"] == "372Gi"
    for folder, size in (("/data/checkpoints", "20Gi"), ("/tmp/checkpoints", "372Gi"), ("/partool/mine", "372Gi")):
        elsewhere = large.model_copy(update={"checkpoint": CheckpointSpec(dir=folder)})
        assert containers(launch_job(elsewhere))[0]["resources"]["requests"]["ephemeral-storage"] == size, folder
    claimed = k8s_plan(k8s={"storage": "pvc:runs"}).model_copy(update={"prediction": large.prediction})
    for folder, size in (("/partool/mine", "20Gi"), ("/tmp/checkpoints", "372Gi")):
        elsewhere = claimed.model_copy(update={"checkpoint": CheckpointSpec(dir=folder)})
        assert containers(launch_job(elsewhere))[0]["resources"]["requests"]["ephemeral-storage"] == size, folder


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_autoscalers_leave_pods_alone_unless_they_may(kind: str) -> None:
    keys = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
    mine = {"karpenter.sh/do-not-disrupt": "30m"}
    for _, template in pods(k8s_job(kind)):
        assert template["metadata"]["annotations"] == keys
    for _, template in pods(k8s_job(kind, k8s={"annotations": mine})):
        assert template["metadata"]["annotations"] == keys | mine
    for _, template in pods(k8s_job(kind, k8s={"evictable": True})):
        assert "annotations" not in template["metadata"]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_labels_that_clusters_know(kind: str) -> None:
    plan = k8s_plan(kind, k8s={"labels": {"app.kubernetes.io/component": "ablation"}})
    job = launch_job(plan.model_copy(update={"partool_version": "1.2.0+git.abc"}))
    wanted = {
        "name": "partool", "instance": job.run_id, "version": "1.2.0-git.abc", "component": "ablation",
        "managed-by": "partool",
    }  # fmt: skip
    for labels in [*(item["metadata"]["labels"] for item in documents(job)),
                   *(template["metadata"]["labels"] for _, template in pods(job))]:  # fmt: skip
        assert {f"app.kubernetes.io/{name}": value for name, value in wanted.items()}.items() <= labels.items()
        assert labels["partool.dev/run"] == job.run_id


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_network_policy_lets_in_the_runs_own_pods_alone(kind: str) -> None:
    assert "NetworkPolicy" not in {item["kind"] for item in documents(k8s_job(kind))}
    job = k8s_job(kind, k8s={"network_policy": True, "namespace": "team"})
    (policy,) = (item for item in documents(job) if item["kind"] == "NetworkPolicy")
    own = {"matchLabels": {"partool.dev/run": job.run_id}}
    assert policy["metadata"]["namespace"] == "team"
    assert policy["spec"] == {
        "podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}],
    }  # fmt: skip
    assert all(own["matchLabels"].items() <= template["metadata"]["labels"].items() for _, template in pods(job))
    for level in validate_offline(render(job).text):
        assert [finding for finding in level.findings if finding.severity == "error"] == []


def test_every_variable_has_an_origin() -> None:
    secrets = {"HF_TOKEN": {"secret": "hub", "key": "token"}}
    plan = k8s_plan(env={"OMP_NUM_THREADS": "8", "MINE": "1"}, secrets=secrets)
    job = launch_job(plan.model_copy(update={"environment": an_environment()}))
    origins = json.loads(workload(job)["metadata"]["annotations"]["partool.dev/environment-origins"])
    values = {each["name"]: each.get("value") for each in containers(job)[0]["env"]}
    assert origins.keys() == values.keys()
    assert len(containers(job)[0]["env"]) == len(values)
    assert values["OMP_NUM_THREADS"] == "8"
    assert origins["OMP_NUM_THREADS"] == "launch.env"
    assert origins["NCCL_SOCKET_IFNAME"].startswith("network preset tcp (https://")
    assert origins["HF_TOKEN"] == "launch.secrets: Secret hub, key token"


@pytest.mark.parametrize(
    ("machine", "resource", "architecture"),
    [("nvidia", "nvidia.com/gpu", "amd64"), ("amd", "amd.com/gpu", "amd64"), ("gh200", "nvidia.com/gpu", "arm64")],
)
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_machines_decide_on_resource_and_architecture(
    kind: str, machine: str, resource: str, architecture: str
) -> None:
    for _, template in pods(k8s_job(kind, machine=machine)):
        spec = template["spec"]
        assert resource in spec["containers"][0]["resources"]["limits"]
        assert spec["nodeSelector"] == {"kubernetes.io/arch": architecture}
        assert {"key": resource, "operator": "Exists", "effect": "NoSchedule"} in spec["tolerations"]


def test_superchips_are_those_with_an_arm_host() -> None:
    hosts = table("hosts")
    found = {name for name, entry in table("accelerators").items() if hosts[entry["host"]]["architecture"] == "arm64"}
    assert found == {"gh200-96", "gh200-144", "gb200", "gb300"}
    assert {entry["architecture"] for entry in hosts.values()} == {"amd64", "arm64"}


def test_ranks_on_a_cpu_ask_for_no_device() -> None:
    for _, template in pods(k8s_job(machine="cpu")):
        assert set(template["spec"]["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}
        assert "tolerations" not in template["spec"]


def test_the_users_selector_and_tolerations_come_on_top() -> None:
    k8s = {
        "node_selector": {"kubernetes.io/arch": "arm64", "pool": "a"},
        "tolerations": [{"key": "dedicated"}, {"key": "team", "value": "nlp", "effect": "NoExecute"}],
        "device_resource": "nvidia.com/mig-3g.40gb",
    }
    spec = next(pods(k8s_job(k8s=k8s)))[1]["spec"]
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "arm64", "pool": "a"}
    assert spec["tolerations"] == [
        {"key": "nvidia.com/mig-3g.40gb", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"},
        {"key": "dedicated", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "nlp", "effect": "NoExecute"},
    ]
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/mig-3g.40gb"] == "8"


def memory_of(plan: Plan) -> str:
    """Return the memory that a plan's pods request, after checking that the request equals the limit."""
    resources = containers(launch_job(plan))[0]["resources"]
    asked = {name: amount for name, amount in resources["requests"].items() if name != "ephemeral-storage"}
    assert asked == {name: resources["limits"][name] for name in ("cpu", "memory")}
    return str(resources["limits"]["memory"])


def predicted(plan: Plan, **memory: int) -> Plan:
    """Return a plan with other predictions of memory."""
    found = plan.prediction.model_copy(update={"memory": plan.prediction.memory.model_copy(update=memory)})
    return plan.model_copy(update={"prediction": found})


def test_memory_is_what_the_plan_predicts_with_shared_memory_and_room() -> None:
    plan = predicted(k8s_plan(), saved_bytes=0, saved_block_bytes=0)
    assert memory_of(plan) == "106Gi"  # (8 × 4 GiB + 8 × 8 GiB) × 1.1
    assert memory_of(predicted(plan, host_bytes=200 << 30)) == "326Gi"
    # In the background, all of 9 GiB of each rank is copied; else two copies of a block of 1 GiB exist at once.
    saved = predicted(plan, saved_bytes=9 << 30, saved_block_bytes=1 << 30)
    assert memory_of(with_mode(saved, "async")) == "185Gi"  # (8 × (4 + 9) GiB + 8 × 8 GiB) × 1.1
    assert memory_of(with_mode(saved, "sync")) == "124Gi"  # (8 × (4 + 2) GiB + 8 × 8 GiB) × 1.1
    small = plan.devices.model_copy(update={"host_memory_bytes": 100 << 30})
    assert memory_of(plan.model_copy(update={"devices": small})) == "90Gi"
    assert memory_of(k8s_plan(k8s={"shared_memory": "128Gi"})) == "176Gi"
    on_cpu = k8s_plan(machine="cpu")
    on_cpu = predicted(on_cpu, total_bytes=3 << 30, saved_bytes=0, saved_block_bytes=0)
    assert memory_of(on_cpu) == "9Gi"  # (2 × 3 GiB + 2 × 1 GiB) × 1.1
    assert memory_of(with_mode(predicted(on_cpu, saved_bytes=2 << 30), "async")) == "14Gi"
    assert memory_of(k8s_plan(k8s={"memory": "500G", "cpu": "1500m"})) == "500G"
    spec = next(pods(k8s_job()))[1]["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}} in spec["volumes"]
    assert spec["containers"][0]["resources"]["limits"]["cpu"] == "110"  # out of 112


def test_cores_where_the_host_is_unknown_or_tiny() -> None:
    plan = k8s_plan(machine="cpu", k8s={"memory": "8Gi"})
    for cores, expected in ((0, "2"), (1, "1"), (2, "1"), (3, "1"), (16, "14")):
        devices = plan.devices.model_copy(update={"host_cores": cores})
        job = launch_job(plan.model_copy(update={"devices": devices}))
        assert containers(job)[0]["resources"]["limits"]["cpu"] == expected


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_volumes(kind: str) -> None:
    mounts = [
        {"source": "pvc:data", "target": "/data", "read_only": True},
        {"source": "pvc:data", "target": "/again"},
        {"source": "pvc:runs", "target": "/all-runs"},
        {"source": "/mnt/nvme", "target": "/scratch"},
    ]
    for _, template in pods(k8s_job(kind, mounts=mounts)):
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        seen = {each["mountPath"]: each for each in template["spec"]["containers"][0]["volumeMounts"]}
        assert len(volumes) == len(template["spec"]["volumes"]) == 6
        assert volumes["runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
        assert seen["/partool"] == {"name": "runs", "mountPath": "/partool"}
        assert seen["/all-runs"]["name"] == "runs"
        assert seen["/data"]["name"] == seen["/again"]["name"]
        assert (seen["/data"].get("readOnly"), seen["/again"].get("readOnly")) == (True, None)
        folder = volumes[seen["/scratch"]["name"]]
        assert folder["hostPath"] == {"path": "/mnt/nvme", "type": "Directory"}
        assert {each["name"] for each in seen.values()} == set(volumes)


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if kind != "trainjob"])
def test_the_hosts_network(kind: str) -> None:
    for _, template in pods(k8s_job(kind, k8s={"host_network": True})):
        assert template["spec"]["hostNetwork"] is True
        assert template["spec"]["dnsPolicy"] == "ClusterFirstWithHostNet"
        (port,) = template["spec"]["containers"][0]["ports"]
        assert port["hostPort"] == port["containerPort"] == 29500


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_queue_and_priority(kind: str) -> None:
    queued = workload(k8s_job(kind, k8s={"queue": "research", "priority": "high"}))
    labels = queued["metadata"]["labels"]
    assert "suspend" not in queued["spec"]
    if kind == "volcano":
        assert (queued["spec"]["queue"], queued["spec"]["priorityClassName"]) == ("research", "high")
        assert not any(label.startswith("kueue") for label in labels)
        return
    assert labels["kueue.x-k8s.io/queue-name"] == "research"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    for _, template in pods(k8s_job(kind, k8s={"queue": "research", "priority": "high"})):
        assert "priorityClassName" not in template["spec"]
        assert not any(label.startswith("kueue") for label in template["metadata"]["labels"])
    if kind != "trainjob":
        for _, template in pods(k8s_job(kind, k8s={"priority": "high"})):
            assert template["spec"]["priorityClassName"] == "high"


@pytest.mark.parametrize("kind", [kind for kind in EVERY_KIND if kind != "volcano"])
@pytest.mark.parametrize(("required", "word"), [(True, "required"), (False, "preferred")])
def test_topology_is_asked_for_on_the_pods(kind: str, required: bool, word: str) -> None:
    topology = {"level": "example.com/rack", "required": required}
    k8s = {"queue": "research", "topology": topology, "evictable": True}
    job = k8s_job(kind, k8s=k8s)
    key = f"kueue.x-k8s.io/podset-{word}-topology"
    assert [template["metadata"]["annotations"] for _, template in pods(job)] == [{key: "example.com/rack"}] * len(
        list(pods(job))
    )
    assert key not in workload(job)["metadata"]["annotations"]


def test_limits_of_time() -> None:
    k8s = {"deadline_s": 7200, "keep_finished_s": 60, "queue": "research"}
    jobset = workload(k8s_job(k8s=k8s))
    assert jobset["spec"]["ttlSecondsAfterFinished"] == 60
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["activeDeadlineSeconds"] == 7200
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/max-exec-time-seconds"] == "7200"
    job = workload(k8s_job("job", k8s=k8s))["spec"]
    assert (job["activeDeadlineSeconds"], job["ttlSecondsAfterFinished"]) == (7200, 60)
    policy = workload(k8s_job("pytorchjob", k8s=k8s))["spec"]["runPolicy"]
    assert (policy["activeDeadlineSeconds"], policy["ttlSecondsAfterFinished"]) == (7200, 60)
    assert workload(k8s_job("trainjob", k8s={"deadline_s": 5}))["spec"]["activeDeadlineSeconds"] == 5
    assert workload(k8s_job("volcano", k8s={"keep_finished_s": 5}))["spec"]["ttlSecondsAfterFinished"] == 5


def test_counts_too_large_for_their_fields_mean_without_limit() -> None:
    most = 10**6  # that a spec may hold
    assert workload(k8s_job(restarts=most))["spec"]["failurePolicy"]["maxRestarts"] == most
    assert workload(k8s_job("job", restarts=most))["spec"]["backoffLimitPerIndex"] == most
    plan = k8s_plan("pytorchjob", restarts=most)
    plan = plan.model_copy(update={"devices": plan.devices.model_copy(update={"nodes": 100_000})})
    found = documents(launch_job(plan))
    assert [each["spec"]["runPolicy"]["backoffLimit"] for each in found if each["kind"] == "PyTorchJob"] == [2**31 - 1]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_names_fit_with_the_longest_run_id_and_the_most_nodes(kind: str) -> None:
    plan = k8s_plan(kind)
    devices = plan.devices.model_copy(update={"nodes": 100_000})
    job = launch_job(plan.model_copy(update={"devices": devices}), run_id="a" * 44)
    last = {"jobset": "node-0-99999-abcde", "trainjob": "node-0-99999-abcde", "job": "99999-abcde",
            "pytorchjob": "worker-99998", "volcano": "node-99999"}[kind]  # fmt: skip
    assert len(f"{job.run_id}-{last}") <= 63
    assert all(len(item["metadata"]["name"]) <= 63 for item in documents(job))
