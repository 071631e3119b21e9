"""Findings of ``doctor`` about a cluster, good and bad."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import k8s_schemas
import pytest
from k8s_case import Case, case, plan_of
from k8s_server import Cluster, clone

from partool.launch.k8s import client as k8s_client
from partool.launch.k8s import doctor as doctor_k8s
from partool.launch.k8s.validate import cached_crds
from partool.launch.k8s.validate.crd_cache import definitions
from partool.launch.target import Check, DoctorFiles
from partool.plan.types import Plan
from partool.spec.launch import LaunchSpec

pytestmark = pytest.mark.timeout(60)
HAS_CRDS = bool(k8s_schemas.custom_types())
needs_crds = pytest.mark.skipif(not HAS_CRDS, reason=f"no definitions of installed types in {k8s_schemas.CRDS}")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(k8s_client, "_PAUSES_S", (0.02, 0.05, 0.1))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with case(tmp_path, kueue=True) as found:
        yield found


def found(plan: Plan | None = None, crds: Path | None = None) -> dict[str, Check]:
    """Return the checks by name; of several with one name the last."""
    return {check.name: check for check in doctor_k8s.checks(plan, DoctorFiles(crds=crds))}


def with_launch(plan: Plan, **launch: Any) -> Plan:
    spec = plan.launch.model_dump(mode="json", exclude_unset=True) | launch
    return plan.model_copy(update={"launch": LaunchSpec.model_validate(spec)})


def add_node(cluster: Cluster, name: str, arch: str = "amd64", taints: Any = (), **allocatable: str) -> None:
    has = {"cpu": "16", "memory": "65536000Ki", "ephemeral-storage": "50Gi"} | {
        key.replace("__", "/").replace("_", "."): v for key, v in allocatable.items()
    }
    spec = {"taints": list(taints)} if taints else {}
    status = {"allocatable": has, "nodeInfo": {"architecture": arch}}
    meta = {"name": name, "labels": {"kubernetes.io/arch": arch}}
    cluster.put({"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": spec, "status": status})


def install(cluster: Cluster) -> None:
    """Put the definitions of the installed types on the cluster, as the API serves them."""
    for document in k8s_schemas.definitions():
        cluster.put(clone(document))


def test_a_healthy_cluster(here: Case) -> None:
    for name in "ab":
        add_node(here.cluster, name)
    checks = found(plan_of(kind="job", cpu="2", memory="1Gi", shared_memory="256Mi"))
    assert checks["server"].text.startswith("Kubernetes v1.36.0 at http://127.0.0.1:")
    assert checks["permissions"].verdict == "ok"
    assert checks["nodes"].text.startswith("2 of 2 nodes fit a pod")
    assert "docker buildx imagetools inspect example.com/partool:1" in checks["image"].text
    assert {check.verdict for check in checks.values()} <= {"ok", "skipped"}


@pytest.mark.parametrize(("kubeconfig", "name"), [("none", "kubeconfig"), ("empty", "kubeconfig")])
def test_without_a_cluster_the_first_reason_is_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kubeconfig: str, name: str
) -> None:
    (tmp_path / "empty").touch()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / kubeconfig))
    [check] = doctor_k8s.checks(None, DoctorFiles())
    assert (check.name, check.verdict) == (name, "failed")


def test_an_unreachable_server_ends_it(here: Case) -> None:
    here.cluster.trouble("GET", "/version", "503", times=99)
    *_, last = doctor_k8s.checks(None, DoctorFiles())
    assert (last.name, last.verdict) == ("server", "failed")


def test_an_old_server_is_a_warning(here: Case) -> None:
    here.cluster.version = "1.24"
    assert found()["server"].verdict == "warning"


def test_manifests_are_validated_for_the_servers_version(here: Case) -> None:
    for version in ("1.33", "1.34"):
        here.cluster.version = version
        check = found(plan_of(kind="job"))["validation: core schemas"]
        assert (check.verdict, check.text.partition(",")[0]) == ("ok", f"Kubernetes {version}")


def test_what_may_not_be_done_is_listed(here: Case) -> None:
    here.cluster.forbidden |= {("create", "jobs"), ("get", "pods/log"), ("deletecollection", "pods")}
    check = found(plan_of(kind="job"))["permissions"]
    assert check.verdict == "failed"
    assert check.text == "you may not create jobs.batch, get pods/log, deletecollection pods"
    here.cluster.forbidden = {("deletecollection", "pods")}
    assert found(plan_of(kind="job"))["permissions"].verdict == "warning"


def test_a_namespace_that_is_not_there(here: Case) -> None:
    assert "no namespace nowhere" in found(plan_of(kind="job", namespace="nowhere"))["namespace"].text
    here.cluster.forbidden.add(("get", "namespaces"))
    assert found()["namespace"].verdict == "skipped"


@needs_crds
def test_definitions_are_stored_for_validation_without_the_cluster(here: Case) -> None:
    install(here.cluster)
    checks = found()
    assert [checks[kind].verdict for kind in ("jobset", "pytorchjob", "trainjob", "volcano", "kueue")] == ["ok"] * 5
    assert checks["trainjob shape"].text == "runtimePatches (installed)"
    folder = cached_crds("test")
    assert folder is not None
    assert {each.kind for each in definitions(folder)} == {"JobSet", "PyTorchJob", "TrainJob", "Job"}
    assert "managedFields" not in "".join(file.read_text() for file in folder.iterdir())


@needs_crds
def test_a_trainjob_of_another_shape_is_told(here: Case) -> None:
    install(here.cluster)
    definition = here.cluster.find("customresourcedefinitions", "trainjobs.trainer.kubeflow.org")
    fields = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    fields["podTemplateOverrides"] = fields.pop("runtimePatches")
    assert found(plan_of(kind="trainjob"))["trainjob shape"].verdict == "failed"
    assert found(plan_of(kind="jobset"))["trainjob shape"].verdict == "warning"


def test_a_kind_that_is_missing_fails_only_the_plan_that_wants_it(tmp_path: Path) -> None:
    with case(tmp_path, custom=False):
        assert found(plan_of(kind="jobset"))["jobset"].verdict == "failed"
        checks = found(plan_of(kind="job"))
        assert [checks[name].verdict for name in ("jobset", "kueue")] == ["skipped", "skipped"]


@needs_crds
def test_a_folder_of_definitions_is_read_and_nothing_stored(here: Case, tmp_path: Path) -> None:
    checks = found(crds=k8s_schemas.CRDS)
    assert "TrainJob trainer.kubeflow.org/v1alpha1" in checks["definitions"].text
    assert cached_crds("test") is None
    (tmp_path / "nothing").mkdir()
    assert found(crds=tmp_path / "nothing")["definitions"].verdict == "failed"


@needs_crds
def test_a_manifest_is_validated_against_a_folder_without_any_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    checks = found(plan_of(kind="jobset"), k8s_schemas.CRDS)
    assert checks["kubeconfig"].verdict == "failed"
    levels = {name: check for name, check in checks.items() if name.startswith("validation: ")}
    assert len(levels) == 4
    assert {check.verdict for check in levels.values()} == {"ok"}
    (tmp_path / "empty").mkdir()
    verdicts = [check.verdict for check in found(plan_of(kind="jobset"), tmp_path / "empty").values()]
    assert "skipped" in verdicts


def test_nodes_that_do_not_fit_say_why(here: Case) -> None:
    taint = {"key": "team", "value": "b", "effect": "NoSchedule"}
    add_node(here.cluster, "plain")
    add_node(here.cluster, "small", cpu="1")
    add_node(here.cluster, "arm", "arm64", nvidia_com__gpu="4")
    add_node(here.cluster, "tainted", taints=[taint])
    plan = plan_of(kind="job", cpu="2", memory="1Gi")
    check = found(plan)["nodes"]
    assert check.verdict == "warning"
    assert check.text.startswith(
        "1 of 4 nodes fit a pod (kubernetes.io/arch=amd64; cpu 2, memory 1Gi, ephemeral-storage 20Gi), the"
    )
    assert "3 have the labels, 2 of them the resources, 1 no taint in the way" in check.text
    assert "4 nvidia.com/gpu on arm64" in check.text
    bearing = plan_of(kind="job", cpu="2", memory="1Gi", tolerations=[{"key": "team", "value": "b"}])
    assert found(bearing)["nodes"].verdict == "ok"
    here.cluster.forbidden.add(("list", "nodes"))
    assert found(plan)["nodes"].verdict == "skipped"


def test_queues_secrets_and_the_rest_are_looked_for_by_name_only(here: Case) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "data": {"token": "aHVudGVyMg=="}}
    here.cluster.put(secret)
    queue = {"apiVersion": "kueue.x-k8s.io/v1beta1", "kind": "LocalQueue", "metadata": {"name": "team"}}
    here.cluster.put(queue)
    plan = with_launch(plan_of(kind="job", queue="team"), secrets={"HF_TOKEN": {"secret": "hub", "key": "token"}})
    checks = found(plan)
    assert [checks[name].verdict for name in ("queue", "secret")] == ["ok", "ok"]
    missing = with_launch(
        plan_of(kind="job", queue="other", image_pull_secrets=["pull"], service_account="robot"),
    )
    checks = found(missing)
    assert [checks[name].verdict for name in ("queue", "secret", "service account")] == ["failed"] * 3
    assert checks["queue"].text == "there is no localqueues.kueue.x-k8s.io other in namespace default"
    here.cluster.forbidden.add(("get", "secrets"))
    assert found(plan)["secret"].verdict == "skipped"


def test_secrets_are_never_fetched(here: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    here.cluster.put({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}, "data": {"a": "aHVudGVyMg=="}})
    seen: list[bytes] = []
    send = k8s_client.Client._send

    def noting(self: Any, *args: Any, **options: Any) -> Any:
        answer = send(self, *args, **options)
        seen.append(answer.data)
        return answer

    monkeypatch.setattr(k8s_client.Client, "_send", noting)
    plan = with_launch(plan_of(kind="job"), secrets={"A": {"secret": "hub", "key": "a"}})
    assert found(plan)["secret"].verdict == "ok"
    assert seen
    assert b"aHVudGVyMg" not in b"".join(seen)


@pytest.mark.parametrize(
    ("modes", "phase", "verdict"),
    [(["ReadWriteMany"], "Bound", "ok"), (["ReadWriteOnce"], "Bound", "failed"), (["ReadWriteMany"], "Lost", "failed")],
)
def test_claims_must_be_there_for_all_nodes(here: Case, modes: list[str], phase: str, verdict: str) -> None:
    plan = plan_of(kind="job", storage="pvc:runs")
    assert "no persistentvolumeclaim runs" in found(plan)["claim"].text
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}}
    here.cluster.put({**claim, "spec": {"accessModes": modes}, "status": {"phase": phase}})
    assert found(plan)["claim"].verdict == verdict
