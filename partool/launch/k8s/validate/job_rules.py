"""Rules of batch Jobs, and of gangs on them, that a schema cannot express.

Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/ (pod failure policy, backoff per index, pod
replacement policy) and the API server's validation of batch/v1.
"""

from __future__ import annotations

from collections.abc import Iterator

from partool.launch.k8s.validate.findings import FieldFault, at
from partool.launch.k8s.validate.manifest import DocumentPart, Manifest, Pods

_LONGEST = 63
_RULES_OF_PODS = 20
_DISRUPTION = {"Job": "Ignore", "JobSet": "FailJob"}
"""Action for a pod's disruption. A Job replaces the pod; a JobSet restarts all pods, and does not count the restart."""


def pod_names(manifest: Manifest) -> Iterator[FieldFault]:
    """Find generated pod names that are longer than the 63 characters which a host name may have."""
    for pods in manifest.pods:
        name = pods.longest_name
        if name is not None and len(name) > _LONGEST:
            text = f"pods would be called {name}: {len(name)} characters, at most {_LONGEST}"
            yield FieldFault(pods.template.owner, ("metadata", "name"), text, "choose a shorter name")


def restart_policies(manifest: Manifest) -> Iterator[FieldFault]:
    """Find restart policies that the controller refuses; the default is ``Always`` in a Job, OnFailure in a JobSet."""
    for pods in manifest.jobs:
        policy, default = pods.spec.get("restartPolicy"), "Always" if pods.kind == "Job" else "OnFailure"
        shown = policy or f"{default}, the default,"
        if (policy or default) == "Always":
            yield at(pods.spec, "restartPolicy", text=f"{shown} is not for Jobs; it must be Never")
        for field in ("podFailurePolicy", "backoffLimitPerIndex"):
            if pods.maker.get(field) is not None and (policy or default) != "Never":
                yield at(pods.spec, "restartPolicy", text=f"{field} needs Never, not {shown}")


def per_index(manifest: Manifest) -> Iterator[FieldFault]:
    """Find settings for Indexed Jobs in other Jobs, and ``maxFailedIndexes`` without the settings that it requires."""
    for pods in manifest.jobs:
        job, indexed = pods.maker, pods.maker.get("completionMode") == "Indexed"
        if pods.kind == "JobSet":
            indexed = job.get("completionMode") in (None, "Indexed")  # JobSet sets Indexed by default
        if job.get("backoffLimitPerIndex") is not None and not indexed:
            yield at(job, "backoffLimitPerIndex", text="needs completionMode: Indexed")
        if job.get("maxFailedIndexes") is not None and job.get("backoffLimitPerIndex") is None:
            yield at(job, "maxFailedIndexes", text="needs backoffLimitPerIndex")
        if (job.number("maxFailedIndexes") or 0) > (job.number("completions") or 2**31):
            yield at(job, "maxFailedIndexes", text="is above completions")
        if job.get("successPolicy") is not None and not indexed:
            yield at(job, "successPolicy", text="needs completionMode: Indexed")
        if indexed and job.get("completions") is None and job.get("parallelism") is None:
            yield at(job, "completions", text="is needed with completionMode: Indexed")


def gangs(manifest: Manifest) -> Iterator[FieldFault]:
    """Find Jobs whose pods would not all run at the same time, would have no numbers, or would not restart together."""
    for pods in manifest.jobs:
        job = pods.maker
        completions, parallelism = job.number("completions"), job.number("parallelism")
        together = (completions or 1) if pods.kind == "JobSet" else 1 if parallelism is None else parallelism
        together = together if parallelism is None else parallelism
        if completions is not None and completions != together:
            text = f"{together} pods at a time of {completions}: the ranks would wait for the others for ever"
            yield at(job, "parallelism", text=text)
        if pods.kind == "Job" and (completions or 0) > 1 and job.get("completionMode") != "Indexed":
            yield at(job, "completionMode", text="must be Indexed, or the pods have no numbers")
        if pods.kind == "JobSet" and job.get("backoffLimit") != 0:
            text = "must be 0 in a JobSet: single pods would restart while the others wait"
            yield at(job, "backoffLimit", text=text, help="failurePolicy.maxRestarts restarts all of them")
        per_index = job.get("backoffLimitPerIndex") is not None and (completions or 0) > 1
        if pods.kind == "Job" and per_index and job.get("maxFailedIndexes") != 0:
            yield at(job, "maxFailedIndexes", text="must be 0: with a rank gone, the others wait for ever")


def selectors(manifest: Manifest) -> Iterator[FieldFault]:
    """Find selectors of Jobs: only the Job controller may set them."""
    for pods in manifest.jobs:
        if pods.maker.get("selector") is not None and pods.maker.get("manualSelector") is not True:
            yield at(pods.maker, "selector", text="is made by the Job controller and must not be given")


def failure_policies(manifest: Manifest) -> Iterator[FieldFault]:
    """Find pod failure policies that the server refuses, or that conflict with how the kind of job restarts pods."""
    for pods in manifest.jobs:
        job = pods.maker
        replacement = job.get("podReplacementPolicy")
        if not job.part("podFailurePolicy").value:
            continue
        if replacement not in (None, "Failed"):
            yield at(job, "podReplacementPolicy", text=f"must be Failed with a podFailurePolicy, not {replacement}")
        rules = job.parts("podFailurePolicy", "rules")
        if len(rules) > _RULES_OF_PODS:
            yield at(job, "podFailurePolicy", "rules", text=f"{len(rules)} rules; at most {_RULES_OF_PODS}")
        for rule in rules:
            yield from _rule(pods, rule)


def _rule(pods: Pods, rule: DocumentPart) -> Iterator[FieldFault]:
    if (rule.get("onExitCodes") is None) == (rule.get("onPodConditions") is None):
        yield at(rule, text="must have either onExitCodes or onPodConditions")
    if rule.get("action") == "FailIndex" and pods.maker.get("backoffLimitPerIndex") is None:
        yield at(rule, "action", text="FailIndex needs backoffLimitPerIndex")
    yield from _exit_codes(pods, rule)
    if any(condition.get("type") == "DisruptionTarget" for condition in rule.parts("onPodConditions")):
        wanted = _DISRUPTION[pods.kind]
        if rule.get("action") != wanted:
            yield at(rule, "action", text=f"a disruption must {wanted} in a {pods.kind}, not {rule.get('action')}")


def _exit_codes(pods: Pods, rule: DocumentPart) -> Iterator[FieldFault]:
    codes = rule.part("onExitCodes")
    if not codes.value:
        return
    values = codes.get("values")
    numbers = [value for value in values if isinstance(value, int)] if isinstance(values, list) else []
    if not numbers:
        yield at(codes, "values", text="must name at least one exit code")
    if sorted(set(numbers)) != numbers:
        yield at(codes, "values", text="must be in ascending order, each once")
    if 0 in numbers and codes.get("operator") == "In":
        yield at(codes, "values", text="0 is no failure")
    name = codes.get("containerName")
    if name is not None and name not in [container.get("name") for container in pods.containers]:
        yield at(codes, "containerName", text=f"the pods have no container {name!r}")
