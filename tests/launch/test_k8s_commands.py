"""The commands with really rendered manifests against the tests' API server; long tests repeat it with real kubectl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import k8s_schemas
import pytest
import yaml
from k8s_case import Case, case, condition, plan_of
from test_launch_commands import invoke

from partool.launch.k8s import client as k8s_client
from partool.launch.k8s import streams as k8s_streams
from partool.launch.k8s.status import KINDS
from partool.launch.store import Run

pytestmark = pytest.mark.timeout(120)
HAS_CRDS = bool(k8s_schemas.custom_types())
needs_crds = pytest.mark.skipif(not HAS_CRDS, reason=f"no definitions of installed types in {k8s_schemas.CRDS}")
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "job" else [needs_crds]) for kind in KINDS]
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(k8s_client, "_PAUSES_S", (0.02, 0.05, 0.1))
    monkeypatch.setattr(k8s_streams, "PAUSE_S", 0.02)
    with case(tmp_path) as found:
        yield found


def plan_file(name: str = "plan.json", **k8s: Any) -> str:
    Path(name).write_text(plan_of(**{"kind": "job", "storage": "pvc:runs"} | k8s).to_json())
    return name


def only_run(here: Case) -> Run:
    [run] = here.store.runs()
    return run


@kinds
def test_what_is_rendered_of_every_kind_is_taken_and_is_byte_for_byte_what_render_prints(here: Case, kind: str) -> None:
    file = plan_file(kind=kind)
    printed = invoke("render", file)
    assert printed.exit_code == 0, printed.output
    launched = invoke("launch", file)
    assert launched.exit_code == 0, launched.output
    run = only_run(here)
    assert (run.path / "manifest.yaml").read_text() == printed.stdout
    bodies = [body for verb, _, body in here.cluster.requests if verb == "POST"]
    assert bodies[0]["kind"] == "Secret"  # the agents' key, which is never written to a file
    bodies = bodies[1:]
    assert bodies == list(yaml.safe_load_all(printed.stdout))
    assert json.loads(bodies[0]["data"]["plan.json"]) == json.loads((run.path / "plan.json").read_text())
    assert invoke("launch", file, "--diff").exit_code == 0
    owners = [each["metadata"]["ownerReferences"][0]["name"] for each in _owned(here)]
    assert owners == [run.id] * len(bodies)
    assert invoke("cancel", run.id).exit_code == 0
    assert not _owned(here)


def _owned(here: Case) -> list[Any]:
    return [each for key, each in here.cluster.objects.items() if key[1] in ("configmaps", "services", "secrets")]


def test_a_run_from_launch_to_its_end(here: Case) -> None:
    assert invoke("launch", plan_file()).exit_code == 0
    run = only_run(here)
    assert "queued" in invoke("list").stdout
    pods = [here.pod(run, node) for node in (0, 1)]
    here.cluster.write(pods[0], "[0] step 1", "[1] step 1")
    here.cluster.write(pods[1], "[2] step 1", "[3] step 1")
    assert invoke("status", run.id).stdout.startswith(f"{run.id}: running")
    logs = invoke("logs", run.id)
    assert sorted(logs.stdout.splitlines()) == [f"[{rank}] step 1" for rank in range(4)]
    assert invoke("logs", run.id, "--rank", "2").stdout == "step 1\n"
    assert invoke("launch", "plan.json").exit_code == 4  # the run is active
    for pod in pods:
        here.end_pod(pod, 1, "rank 0: out of memory")
    here.cluster.set_status("jobs", run.id, conditions=[condition("Failed", "BackoffLimitExceeded")])
    followed = invoke("logs", run.id, "-f")
    assert len(followed.stdout.splitlines()) == 4
    status = json.loads(invoke("status", run.id, "--output", "json").stdout)
    assert (status["state"], status["exit_code"]) == ("failed", 1)
    assert "rank 0: out of memory" in invoke("logs", run.id, "--errors").stdout
    assert invoke("cancel", run.id).exit_code == 1


def test_resuming_takes_the_same_name_again(here: Case) -> None:
    assert invoke("launch", plan_file()).exit_code == 0
    run = only_run(here)
    uid = here.cluster.find("jobs", run.id)["metadata"]["uid"]
    assert invoke("launch", "--resume", run.id).exit_code == 4
    assert invoke("cancel", run.id).exit_code == 0
    assert "cancelled" in invoke("status", run.id).stdout
    resumed = invoke("launch", "--resume", run.id)
    assert resumed.exit_code == 0, resumed.output
    assert here.cluster.find("jobs", run.id)["metadata"]["uid"] != uid
    assert "queued" in invoke("status", run.id).stdout


def test_following_a_launch_ends_with_the_runs_code(here: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    store = here.cluster.store

    def schedule(key: Any, document: Any, manager: str = "test") -> Any:
        """Make every job fail as soon as it is created."""
        stored = store(key, document, manager)
        if key[1] == "jobs" and "status" not in document:
            pod = here.pod(Run(here.store.root / key[3]), 0)
            here.cluster.write(pod, "[0] no such data")
            here.end_pod(pod, 78, "the data is missing")
            here.cluster.set_status("jobs", key[3], conditions=[condition("Failed", "PodFailurePolicy")])
        return stored

    monkeypatch.setattr(here.cluster, "store", schedule)
    result = invoke("launch", plan_file(), "--follow")
    assert result.exit_code == 78
    assert "no such data" in result.stdout
    assert "the data is missing" in result.stderr


def test_a_dry_run_names_its_levels_and_what_the_server_refuses(here: Case) -> None:
    lacking = invoke("launch", plan_file(), "--dry-run")  # a dry run reports the same findings as doctor
    assert lacking.exit_code == 1
    assert (
        "error[PT560]: doctor's check `claim`: there is no persistentvolumeclaim runs in namespace default"
        in lacking.stderr
    )
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "runs"}}
    here.cluster.put({**claim, "spec": {"accessModes": ["ReadWriteMany"]}, "status": {"phase": "Bound"}})
    result = invoke("launch", "plan.json", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "server-side dry run: passed (Kubernetes v1.36.0)" in result.stderr
    assert not here.cluster.names("jobs")
    here.cluster.forbidden.add(("create", "configmaps"))
    refused = invoke("launch", "plan.json", "--dry-run")
    assert refused.exit_code == 1
    assert "you may not create configmaps in namespace default" in refused.stderr


def test_a_network_policy_is_owned_like_the_rest(here: Case) -> None:
    assert invoke("launch", plan_file(network_policy=True)).exit_code == 0
    run = only_run(here)
    policy = here.cluster.find("networkpolicies", run.id)
    assert [each["name"] for each in policy["metadata"]["ownerReferences"]] == [run.id]
    assert invoke("cancel", run.id).exit_code == 0
    assert not here.cluster.names("networkpolicies")


def test_a_difference_is_exit_code_10(here: Case) -> None:
    assert invoke("launch", plan_file()).exit_code == 0
    result = invoke("launch", plan_file(memory="5Gi"), "--diff")
    assert result.exit_code == 10
    assert "+            memory: 5Gi" in result.stdout.replace('"', "")


@needs_crds
def test_exit_codes_of_a_cluster_that_does_not_answer_or_refuses(here: Case) -> None:
    here.cluster.trouble("POST", "/jobs", "422")
    assert invoke("launch", plan_file()).exit_code == 4
    assert here.store.runs() == []
    assert here.cluster.names("configmaps") == []
    here.cluster.trouble("GET", "/jobs", "503", times=99)
    unreachable = invoke("launch", "plan.json")
    assert unreachable.exit_code == 3
    assert "error[PT576]" in unreachable.stderr
    here.cluster.troubles.clear()
    assert invoke("doctor", "--target", "k8s").exit_code == 0
    here.cluster.forbidden.add(("create", "jobsets"))
    doctor = invoke("doctor", "--target", "k8s")
    assert doctor.exit_code == 3
    assert "FAILED  permissions: you may not create jobsets.jobset.x-k8s.io" in doctor.stdout
