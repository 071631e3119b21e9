"""Submitting, watching and cancelling runs on an API server that behaves like a real one, failures included."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import k8s_schemas
import pytest
from k8s_case import SECRET, Case, case, condition, job_of, manifest, plan_of
from k8s_server import status_of

from partool.launch.k8s import client as k8s_client
from partool.launch.k8s.client import Client
from partool.launch.k8s.resources import CONFIG_MAPS, PODS
from partool.launch.k8s.status import KINDS, attempt_of, node_of
from partool.launch.k8s.target import K8sTarget
from partool.launch.store import Run
from partool.launch.submit import submit_again
from partool.launch.target import LaunchError
from partool.launch.telling import telling
from partool.plan.run import read_status

HAS_CRDS = bool(k8s_schemas.custom_types())
needs_crds = pytest.mark.skipif(not HAS_CRDS, reason=f"no definitions of installed types in {k8s_schemas.CRDS}")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    monkeypatch.setattr(k8s_client, "_PAUSES_S", (0.02, 0.05, 0.1))
    with case(tmp_path) as found:
        yield found


def core_plan(**k8s: Any) -> Any:
    return plan_of(kind="job", **k8s)


def methods(here: Case, method: str) -> list[str]:
    return [path.partition("?")[0] for verb, path, _ in here.cluster.requests if verb == method]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[] if kind == "job" else [needs_crds]) for kind in KINDS])
def test_a_run_of_every_kind_is_created_with_its_plan_first_and_owned(here: Case, kind: str) -> None:
    run = here.submit(plan_of(kind=kind))
    submission = run.submission()
    assert submission is not None
    plural = {"job": "jobs", "volcano": "jobs"}.get(kind, f"{kind}s")
    job, plan = here.cluster.find(plural, run.id), here.cluster.find("configmaps", f"{run.id}-plan")
    assert submission.details["uid"] == job["metadata"]["uid"]
    assert submission.details["namespace"] == "default"
    assert submission.details["context"] == "test"
    assert [path.rsplit("/", 1)[1] for path in methods(here, "POST")] == ["secrets", "configmaps", plural]
    assert all("fieldValidation=Strict" in path for verb, path, _ in here.cluster.requests if verb == "POST")
    key = here.cluster.find("secrets", f"{run.id}-agents")
    for owned in (plan, key):
        [owner] = owned["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == (job["kind"], job["metadata"]["uid"])
    secret = key["stringData"]["key"].encode()
    assert len(secret) == 64
    assert not [file for file in run.path.rglob("*") if file.is_file() and secret in file.read_bytes()]
    assert here.target.status(run).state == "queued"


def test_what_is_submitted_is_what_is_rendered(here: Case) -> None:
    run = here.submit(core_plan())
    bodies = [body for verb, _, body in here.cluster.requests if verb == "POST"]
    rendered = manifest(job_of(core_plan(), run))
    import yaml

    assert bodies[0]["kind"] == "Secret"  # the agents' key, which is never written to a file
    assert bodies[1:] == list(yaml.safe_load_all(rendered.text))


def test_a_refused_job_leaves_nothing_behind(here: Case) -> None:
    here.cluster.trouble(
        "POST",
        "/jobs",
        "422",
        status=status_of(
            422,
            "Invalid",
            "Job is invalid",
            name="x",
            causes=[
                {"field": "spec.parallelism", "message": "must be greater than 0"},
                {"field": "spec.template.spec.containers[0].image", "message": "Required value"},
            ],
        ),
    )
    with pytest.raises(LaunchError) as caught:
        here.submit(core_plan())
    assert caught.value.code == "PT578"
    assert caught.value.exit_code == 4
    assert "spec.parallelism: must be greater than 0; spec.template.spec.containers[0].image: Required" in str(
        caught.value
    )
    assert here.cluster.names("configmaps") == []
    assert here.store.runs() == []


def test_a_failure_of_the_last_step_takes_back_the_job_too(here: Case) -> None:
    here.cluster.forbidden.add(("patch", "configmaps"))
    with pytest.raises(LaunchError) as caught:
        here.submit(core_plan())
    assert caught.value.code == "PT577"
    assert caught.value.message == "you may not patch configmaps in namespace default"
    assert here.cluster.names("configmaps") == here.cluster.names("jobs") == here.cluster.names("secrets") == []


def test_what_cannot_be_taken_back_is_named(here: Case) -> None:
    here.cluster.forbidden.add(("patch", "configmaps"))
    here.cluster.trouble("DELETE", "/jobs/", "503", times=99)
    with pytest.raises(LaunchError) as caught:
        here.submit(core_plan())
    [name] = here.cluster.names("jobs")
    assert f"this may be left behind: jobs.batch {name}" in caught.value.help


def test_what_cannot_be_noted_is_taken_back(here: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def full(self: Path, target: Path) -> Path:
        if self.name == ".submission.json" and here.cluster.names("jobs"):
            raise OSError("no space left")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        here.submit(core_plan())
    assert here.cluster.names("configmaps") == here.cluster.names("jobs") == []


def test_a_run_whose_launcher_was_killed_before_it_noted_where(here: Case) -> None:
    run = here.submit(core_plan())
    record = run.submission()
    assert record is not None
    (run.path / "submission.json").write_text(record.model_copy(update={"details": {}}).model_dump_json())
    assert here.target.status(run).state == "queued"
    assert here.target.cancel(run, now=True)
    assert here.cluster.names("jobs") == []


def test_a_lost_answer_is_no_second_job(here: Case) -> None:
    here.cluster.trouble("POST", "/jobs", "lost")
    here.cluster.trouble("POST", "/configmaps", "lost")
    run = here.submit(core_plan())
    assert here.cluster.names("jobs") == [run.id]
    assert len(methods(here, "POST")) == 5
    submission = run.submission()
    assert submission is not None
    assert submission.details["uid"] == here.cluster.find("jobs", run.id)["metadata"]["uid"]


def test_a_job_that_a_killed_launcher_left_is_the_run(here: Case) -> None:
    plan = core_plan()
    run = here.store.next_submitted(plan.name, plan.hash)
    run.path.mkdir(parents=True)
    first = here.target.submit(run, job_of(plan, run), manifest(job_of(plan, run)))
    [config] = here.cluster.names("configmaps")
    del here.cluster.find("configmaps", config)["metadata"][
        "ownerReferences"
    ]  # as if the launcher was killed before this
    again = here.target.submit(run, job_of(plan, run), manifest(job_of(plan, run)))
    assert first == again
    [owner] = here.cluster.find("configmaps", config)["metadata"]["ownerReferences"]
    assert owner["uid"] == here.cluster.find("jobs", run.id)["metadata"]["uid"]


@pytest.mark.parametrize("labels", [{}, {"partool.dev/run": "RUN"}])
def test_another_object_of_the_name_is_never_touched(here: Case, labels: dict[str, str]) -> None:
    plan = core_plan()
    name = here.store.next_submitted(plan.name, plan.hash).id
    labels = dict.fromkeys(labels, name)
    meta = {"name": name, "labels": labels, "annotations": {"partool.dev/plan-hash": plan.hash}}
    there = here.cluster.put({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": {}})
    with pytest.raises(LaunchError) as caught:
        here.submit(plan)
    assert caught.value.code == "PT575"
    assert ("something other than partool" if not labels else "a launch from another place") in caught.value.message
    assert here.cluster.find("jobs", name)["metadata"]["uid"] == there["metadata"]["uid"]
    assert here.cluster.names("configmaps") == []


def test_a_run_that_ended_makes_room_for_its_own_resumption(here: Case) -> None:
    plan = core_plan()
    run = here.submit(plan)
    uid = here.cluster.find("jobs", run.id)["metadata"]["uid"]
    here.cluster.set_status("jobs", run.id, conditions=[condition("Failed", "BackoffLimitExceeded")])
    assert here.target.status(run).state == "failed"
    submit_again(here.target, run, job_of(plan, run), manifest(job_of(plan, run)), None)
    assert here.cluster.find("jobs", run.id)["metadata"]["uid"] != uid
    assert here.cluster.names("configmaps") == [f"{run.id}-plan"]
    assert here.target.status(run).state == "queued"


def test_passing_trouble_is_sat_out(here: Case) -> None:
    for act in ("503", "429", "drop"):
        here.cluster.trouble("GET", "/jobs", act)
    run = here.submit(core_plan())
    here.cluster.trouble("GET", "/pods", "500", times=2)
    assert here.target.status(run).state == "queued"


def test_a_conflict_is_no_end(here: Case) -> None:
    here.cluster.trouble("PATCH", "/configmaps", "409", status=status_of(409, "Conflict", "the object was modified"))
    here.submit(core_plan())
    assert len([path for path in methods(here, "PATCH") if "/configmaps/" in path]) == 2


def test_a_server_that_stays_away_is_exit_code_3(here: Case) -> None:
    run = here.submit(core_plan())
    here.cluster.trouble("GET", "/jobs", "503", times=99)
    with pytest.raises(LaunchError) as caught:
        here.target.status(run)
    assert (caught.value.code, caught.value.exit_code) == ("PT576", 3)


def test_a_slow_server_is_given_up_in_time(here: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k8s_client, "_READ_TIMEOUT_S", 0.1)
    here.cluster.trouble("GET", "/configmaps", "slow", times=99, amount=0.4)
    with pytest.raises(LaunchError, match="no answer in time") as caught:
        Client().get(CONFIG_MAPS, "x")
    assert caught.value.exit_code == 3


def test_no_server_is_exit_code_3(here: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("KUBECONFIG", str(here.cluster.kubeconfig(tmp_path / "other", url)))
    with pytest.raises(LaunchError, match="connection is refused") as caught:
        K8sTarget().check(core_plan())
    assert (caught.value.code, caught.value.exit_code) == ("PT576", 3)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "no such file"),
        ("- 1", "kubeconfig"),
        ("apiVersion: v1\nkind: Config\nclusters: []\nusers: []\ncontexts: []\n", "kubeconfig"),
    ],
)
def test_a_missing_or_spoilt_configuration_is_exit_code_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, text: str
) -> None:
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(LaunchError, match=text) as caught:
        Client()
    assert (caught.value.code, caught.value.exit_code) == ("PT576", 3)


def test_an_unknown_context_names_those_there_are(here: Case) -> None:
    with pytest.raises(LaunchError, match="no context 'prod'; there are test"):
        Client("prod")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LaunchError) as caught:
        Client()
    assert (caught.value.code, caught.value.exit_code) == ("PT574", 3)
    assert "partool[k8s]" in caught.value.help


def test_what_rbac_lacks_is_named_and_secrets_are_not(here: Case) -> None:
    run = here.submit(core_plan())
    here.cluster.forbidden.add(("list", "pods"))
    with pytest.raises(LaunchError) as caught:
        here.target.status(run)
    assert caught.value.message == "you may not list pods in namespace default"
    here.cluster.token = "another"
    with pytest.raises(LaunchError) as refused:
        here.target.status(run)
    assert (refused.value.code, refused.value.exit_code) == ("PT577", 3)
    assert all(SECRET not in f"{error.value} {error.value.help}" for error in (caught, refused))
    assert all(SECRET not in file.read_text() for file in run.path.rglob("*") if file.is_file())


def test_a_kind_that_is_not_installed_is_named_with_the_way_out(tmp_path: Path) -> None:
    with case(tmp_path, custom=False) as here:
        with pytest.raises(LaunchError) as caught:
            here.target.check(plan_of())
        assert caught.value.code == "PT579"
        assert "jobsets.jobset.x-k8s.io" in caught.value.message
        assert "--set launch.k8s.kind=job" in caught.value.help
        here.target.check(core_plan())


def test_a_namespace_that_does_not_exist_is_named(here: Case) -> None:
    with pytest.raises(LaunchError, match='namespaces "nowhere" not found'):
        here.submit(core_plan(namespace="nowhere"))


@needs_crds
@pytest.mark.parametrize(
    ("kind", "status", "state", "reason"),
    [
        ("jobset", {"terminalState": "Completed", "conditions": [condition("Completed")]}, "done", ""),
        ("job", {"conditions": [condition("Complete")]}, "done", ""),
        ("pytorchjob", {"conditions": [condition("Created"), condition("Succeeded")]}, "done", ""),
        ("trainjob", {"conditions": [condition("Complete")]}, "done", ""),
        ("volcano", {"state": {"phase": "Completed"}}, "done", ""),
        ("jobset", {"conditions": [condition("Failed", "ReachedMaxRestarts")]}, "failed", "ReachedMaxRestarts"),
        ("job", {"conditions": [condition("Failed", "DeadlineExceeded", "too long")]}, "failed", "DeadlineExceeded"),
        ("pytorchjob", {"conditions": [condition("Failed", "PyTorchJobFailed")]}, "failed", "PyTorchJobFailed"),
        ("trainjob", {"conditions": [condition("Failed", "JobsFailed")]}, "failed", "JobsFailed"),
        ("volcano", {"state": {"phase": "Failed", "reason": "PodFailed"}}, "failed", "PodFailed"),
        ("volcano", {"state": {"phase": "Pending"}}, "queued", "no pods yet"),
    ],
)
def test_conditions_of_every_kind(here: Case, kind: str, status: dict[str, Any], state: str, reason: str) -> None:
    run = here.submit(plan_of(kind=kind))
    plural = {"job": "jobs", "volcano": "jobs"}.get(kind, f"{kind}s")
    here.cluster.set_status(plural, run.id, **status)
    found = here.target.status(run)
    assert (found.state, found.exit_code) == (state, 0 if state == "done" else None)
    assert reason in found.reason


def test_pods_say_how_far_a_run_is(here: Case) -> None:
    run = here.submit(core_plan())
    here.pod(run, 0)
    assert here.target.status(run).state == "starting"
    assert here.target.status(run).reason == "1 of 2 pods have started"
    unfit = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes available"}
    here.pod(run, 1, state="waiting", conditions=[unfit], containerStatuses=[])
    waiting = here.target.status(run)
    assert (waiting.state, waiting.reason) == (
        "queued",
        "1 of 2 pods wait for a node: Unschedulable: 0/4 nodes available",
    )
    here.pod(run, 1)
    assert (here.target.status(run).state, here.target.status(run).reason) == ("running", "")
    assert here.target.status(run).attempt == 1


@pytest.mark.parametrize("trouble", ["ImagePullBackOff", "ErrImagePull", "CreateContainerConfigError"])
def test_a_container_that_cannot_start_says_why(here: Case, trouble: str) -> None:
    run = here.submit(core_plan())
    waiting = {"waiting": {"reason": trouble, "message": "no such image"}}
    here.pod(run, 0)
    here.pod(run, 1, state="waiting", containerStatuses=[{"name": "node", "restartCount": 0, "state": waiting}])
    found = here.target.status(run)
    assert (found.state, found.reason) == ("starting", f"node 1: {trouble}: no such image")


@pytest.mark.parametrize(
    ("codes", "state", "code"),
    [((1, 1), "failed", 1), ((78, 1), "failed", 78), ((75, 75), "preempted", 75), ((137, 1), "failed", 1)],
)
def test_exit_codes_of_the_agents_are_the_runs(here: Case, codes: tuple[int, int], state: str, code: int) -> None:
    run = here.submit(core_plan())
    for node, each in enumerate(codes):
        name = here.pod(run, node)
        here.end_pod(name, each, f"partool: agent {node} said\nmore", at=f"2026-11-21T10:00:0{5 - node}Z")
    here.cluster.set_status("jobs", run.id, conditions=[condition("Failed", "PodFailurePolicy")])
    found = here.target.status(run)
    assert (found.state, found.exit_code) == (state, code)
    node = codes.index(code) if len(set(codes)) > 1 else 1  # the one that ended first
    assert found.reason == f"exit code {code} on node {node}: partool: agent {node} said (PodFailurePolicy)"


def test_of_two_ends_in_one_second_the_one_that_was_no_kill_came_first(here: Case) -> None:
    run = here.submit(core_plan())
    at = "2026-11-21T10:00:00Z"
    for node, (code, reason) in enumerate([(137, "Error"), (1, "Error")]):
        here.end_pod(here.pod(run, node), code, f"partool: node {node}", reason, at)
    assert here.target.errors(run).splitlines()[0].startswith("node 1, ")
    here.cluster.set_status("jobs", run.id, conditions=[condition("Failed", "PodFailurePolicy")])
    assert (here.target.status(run).exit_code, here.target.status(run).reason[:21]) == (1, "exit code 1 on node 1")


_TRACEBACK = """\
Traceback (most recent call last):
  File "/usr/lib/python3.13/runpy.py", line 198, in _run_module_as_main
    return _run_code(code, main_globals, None,
                     "__main__", mod_spec)
