"""Kubernetes' reactions to the agents' exit codes, kind by kind."""

from __future__ import annotations

import re
from typing import Any

import pytest
from _k8s_case import documents, k8s_job, workload

from partool.render.job import Job
from partool.render.k8s import render


def rules_of(job: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return (action, exit code or condition) of a Job's pod failure policy."""
    found = []
    for rule in job["podFailurePolicy"]["rules"]:
        about = rule["onExitCodes"]["values"] if "onExitCodes" in rule else [rule["onPodConditions"][0]["type"]]
        found += [(rule["action"], each) for each in about]
    return found


def test_a_jobset_restarts_as_a_whole() -> None:
    spec = workload(k8s_job("jobset", restarts=3))["spec"]
    policy, job = spec["failurePolicy"], spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0
    assert job["podReplacementPolicy"] == "Failed"
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    assert rules_of(job) == [("FailJob", 78), ("FailJob", 75), ("FailJob", "DisruptionTarget")]
    assert (policy["maxRestarts"], policy["restartStrategy"]) == (3, "BlockingRecreate")
    assert all(re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]) for rule in policy["rules"])


@pytest.mark.parametrize(
    ("reason", "message", "action"),
    [
        ("PodFailurePolicy", "Container node for pod t/r failed with exit code 78 matching FailJob rule at index 0",
         "FailJobSet"),
        ("PodFailurePolicy", "Container node for pod t/r failed with exit code 75 matching FailJob rule at index 1",
         "RestartJobSetAndIgnoreMaxRestarts"),
        ("PodFailurePolicy", "Pod t/r has condition DisruptionTarget matching FailJob rule at index 2",
         "RestartJobSetAndIgnoreMaxRestarts"),
        ("BackoffLimitExceeded", "Job has reached the specified backoff limit", "RestartJobSet"),
        ("DeadlineExceeded", "Job was active longer than specified deadline", "FailJobSet"),
    ],
)  # fmt: skip
def test_what_a_jobset_does_on_a_failed_job(reason: str, message: str, action: str) -> None:
    """The first rule that names the reason and, if it has patterns, matches the message decides (JobSet 0.10)."""
    rules = workload(k8s_job("jobset"))["spec"]["failurePolicy"]["rules"]
    fitting = [
        rule["action"]
        for rule in rules
        if reason in rule["onJobFailureReasons"]
        and any(re.search(pattern, message) for pattern in rule.get("onJobFailureMessagePatterns", [""]))
    ]
    assert (fitting or ["RestartJobSet"])[0] == action


def attempts(spec: dict[str, Any], codes: list[int], nodes: int) -> tuple[int, str]:
    """Return how often an Indexed Job runs all pods, given the agents' combined exit codes, and how it ends.

    Each pod ends with the code; the Job controller then counts by index, following the pod failure policy.
    """
    failures = dict.fromkeys(range(nodes), 0)
    for attempt, code in enumerate(codes, 1):
        if code == 0:
            return attempt, "done"
        action = {about: action for action, about in rules_of(spec)}.get(code, "Count")
        if action == "FailJob":
            return attempt, "failed"
        for index in failures if action == "Count" else ():
            failures[index] += 1
        failed = [index for index, count in failures.items() if count > spec["backoffLimitPerIndex"]]
        if len(failed) > spec["maxFailedIndexes"]:
            return attempt, "failed"
    return len(codes), "going on"


@pytest.mark.parametrize(
    ("restarts", "codes", "expected"),
    [
        (2, [1, 1, 0], (3, "done")),
        (2, [1, 1, 1, 0], (3, "failed")),
        (0, [1, 0], (1, "failed")),
        (0, [75, 75, 75, 75, 0], (5, "done")),
        (1, [75, 1, 75, 137, 0], (4, "failed")),
        (5, [1, 78, 0], (2, "failed")),
    ],
)
@pytest.mark.parametrize("nodes", [1, 16])
def test_the_pods_of_a_job_restart_as_often_as_the_run_may(
    restarts: int, codes: list[int], expected: tuple[int, str], nodes: int
) -> None:
    spec = workload(k8s_job("job", nodes, restarts=restarts))["spec"]
    assert "backoffLimit" not in spec  # it would count the pods of all nodes together
    assert spec["podReplacementPolicy"] == "Failed"
    assert attempts(spec, codes, nodes) == expected


def test_the_pods_of_a_job_keep_their_names_and_the_service_tells_them_early() -> None:
    _, service, job = documents(k8s_job("job"))
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    template = job["spec"]["template"]
    assert template["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert len(documents(k8s_job("job", 1))) == 2
    assert "subdomain" not in workload(k8s_job("job", 1))["spec"]["template"]["spec"]


def volcano_action(job: Job, event: str, code: int = 0) -> str:
    """Return Volcano's action: the first policy that names the event or the exit code decides."""
    for policy in workload(job)["spec"]["policies"]:
        if policy.get("event") == event or (code and policy.get("exitCode") == code):
            return str(policy["action"])
    raise AssertionError(event)


def test_a_volcano_job_restarts_as_a_whole() -> None:
    never, thrice = k8s_job("volcano"), k8s_job("volcano", restarts=3)
    assert [volcano_action(thrice, "PodFailed", code) for code in (1, 75, 78)] == [
        "RestartJob", "RestartJob", "TerminateJob",
    ]  # fmt: skip
    assert volcano_action(never, "PodFailed", 1) == "TerminateJob"
    assert volcano_action(never, "PodFailed", 75) == volcano_action(never, "PodEvicted") == "RestartJob"
    assert workload(thrice)["spec"]["maxRetry"] == 4
    assert workload(never)["spec"]["maxRetry"] == 2**31 - 1


def test_a_pytorchjob_counts_the_restarts_of_all_pods() -> None:
    spec = workload(k8s_job("pytorchjob", 4, restarts=3))["spec"]
    assert {each["restartPolicy"] for each in spec["pytorchReplicaSpecs"].values()} == {"OnFailure"}
    assert spec["runPolicy"]["backoffLimit"] == 13  # the operator gives up once there are as many
    spec = workload(k8s_job("pytorchjob", 4))["spec"]
    assert {each["restartPolicy"] for each in spec["pytorchReplicaSpecs"].values()} == {"Never"}
    assert render(k8s_job("pytorchjob")).text.startswith("# A PyTorchJob knows neither exit codes")
