"""Renders a JobSet (jobset.x-k8s.io/v1alpha2) with one Indexed Job whose pods fail and restart together.

``onJobFailureMessagePatterns`` exists since JobSet 0.10; older versions refuse the object.
"""

from __future__ import annotations

from partool.render.job import Job
from partool.render.k8s.manifest import Fields, Object
from partool.render.k8s.objects import (
    EXIT_CONFIGURATION,
    EXIT_PREEMPTED,
    NODE,
    disruption_rule,
    exit_code_rule,
    int32,
    workload_metadata,
)
from partool.render.k8s.pod import PodPlace, template

REMARKS = ()


def place(job: Job) -> PodPlace:
    """Return the variables and DNS name by which the pods find each other."""
    return PodPlace("JOB_COMPLETION_INDEX", f"{job.run_id}-{NODE}-0-0.{job.run_id}")


def objects(job: Job) -> list[Object]:
    """Return the JobSet; its controller makes the headless Service."""
    spec: Fields = {
        "ttlSecondsAfterFinished": int32(job.plan.launch.k8s.keep_finished_s),
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": _failure_policy(job.plan.launch.restarts),
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": _job(job)}}],
    }
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": workload_metadata(job),
            "spec": spec,
        }
    ]


def _failure_policy(restarts: int) -> Fields:
    """Return the rules for a failed Job. If no rule fits, a failure counts against ``maxRestarts``.

    BlockingRecreate waits until the old pods are gone, so that old and new agents never meet. If a Job fails
    because of its pod failure policy, only the message of its condition names the rule of the policy.
    """
    return {
        "maxRestarts": int32(restarts),
        "restartStrategy": "BlockingRecreate",
        "rules": [
            {
                "name": "ConfigurationError",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": ["matching FailJob rule at index 0$"],
            },
            {
                "name": "Preempted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
            {"name": "Deadline", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
        ],
    }


def _job(job: Job) -> Fields:
    nodes, deadline_s = job.plan.devices.nodes, job.plan.launch.k8s.deadline_s
    rules = [
        exit_code_rule("FailJob", EXIT_CONFIGURATION),
        exit_code_rule("FailJob", EXIT_PREEMPTED),
        disruption_rule("FailJob"),
    ]
    spec: Fields = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
    }
    if deadline_s is not None:
        spec["activeDeadlineSeconds"] = deadline_s
    return spec | {"template": template(job, place(job))}
