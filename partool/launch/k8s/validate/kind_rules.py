"""Rules of the add-ons: JobSet, Kubeflow's jobs, Volcano, Kueue.

Sources: the admission webhooks of https://github.com/kubernetes-sigs/jobset (v0.12), https://github.com/kubeflow/trainer
(v2.3 and v1.9) and https://github.com/volcano-sh/volcano (v1.15); https://kueue.sigs.k8s.io/docs/.
"""

from __future__ import annotations

from collections.abc import Iterator

from partool.launch.k8s.validate.findings import FieldFault, at
from partool.launch.k8s.validate.manifest import DocumentPart, Manifest

_QUEUE = "kueue.x-k8s.io/queue-name"
_TOPOLOGY = "kueue.x-k8s.io/podset-"
_ALPHA_ACTIONS = ("RestartJob", "RestartJobAndIgnoreMaxRestarts")
_RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
"""Variables set by Kubeflow's torch runtime; its webhook refuses a TrainJob that sets them."""


def jobset_order(manifest: Manifest) -> Iterator[FieldFault]:
    """Find ``dependsOn`` entries that the webhook refuses, and references to replicated jobs that do not exist."""
    for document in manifest.of("JobSet", "jobset.x-k8s.io"):
        earlier: list[object] = []
        jobs = document.parts("spec", "replicatedJobs")
        in_order = document.get("spec", "startupPolicy", "startupPolicyOrder") == "InOrder"
        for index, job in enumerate(jobs):
            depends = job.parts("dependsOn")
            if depends and index == 0:
                yield at(job, "dependsOn", text="the first replicated job has none before it to depend on")
            if depends and in_order:
                yield at(job, "dependsOn", text="cannot go with startupPolicy InOrder")
            for other in depends if index else ():
                if other.get("name") not in earlier:
                    yield at(other, "name", text=f"no replicated job {other.get('name')!r} comes before it")
            earlier.append(job.get("name"))
        yield from _named_jobs(document, earlier)
        for field in ("enableDNSHostnames", "publishNotReadyAddresses"):
            if document.get("spec", "network", field) is False:
                yield at(
                    document, "spec", "network", field, text="must be true: the pods meet by name before they are ready"
                )


def _named_jobs(document: DocumentPart, names: list[object]) -> Iterator[FieldFault]:
    for policy in [document.part("spec", "successPolicy"), *document.parts("spec", "failurePolicy", "rules")]:
        targets = policy.get("targetReplicatedJobs")
        for index, target in enumerate(targets if isinstance(targets, list) else ()):
            if target not in names:
                yield at(policy, "targetReplicatedJobs", index, text=f"there is no replicated job {target!r}")
    coordinator = document.part("spec", "coordinator")
    if coordinator.value and coordinator.get("replicatedJob") not in names:
        wanted = coordinator.get("replicatedJob")
        yield at(coordinator, "replicatedJob", text=f"there is no replicated job {wanted!r}")


def jobset_failures(manifest: Manifest) -> Iterator[FieldFault]:
    """Find failure settings that JobSet disables by default, and JobSets that count a disruption as a failure."""
    for document in manifest.of("JobSet", "jobset.x-k8s.io"):
        if document.get("spec", "failurePolicy", "restartStrategy") == "InPlaceRestart":
            yield at(document, "spec", "failurePolicy", "restartStrategy", text="InPlaceRestart is off by default")
        rules = document.parts("spec", "failurePolicy", "rules")
        for rule in rules:
            if rule.get("action") in _ALPHA_ACTIONS:
                yield at(rule, "action", text=f"{rule.get('action')} is off by default")
        disrupted = any(
            pods.maker.parts("podFailurePolicy", "rules")
            and any(c.get("type") == "DisruptionTarget" for c in rule.parts("onPodConditions"))
            for pods in manifest.jobs
            if pods.template.owner == document.owner
            for rule in pods.maker.parts("podFailurePolicy", "rules")
        )
        free = any(
            rule.get("action") == "RestartJobSetAndIgnoreMaxRestarts"
            and "PodFailurePolicy" in (rule.get("onJobFailureReasons") or ())
            for rule in rules
        )
        if disrupted and not free:
            text = "a disruption fails the Job, and no rule restarts the set without it counting as a failure"
            help = "add {action: RestartJobSetAndIgnoreMaxRestarts, onJobFailureReasons: [PodFailurePolicy]}"
            yield at(document, "spec", "failurePolicy", text=text, help=help)