PermissionError: [Errno 13] Permission denied: '/partool/runs'
"""
_MARKS = "    ~~~~~~~~~^^^^^^^^^^^^^^^\n"
_C10D = (
    "[rank0]:[W1122 10:00:00.123 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called\n"
    "[W1122 10:00:01.5 socket.cpp:764] [c10d] The client socket cannot be initialized\n"
    "/opt/torch/cuda.py:61: FutureWarning: pynvml is deprecated\n  warnings.warn(\n"
)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("partool: rank 1 failed (attempt 1): boom\n  Traceback\nlogs: /x\npartool: 3 times", "rank 1 failed"),
        (_TRACEBACK, "PermissionError: [Errno 13] Permission denied: '/partool/runs'"),
        (_TRACEBACK + _MARKS, "PermissionError"),
        (f"[0] step 1\n{_TRACEBACK}{_C10D}{_MARKS}\n", "PermissionError"),
        (f"[0] step 1\n[0] partool: note: slow\npartool: rank 0 failed: x\nlogs: /y\n{_C10D}", "rank 0 failed: x"),
        ("[1] step 7\n[1] step 8\n", "step 8"),
        ("^^^^^\n", "^^^^^"),
        ("", ""),
    ],
)
def test_the_line_that_says_why_is_told(message: str, said: str) -> None:
    assert telling(message).removeprefix("partool: ").startswith(said)


def test_out_of_memory_and_eviction_are_told(here: Case) -> None:
    run = here.submit(core_plan())
    here.end_pod(here.pod(run, 0), 137, reason="OOMKilled")
    here.cluster.set_status("jobs", run.id, conditions=[condition("Failed", "BackoffLimitExceeded")])
    assert here.target.status(run).reason == "exit code 137 (OOMKilled) on node 0 (BackoffLimitExceeded)"
    gone = here.submit(core_plan(keep_finished_s=5))
    evicted = {"reason": "Evicted", "message": "Usage of EmptyDir volume exceeds the limit", "containerStatuses": []}
    here.pod(gone, 0, state="terminated", **evicted)
    here.cluster.set_status("jobs", gone.id, conditions=[condition("Failed", "BackoffLimitExceeded")])
    assert "(Evicted) on node 0: Usage of EmptyDir" in here.target.status(gone).reason


@needs_crds
def test_restarts_of_the_gang_count_as_attempts(here: Case) -> None:
    run = here.submit()
    for node in (0, 1):
        here.pod(run, node, attempt=2)
    here.cluster.set_status("jobsets", run.id, restarts=2)
    found = here.target.status(run)
    assert (found.state, found.attempt) == ("running", 3)


def test_a_job_without_pods_tells_the_warning_that_keeps_them_away(here: Case) -> None:
    run = here.submit(core_plan())
    about = {"kind": "Job", "name": run.id, "uid": here.cluster.find("jobs", run.id)["metadata"]["uid"]}
    event = {"type": "Warning", "reason": "FailedCreate", "message": "exceeded quota: gpus", "involvedObject": about}
    here.cluster.put({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e1"}, **event})
    assert here.target.status(run).reason == "FailedCreate: exceeded quota: gpus"


@pytest.mark.parametrize("owner", ["", "-node-0"])
def test_pods_that_are_missing_beside_running_ones_are_explained(here: Case, owner: str) -> None:
    run = here.submit(core_plan())
    here.pod(run, 0)
    about = {"kind": "Job", "name": run.id + owner, "uid": "1"}
    others = {"kind": "Job", "name": run.id + "0", "uid": "2"}
    for name, reason, message, of in (
        ("e1", "FailedCreate", "exceeded quota: gpus", about),
        ("e2", "BackOff", "restarting a container", about),
        ("e3", "FailedCreate", "another run's", others),
    ):
        event = {"type": "Warning", "reason": reason, "message": message, "involvedObject": of}
        here.cluster.put({"apiVersion": "v1", "kind": "Event", "metadata": {"name": name}, **event})
    found = here.target.status(run)
    assert (found.state, found.reason) == ("starting", "1 of 2 pods have started; FailedCreate: exceeded quota: gpus")
    here.pod(run, 1)
    assert (here.target.status(run).state, here.target.status(run).reason) == ("running", "")


def suspended(here: Case, queue: str = "team") -> Any:
    run = here.submit(core_plan(queue=queue))
    job = here.cluster.find("jobs", run.id)
    job["spec"]["suspend"] = True
    job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = queue
    return run, job


def test_a_job_that_kueue_holds_is_queued_with_its_reason(tmp_path: Path) -> None:
    with case(tmp_path, kueue=True) as here:
        run, job = suspended(here)
        assert "is there a LocalQueue team?" in here.target.status(run).reason
        no_quota = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "insufficient quota"}
        meta = {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": job["metadata"]["uid"]}}
        status = {"conditions": [no_quota]}
        group = "kueue.x-k8s.io/v1beta1"
        here.cluster.put({"apiVersion": group, "kind": "Workload", "metadata": meta, "status": status})
        found = here.target.status(run)
        assert (found.state, found.reason) == ("queued", "Kueue, queue team: insufficient quota")
        here.cluster.set_status(
            "workloads",
            "w",
            conditions=[{"type": "QuotaReserved", "status": "True"}],
            admissionChecks=[{"name": "provision", "state": "Pending", "message": "nodes come up"}],
        )
        assert "provision is Pending: nodes come up" in here.target.status(run).reason
        here.cluster.forbidden.add(("list", "workloads"))
        assert here.target.status(run).state == "queued"


def test_a_suspended_job_without_kueue_says_so(here: Case) -> None:
    run, job = suspended(here)
    assert here.target.status(run).reason == "suspended; no controller handles it (no Kueue)"
    del job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert here.target.status(run).reason == "suspended by hand"


def test_cancelling_gives_the_pods_time_and_the_record_keeps_it(here: Case) -> None:
    run = here.submit(core_plan())
    here.cluster.lingering = True
    name = here.pod(run, 0)
    assert here.target.cancel(run, now=False)
    [body] = [body for verb, _, body in here.cluster.requests if verb == "DELETE"]
    assert body is not None
    assert body["propagationPolicy"] == "Foreground"
    assert "gracePeriodSeconds" not in body
    assert (here.target.status(run).state, here.target.status(run).reason) == ("running", "stopping")
    assert here.target.cancel(run, now=True)
    assert name not in here.cluster.names("pods")
    here.cluster.finish("jobs", run.id)
    assert here.target.status(run).state == "cancelled"
    assert here.cluster.names("configmaps") == []
    assert read_status(run.path).state == "cancelled"
    assert not here.target.cancel(run, now=False)


def test_a_cancel_that_is_not_allowed_leaves_no_mark(here: Case) -> None:
    run = here.submit(core_plan())
    here.cluster.forbidden.add(("delete", "jobs"))
    with pytest.raises(LaunchError, match=r"you may not delete jobs.batch in namespace default"):
        here.target.cancel(run, now=False)
    here.cluster.finish("jobs", run.id)
    assert here.target.status(run).state == "failed"


def test_the_end_of_a_run_outlives_its_objects(here: Case) -> None:
    run = here.submit(core_plan())
    here.end_pod(here.pod(run, 0), 1, "loss is not finite")
    here.cluster.set_status("jobs", run.id, conditions=[condition("Failed", "BackoffLimitExceeded")])
    before = here.target.status(run)
    here.cluster.finish("jobs", run.id)
    here.cluster.finish("pods", f"{run.id}-node-0-0-0")
    assert here.target.status(run) == before
    assert "loss is not finite" in here.target.errors(run)


def test_a_job_that_somebody_deleted_is_not_taken_for_running(here: Case) -> None:
    run = here.submit(core_plan())
    here.cluster.finish("jobs", run.id)
    here.cluster.put({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": run.id, "labels": {"a": "b"}}})
    found = here.target.status(run)
    assert (found.state, "gone from the cluster" in found.reason) == ("failed", True)


def test_many_runs_are_asked_for_at_once(here: Case) -> None:
    runs = [here.submit(core_plan(keep_finished_s=second)) for second in range(5)]
    here.cluster.set_status("jobs", runs[3].id, conditions=[condition("Complete")])
    for run in runs[:3]:
        here.pod(run, 0), here.pod(run, 1)
    here.cluster.page = 2
    here.cluster.requests.clear()
    found = here.target.statuses(runs[:4])
    assert [found[run.id].state for run in runs[:4]] == ["running"] * 3 + ["done"]
    assert len(methods(here, "GET")) == 3 + 3 + 3  # pages of five jobs and of six pods, logs of three running runs


def test_a_cluster_that_is_away_does_not_hide_the_others(here: Case) -> None:
    here.cluster.put({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other"}})
    near, far = here.submit(core_plan()), here.submit(core_plan(namespace="other"))
    here.cluster.trouble("GET", "namespaces/other/", "503", times=99)
    found = here.target.statuses([near, far])
    assert [found[run.id].state for run in (near, far)] == ["queued", "unknown"]
    assert "HTTP status 503" in found[far.id].reason


@pytest.mark.parametrize(
    ("marks", "attempt"),
    [
        ({}, 1),
        ({"jobset.sigs.k8s.io/restart-attempt": "2"}, 3),
        ({"volcano.sh/job-version": "1"}, 2),
        (
            {
                "batch.kubernetes.io/job-index-failure-count": "1",
                "batch.kubernetes.io/job-index-ignored-failure-count": "3",
            },
            5,
        ),
    ],
)
def test_every_kind_counts_its_restarts_in_its_own_marks(marks: dict[str, str], attempt: int) -> None:
    assert attempt_of({"metadata": {"name": "p", "annotations": marks}}) == attempt


@pytest.mark.parametrize(
    ("name", "labels", "node"),
    [
        ("r-node-0-3-x7k2p", {"batch.kubernetes.io/job-completion-index": "3"}, 3),
        ("r-master-0", {"training.kubeflow.org/replica-type": "master", "training.kubeflow.org/replica-index": "0"}, 0),
        ("r-worker-1", {"training.kubeflow.org/replica-type": "worker", "training.kubeflow.org/replica-index": "1"}, 2),
        ("r-node-5", {"volcano.sh/task-spec": "node", "volcano.sh/task-index": "5"}, 5),
        ("r-node-6", {}, 6),
    ],
)
def test_every_kind_numbers_its_pods_in_its_own_marks(name: str, labels: dict[str, str], node: int) -> None:
    assert node_of({"metadata": {"name": name, "labels": labels}}) == node


def test_errors_are_the_last_words_in_the_order_of_their_time(here: Case) -> None:
    run = here.submit(core_plan())
    first, second = here.pod(run, 0), here.pod(run, 1)
    here.end_pod(first, 1, "peer is gone", at="2026-11-21T10:00:09Z")
    here.end_pod(second, 1, "rank 3: CUDA error\n  in step 7", at="2026-11-21T10:00:01Z")
    earlier = {"exitCode": 1, "message": "the time before", "finishedAt": "2026-11-21T09:00:00Z", "reason": "Error"}
    again = {"name": "node", "restartCount": 1, "state": {"running": {}}, "lastState": {"terminated": earlier}}
    here.cluster.set_status("pods", first, containerStatuses=[again])
    text = here.target.errors(run)
    assert text.index("the time before") < text.index("CUDA error")
    assert f"node 1, pod {second}: exit code 1 at 2026-11-21 10:00:01 UTC\n  rank 3: CUDA error\n    in step 7" in text


def test_difference_shows_what_is_rendered_and_nothing_else(here: Case) -> None:
    plan = core_plan()
    run = here.submit(plan)
    same = job_of(plan, run)
    assert here.target.diff(same, manifest(same)) == ""
    other_plan = plan.model_copy(update={"launch": plan.launch.model_copy(update={"image": "example.com/partool:2"})})
    other = job_of(other_plan, here.store.next_submitted(plan.name, other_plan.hash))
    text = here.target.diff(other, manifest(other))
    changed = [line for line in text.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert any(line.strip("+- ") == "image: example.com/partool:2" for line in changed)
    assert all("image:" in line or "plan-hash" in line for line in changed)
    assert f"cluster: Job/{run.id}" in text


def test_difference_shows_a_variable_that_went(here: Case) -> None:
    plan = core_plan()
    run = here.submit(plan)
    job = here.cluster.find("jobs", run.id)
    job["spec"]["template"]["spec"]["containers"][0]["env"].append({"name": "OLD", "value": "x"})
    lines = here.target.diff(job_of(plan, run), manifest(job_of(plan, run))).splitlines()
    assert [line.replace(" ", "") for line in lines if line[:2] in ("- ", "+ ")] == ["--name:OLD", "-value:x"]


def test_a_dry_run_asks_the_server_and_creates_nothing(here: Case) -> None:
    plan = core_plan()
    job = job_of(plan, here.store.next_submitted(plan.name, plan.hash))
    *_, level = here.target.validate(job, manifest(job))
    assert (level.ran, level.findings, level.note) == (True, (), "Kubernetes v1.36.0")
    assert here.cluster.names("jobs") == []
    spoilt = manifest(job)
    spoilt.files["manifest.yaml"] = spoilt.text.replace("completionMode", "completionMood")
    *_, level = here.target.validate(job, spoilt)
    [finding] = level.findings
    assert finding.code == "PT578"
    assert 'unknown field "spec.completionMood"' in finding.message


def test_a_dry_run_of_a_resumption_does_not_stumble_over_the_run_itself(here: Case) -> None:
    plan = core_plan()
    run = here.submit(plan)
    *_, level = here.target.validate(job_of(plan, run), manifest(job_of(plan, run)))
    assert level.findings == ()
    del here.cluster.find("jobs", run.id)["metadata"]["labels"]["partool.dev/run"]
    *_, level = here.target.validate(job_of(plan, run), manifest(job_of(plan, run)))
    assert [finding.code for finding in level.findings] == ["PT575"]


def test_a_dry_run_without_a_cluster_says_that_it_did_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    job = job_of(core_plan(), Run(tmp_path / "x"))
    *_, level = K8sTarget().validate(job, manifest(job))
    assert not level.ran
    assert "no usable Kubernetes configuration" in level.note


def test_a_watch_goes_on_after_drops_and_lists_anew_when_it_is_gone(here: Case) -> None:
    client, seen = Client(), []
    here.cluster.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}})
    here.cluster.trouble("GET", "watch=1", "cut", amount=1)
    for kind, item in client.watch(CONFIG_MAPS, seconds=20):
        seen.append((kind, item["metadata"]["name"]))
        if len(seen) == 1:
            here.cluster.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "b"}})
            here.cluster.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}})
        if len(seen) == 3:
            here.cluster.forget()
        if len(seen) == 6:
            break
    assert seen[:3] == [("ADDED", "a"), ("ADDED", "b"), ("ADDED", "c")]
    assert sorted(seen[3:]) == [("ADDED", "a"), ("ADDED", "b"), ("ADDED", "c")]


def test_pages_that_expire_are_listed_anew(here: Case) -> None:
    for name in "abcde":
        here.cluster.put({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}})
    here.cluster.page = 2
    here.cluster.trouble("GET", "continue=4", "410", status=status_of(410, "Expired", "the token is too old"))
    assert len(Client().select(CONFIG_MAPS)) == 5


def test_reviews_of_access_are_passed_on(here: Case) -> None:
    here.cluster.forbidden.add(("get", "pods/log"))
    assert Client().may("get", PODS)
    assert not Client().may("get", PODS, "log")


def test_status_is_json_that_the_commands_can_show(here: Case) -> None:
    run = here.submit(core_plan())
    assert json.loads(here.target.status(run).model_dump_json())["state"] == "queued"
