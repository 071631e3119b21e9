"""Pods that a namespace never lets start: quotas, limit ranges, pod security level, in doctor and in dry runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from k8s_case import Case, case, job_of, manifest, plan_of

from partool.launch.k8s import client as k8s_client
from partool.launch.k8s import doctor as doctor_k8s
from partool.launch.target import Check, DoctorFiles
from partool.plan.types import Plan
from partool.spec.launch import LaunchSpec

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(k8s_client, "_PAUSES_S", (0.02, 0.05, 0.1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with case(tmp_path) as found:
        yield found


def pods(nodes: int = 3, **k8s: Any) -> Plan:
    """Return a plan of ``nodes`` pods with 2 GPUs, 4 cores, 8 GiB of memory and 20 GiB of disk each."""
    sizes = {"cpu": "4", "memory": "8Gi", "shared_memory": "1Gi", "ephemeral_storage": "20Gi"}
    plan = plan_of(nodes, 2, **{"kind": "job"} | sizes | k8s)
    gpus = {"accelerator": "h100-sxm", "backend": "cuda"}
    return plan.model_copy(update={"devices": plan.devices.model_copy(update=gpus)})


def with_mounts(plan: Plan, *mounts: dict[str, str]) -> Plan:
    spec = plan.launch.model_dump(mode="json", exclude_unset=True) | {"mounts": list(mounts)}
    return plan.model_copy(update={"launch": LaunchSpec.model_validate(spec)})


def checked(plan: Plan, name: str) -> Check:
    return {check.name: check for check in doctor_k8s.checks(plan, DoctorFiles())}[name]


def put_quota(here: Case, hard: dict[str, str], used: dict[str, str] | None = None, **spec: Any) -> None:
    status = {"hard": hard, "used": dict.fromkeys(hard, "0") | (used or {})}
    document = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "team"}}
    here.cluster.put({**document, "spec": {"hard": hard, **spec}, "status": status})


@pytest.mark.parametrize(
    ("hard", "used", "verdict", "words"),
    [
        ({"requests.nvidia.com/gpu": "6", "pods": "3", "limits.memory": "24Gi"}, {}, "ok", "room for the job's 3 pods"),
        ({"requests.nvidia.com/gpu": "4"}, {}, "failed", "requests.nvidia.com/gpu: the job's 3 pods ask for 6, the"),
        ({"requests.nvidia.com/gpu": "8"}, {"requests.nvidia.com/gpu": "4"}, "warning", "is 8, of which 4 are used"),
        ({"cpu": "11"}, {}, "failed", "cpu: the job's 3 pods ask for 12, the limit is 11"),
        ({"limits.cpu": "11500m"}, {}, "failed", "limits.cpu: the job's 3 pods ask for 12, the limit is 11500m"),
        ({"requests.memory": "23Gi"}, {}, "failed", "ask for 24Gi, the limit is 23Gi"),
        ({"limits.memory": "1Ei", "cpu": "1e3"}, {}, "ok", "room"),
        ({"requests.ephemeral-storage": "50Gi"}, {}, "failed", "ask for 60Gi"),
        ({"pods": "2"}, {}, "failed", "pods: the job's 3 pods ask for 3, the limit is 2"),
        ({"count/pods": "10"}, {"count/pods": "8"}, "warning", "of which 8 are used"),
        ({"services.loadbalancers": "0", "persistentvolumeclaims": "0"}, {}, "ok", "room"),
    ],
)
def test_a_quota_counts_the_whole_job(
    here: Case, hard: dict[str, str], used: dict[str, str], verdict: str, words: str
) -> None:
    put_quota(here, hard, used)
    check = checked(pods(), "quota team")
    assert (check.verdict, words in check.text) == (verdict, True), check
    assert verdict == "ok" or "kubectl describe resourcequota team -n default" in check.help


@pytest.mark.parametrize(
    ("scope", "plan", "counts"),
    [
        ({"scopes": ["NotBestEffort"]}, pods(), True),
        ({"scopes": ["BestEffort"]}, pods(), False),
        ({"scopes": ["Terminating"]}, pods(), False),
        ({"scopes": ["NotTerminating", "NotBestEffort"]}, pods(), True),
        ({"scopeSelector": [("PriorityClass", "In", ["high"])]}, pods(), False),
        ({"scopeSelector": [("PriorityClass", "In", ["high"])]}, pods(priority="high"), True),
        ({"scopeSelector": [("PriorityClass", "NotIn", ["high"])]}, pods(priority="high"), False),
        ({"scopeSelector": [("PriorityClass", "Exists", [])]}, pods(priority="high"), True),
        # With a queue, the priority is that of Kueue's workload, not that of the pods.
        ({"scopeSelector": [("PriorityClass", "In", ["high"])]}, pods(priority="high", queue="q"), False),
    ],
)
def test_a_quota_counts_the_pods_of_its_scopes(here: Case, scope: dict[str, Any], plan: Plan, counts: bool) -> None:
    if selector := scope.get("scopeSelector"):
        names = ("scopeName", "operator", "values")
        scope = {"scopeSelector": {"matchExpressions": [dict(zip(names, each, strict=True)) for each in selector]}}
    put_quota(here, {"pods": "1"}, **scope)
    found = {check.name: check.verdict for check in doctor_k8s.checks(plan, DoctorFiles())}
    assert found.get("quota team") == ("failed" if counts else None)


@pytest.mark.parametrize(
    ("item", "verdict", "words"),
    [
        ({"type": "Container", "max": {"cpu": "4", "memory": "8Gi", "nvidia.com/gpu": "2"}}, "ok", "against"),
        ({"type": "Container", "max": {"memory": "4Gi"}}, "failed", "memory is 8Gi, and sizes allows a container at"),
        ({"type": "Pod", "max": {"nvidia.com/gpu": "1"}}, "failed", "nvidia.com/gpu is 2, and sizes allows a pod at"),
        ({"type": "Container", "min": {"cpu": "8"}}, "failed", "cpu is 4, and sizes allows a container at least 8"),
        ({"type": "PersistentVolumeClaim", "max": {"storage": "1Gi"}}, "ok", "against"),
    ],
)
def test_limit_ranges_bound_a_single_pod(here: Case, item: dict[str, Any], verdict: str, words: str) -> None:
    spec = {"limits": [item]}
    here.cluster.put({"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "sizes"}, "spec": spec})
    check = checked(pods(), "limit range")
    assert (check.verdict, words in check.text) == (verdict, True), check


NODE_FOLDER = {"source": "/mnt/data", "target": "/data"}
CLAIM = {"source": "pvc:data", "target": "/data"}


@pytest.mark.parametrize(
    ("level", "plan", "refused"),
    [
        ("restricted", pods(), ""),
        ("restricted", with_mounts(pods(), CLAIM), ""),
        ("baseline", pods(user=0), ""),
        ("restricted", pods(user=0), "processes of root (launch.k8s.user)"),
        ("baseline", pods(host_network=True), "the node's network (launch.k8s.host_network)"),
        ("baseline", pods(rdma={"resource": "rdma/hca"}), "the capability IPC_LOCK (launch.k8s.rdma)"),
        ("baseline", with_mounts(pods(), NODE_FOLDER), "folders of the node: /mnt/data (launch.mounts)"),
        ("privileged", with_mounts(pods(host_network=True, user=0), NODE_FOLDER), ""),
        ("", with_mounts(pods(host_network=True, user=0), NODE_FOLDER), ""),
    ],
)
def test_the_namespaces_pod_security_level(here: Case, level: str, plan: Plan, refused: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": level} if level else {}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "labels": labels}}
    here.cluster.put(namespace)
    check = checked(plan, "pod security")
    assert check.verdict == ("failed" if refused else "ok"), check
    assert refused in check.text


def test_what_may_not_be_read_is_left_out(here: Case) -> None:
    put_quota(here, {"pods": "0"})
    here.cluster.forbidden |= {("list", "resourcequotas"), ("list", "limitranges"), ("get", "namespaces")}
    found = {check.name: check.verdict for check in doctor_k8s.checks(pods(), DoctorFiles())}
    assert [found[name] for name in ("quota", "limit range", "pod security")] == ["skipped"] * 3


def test_a_dry_run_finds_the_job_that_can_never_start(here: Case) -> None:
    """The server accepts the job object: only its pods would be refused."""
    put_quota(here, {"requests.nvidia.com/gpu": "4"})
    plan = pods()
    job = job_of(plan, here.store.next_submitted(plan.name, plan.hash))
    levels = {level.name: level for level in here.target.validate(job, manifest(job))}
    errors = [each for each in levels["doctor's checks of the plan"].findings if each.severity == "error"]
    assert [each.code for each in errors] == ["PT560"]
    assert "the job's 3 pods ask for 6, the limit is 4" in errors[0].message
    assert "hardware.nodes and per_node" in errors[0].help
    assert not [each for each in levels["server-side dry run"].findings if each.severity == "error"]