def pytorchjobs(manifest: Manifest) -> Iterator[FieldFault]:
    """Find PyTorchJobs whose pods would get no rank from the controller, or lack the required container."""
    for document in manifest.of("PyTorchJob", "kubeflow.org"):
        roles = document.part("spec", "pytorchReplicaSpecs").value
        if "Master" not in roles:
            text = "lacks Master, without which pods get no MASTER_ADDR and no rank"
            yield at(document, "spec", "pytorchReplicaSpecs", text=text)
        if document.get("spec", "pytorchReplicaSpecs", "Master", "replicas") not in (None, 1):
            yield at(document, "spec", "pytorchReplicaSpecs", "Master", "replicas", text="must be 1")
        processes = document.get("spec", "nprocPerNode")
        if isinstance(processes, int):
            yield at(document, "spec", "nprocPerNode", text=f'must be a text: "{processes}"')
    for pods in manifest.pods:
        names = [container.get("name") for container in pods.spec.parts("containers")]
        if pods.kind == "PyTorchJob" and "pytorch" not in names:
            yield at(pods.spec, "containers", text="one must be named pytorch")


def trainjobs(manifest: Manifest) -> Iterator[FieldFault]:
    """Find TrainJobs that set a variable which their runtime also sets."""
    for document in manifest.of("TrainJob", "trainer.kubeflow.org"):
        if not document.text("spec", "runtimeRef", "name"):
            yield at(document, "spec", "runtimeRef", "name", text="is missing")
        containers = [container for pods in manifest.pods if pods.is_patch for container in pods.containers]
        for holder in [document.part("spec", "trainer"), *containers]:
            for variable in holder.parts("env"):
                if variable.get("name") in _RESERVED:
                    yield at(variable, "name", text=f"{variable.get('name')} is set by the runtime and refused")


def volcano_jobs(manifest: Manifest) -> Iterator[FieldFault]:
    """Find Volcano jobs that could start with only some of their pods, and jobs with contradictory policies."""
    for document in manifest.of("Job", "batch.volcano.sh"):
        total = sum(task.number("replicas") or 0 for task in document.parts("spec", "tasks"))
        least = document.number("spec", "minAvailable")
        if least is not None and least != total:
            text = f"{least} of {total} pods; a run begins with all of them"
            yield at(document, "spec", "minAvailable", text=text)
        if document.get("spec", "schedulerName") not in (None, "volcano"):
            yield at(document, "spec", "schedulerName", text="must be volcano, or the pods are not placed together")
        policies = document.parts("spec", "policies")
        for task in document.parts("spec", "tasks"):
            policies += task.parts("policies")
        for policy in policies:
            given = [key for key in ("event", "events", "exitCode") if policy.get(key) is not None]
            if not given or ("exitCode" in given and len(given) > 1):
                yield at(policy, text="must have either events or an exitCode")
            if policy.get("exitCode") == 0:
                yield at(policy, "exitCode", text="0 is no failure")
            if not policy.text("action"):
                yield at(policy, "action", text="is missing")


def kueue(manifest: Manifest) -> Iterator[FieldFault]:
    """Find queues set only on pods, topologies set on a job (Kueue ignores both), and queued pods without requests."""
    for document in manifest.documents:
        for key in document.part("metadata", "annotations").value:
            if str(key).startswith(_TOPOLOGY):
                yield at(document, "metadata", "annotations", key, text="Kueue reads it on the pod template only")
    for pods in manifest.pods:
        document = next(d for d in manifest.documents if d.owner == pods.template.owner)
        queue = document.get("metadata", "labels", _QUEUE)
        if queue is None and pods.template.get("metadata", "labels", _QUEUE) is not None:
            text = "on the pods, and not on the object: Kueue would not hold it back as a whole"
            yield at(pods.template, "metadata", "labels", _QUEUE, text=text)
        for container in pods.containers if queue is not None and not pods.is_patch else ():
            if not container.part("resources", "requests").value and not container.part("resources", "limits").value:
                yield at(container, "resources", text="Kueue counts requests or limits, and there are none")
