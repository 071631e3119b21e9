"""Rules for single fields: each rule states the form that the values of some fields must have.

Sources: the field's descriptions at https://kubernetes.io/docs/reference/kubernetes-api/, and for add-ons
https://jobset.sigs.k8s.io/docs/reference/, https://www.kubeflow.org/docs/components/trainer/ and https://volcano.sh/docs/.
"""

from __future__ import annotations

from collections.abc import Iterator

from partool.launch.k8s.validate import forms
from partool.launch.k8s.validate.findings import FieldFault
from partool.launch.k8s.validate.forms import Form, one_of, whole_number
from partool.launch.k8s.validate.manifest import DocumentPart, Manifest, select

_METADATA: dict[str, Form] = {
    "metadata.name": forms.subdomain,
    "metadata.namespace": forms.label_name,
    "metadata.labels.@": forms.qualified,
    "metadata.labels.*": forms.label_value,
    "metadata.annotations.@": forms.qualified,
}
_POD: dict[str, Form] = {
    **{field: form for field, form in _METADATA.items() if "s." in field},
    "spec.restartPolicy": one_of("Always", "OnFailure", "Never"),
    "spec.terminationGracePeriodSeconds": whole_number(0, 2**63 - 1),
    "spec.activeDeadlineSeconds": whole_number(1),
    "spec.dnsPolicy": one_of("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "spec.preemptionPolicy": one_of("Never", "PreemptLowerPriority"),
    "spec.hostname": forms.label_name,
    "spec.subdomain": forms.label_name,
    "spec.serviceAccountName": forms.subdomain,
    "spec.priorityClassName": forms.subdomain,
    "spec.runtimeClassName": forms.subdomain,
    "spec.imagePullSecrets.*.name": forms.subdomain,
    "spec.nodeSelector.@": forms.qualified,
    "spec.nodeSelector.*": forms.label_value,
    "spec.tolerations.*.key": forms.qualified,
    "spec.tolerations.*.value": forms.label_value,
    "spec.tolerations.*.operator": one_of("Exists", "Equal", "Lt", "Gt"),
    "spec.tolerations.*.effect": one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
    "spec.securityContext.runAsUser": whole_number(0),
    "spec.securityContext.runAsGroup": whole_number(0),
    "spec.securityContext.fsGroup": whole_number(0),
    "spec.securityContext.supplementalGroups.*": whole_number(0),
    "spec.securityContext.fsGroupChangePolicy": one_of("OnRootMismatch", "Always"),
    "spec.securityContext.seccompProfile.type": one_of("RuntimeDefault", "Unconfined", "Localhost"),
    "spec.volumes.*.name": forms.label_name,
    "spec.volumes.*.emptyDir.medium": one_of("", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"),
    "spec.volumes.*.emptyDir.sizeLimit": forms.quantity,
    "spec.volumes.*.hostPath.path": forms.absolute,
    "spec.volumes.*.hostPath.type": one_of(
        "", "DirectoryOrCreate", "Directory", "FileOrCreate", "File", "Socket", "CharDevice", "BlockDevice"
    ),
    "spec.volumes.*.persistentVolumeClaim.claimName": forms.subdomain,
    "spec.volumes.*.configMap.name": forms.subdomain,
    "spec.volumes.*.configMap.defaultMode": forms.mode,
    "spec.volumes.*.configMap.items.*.key": forms.data_key,
    "spec.volumes.*.configMap.items.*.mode": forms.mode,
    "spec.volumes.*.secret.secretName": forms.subdomain,
    "spec.volumes.*.secret.defaultMode": forms.mode,
    "spec.resources.limits.*": forms.quantity,
    "spec.resources.requests.*": forms.quantity,
}
_CONTAINER: dict[str, Form] = {
    "name": forms.label_name,
    "image": forms.image,
    "imagePullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "terminationMessagePath": forms.absolute,
    "terminationMessagePolicy": one_of("File", "FallbackToLogsOnError"),
    "ports.*.containerPort": whole_number(1, 65535),
    "ports.*.hostPort": whole_number(0, 65535),
    "ports.*.protocol": one_of("TCP", "UDP", "SCTP"),
    "ports.*.name": forms.port_name,
    "env.*.name": forms.variable_name,
    "env.*.valueFrom.secretKeyRef.name": forms.subdomain,
    "env.*.valueFrom.secretKeyRef.key": forms.data_key,
    "env.*.valueFrom.configMapKeyRef.name": forms.subdomain,
    "env.*.valueFrom.configMapKeyRef.key": forms.data_key,
    "resources.limits.@": forms.qualified,
    "resources.limits.*": forms.quantity,
    "resources.requests.@": forms.qualified,
    "resources.requests.*": forms.quantity,
    "volumeMounts.*.name": forms.label_name,
    "volumeMounts.*.mountPath": forms.absolute,
    "volumeMounts.*.mountPropagation": one_of("None", "HostToContainer", "Bidirectional"),
    "securityContext.runAsUser": whole_number(0),
    "securityContext.runAsGroup": whole_number(0),
    "securityContext.seccompProfile.type": one_of("RuntimeDefault", "Unconfined", "Localhost"),
}
_JOB: dict[str, Form] = {
    "completions": whole_number(0),
    "parallelism": whole_number(0),
    "backoffLimit": whole_number(0),
    "backoffLimitPerIndex": whole_number(0),
    "maxFailedIndexes": whole_number(0),
    "activeDeadlineSeconds": whole_number(0, 2**63 - 1),
    "ttlSecondsAfterFinished": whole_number(0),
    "completionMode": one_of("Indexed", "NonIndexed"),
    "podReplacementPolicy": one_of("Failed", "TerminatingOrFailed"),
    "podFailurePolicy.rules.*.action": one_of("FailJob", "FailIndex", "Ignore", "Count"),
    "podFailurePolicy.rules.*.onExitCodes.operator": one_of("In", "NotIn"),
    "podFailurePolicy.rules.*.onExitCodes.values.*": whole_number(0, 255),
    "podFailurePolicy.rules.*.onExitCodes.containerName": forms.label_name,
    "podFailurePolicy.rules.*.onPodConditions.*.type": forms.qualified,
    "podFailurePolicy.rules.*.onPodConditions.*.status": one_of("True", "False", "Unknown"),
}
_JOBSET: dict[str, Form] = {
    "metadata.name": forms.label_name_1035,
    "spec.network.subdomain": forms.label_name_1035,
    "spec.replicatedJobs.*.name": forms.label_name_1035,
    "spec.replicatedJobs.*.replicas": whole_number(0),
    "spec.replicatedJobs.*.dependsOn.*.status": one_of("Ready", "Complete"),
    "spec.replicatedJobs.*.template.metadata.labels.@": forms.qualified,
    "spec.replicatedJobs.*.template.metadata.labels.*": forms.label_value,
    "spec.replicatedJobs.*.template.metadata.annotations.@": forms.qualified,
    "spec.failurePolicy.maxRestarts": whole_number(0),
    "spec.failurePolicy.rules.*.name": forms.rule_name,
    "spec.failurePolicy.restartStrategy": one_of("Recreate", "BlockingRecreate", "InPlaceRestart"),
    "spec.failurePolicy.rules.*.action": one_of(
        "FailJobSet",
        "RestartJobSet",
        "RestartJobSetAndIgnoreMaxRestarts",
        "RestartJob",
        "RestartJobAndIgnoreMaxRestarts",
    ),
    "spec.failurePolicy.rules.*.onJobFailureReasons.*": one_of(
        "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"
    ),
    "spec.successPolicy.operator": one_of("All", "Any"),
    "spec.startupPolicy.startupPolicyOrder": one_of("AnyOrder", "InOrder"),
    "spec.ttlSecondsAfterFinished": whole_number(0),
    "spec.coordinator.jobIndex": whole_number(0),
    "spec.coordinator.podIndex": whole_number(0),
}
_PYTORCHJOB: dict[str, Form] = {
    "metadata.name": forms.label_name_1035,
    "spec.pytorchReplicaSpecs.@": one_of("Master", "Worker"),
    "spec.pytorchReplicaSpecs.*.replicas": whole_number(0),
    "spec.pytorchReplicaSpecs.*.restartPolicy": one_of("Always", "OnFailure", "Never", "ExitCode"),
    "spec.runPolicy.cleanPodPolicy": one_of("All", "Running", "None"),
    "spec.runPolicy.backoffLimit": whole_number(0),
    "spec.runPolicy.ttlSecondsAfterFinished": whole_number(0),
    "spec.runPolicy.activeDeadlineSeconds": whole_number(1, 2**63 - 1),
    "spec.runPolicy.schedulingPolicy.minAvailable": whole_number(0),
}
_TRAINJOB: dict[str, Form] = {
    "metadata.name": forms.label_name_1035,
    "spec.runtimeRef.name": forms.subdomain,
    "spec.runtimeRef.kind": one_of("ClusterTrainingRuntime", "TrainingRuntime"),
    "spec.activeDeadlineSeconds": whole_number(1, 2**63 - 1),
    "spec.trainer.image": forms.image,
    "spec.trainer.numNodes": whole_number(1),
    "spec.trainer.numProcPerNode": whole_number(1),
    "spec.trainer.env.*.name": forms.variable_name,
    "spec.trainer.env.*.valueFrom.secretKeyRef.name": forms.subdomain,
    "spec.trainer.env.*.valueFrom.secretKeyRef.key": forms.data_key,
    "spec.runtimePatches.*.trainingRuntimeSpec.template.spec.replicatedJobs.*.name": forms.label_name_1035,
    "spec.trainer.resourcesPerNode.limits.@": forms.qualified,
    "spec.trainer.resourcesPerNode.limits.*": forms.quantity,
    "spec.trainer.resourcesPerNode.requests.@": forms.qualified,
    "spec.trainer.resourcesPerNode.requests.*": forms.quantity,
}
_VOLCANO_EVENTS = one_of(
    "*", "PodPending", "PodRunning", "PodFailed", "PodEvicted", "Unknown", "TaskCompleted", "OutOfSync",
    "CommandIssued", "JobUpdated", "TaskFailed",
)  # fmt: skip
_VOLCANO_ACTIONS = one_of(
    "AbortJob",
    "RestartJob",
    "RestartTask",
    "RestartPod",
    "RestartPartition",
    "TerminateJob",
    "CompleteJob",
    "ResumeJob",
)
_VOLCANO: dict[str, Form] = {
    "spec.minAvailable": whole_number(0),
    "spec.maxRetry": whole_number(0),
    "spec.ttlSecondsAfterFinished": whole_number(0),
    "spec.queue": forms.subdomain,
    "spec.priorityClassName": forms.subdomain,
    "spec.tasks.*.name": forms.label_name,
    "spec.tasks.*.replicas": whole_number(0),
    "spec.tasks.*.minAvailable": whole_number(0),
    "spec.tasks.*.maxRetry": whole_number(0),
    **{
        f"{where}.policies.*.{field}": form
        for where in ("spec", "spec.tasks.*")
        for field, form in (
            ("event", _VOLCANO_EVENTS), ("events.*", _VOLCANO_EVENTS), ("action", _VOLCANO_ACTIONS),
            ("exitCode", whole_number(0, 255)),
        )
    },
}  # fmt: skip
_SERVICE: dict[str, Form] = {
    "metadata.name": forms.label_name_1035,
    "spec.type": one_of("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
    "spec.ports.*.port": whole_number(1, 65535),
    "spec.ports.*.targetPort": whole_number(1, 65535),
    "spec.ports.*.protocol": one_of("TCP", "UDP", "SCTP"),
    "spec.ports.*.name": forms.label_name,
    "spec.selector.@": forms.qualified,
    "spec.selector.*": forms.label_value,
    "spec.sessionAffinity": one_of("None", "ClientIP"),
}
_CONFIG_MAP: dict[str, Form] = {"data.@": forms.data_key, "binaryData.@": forms.data_key}
_KINDS: dict[tuple[str, str], dict[str, Form]] = {
    ("JobSet", "jobset.x-k8s.io"): _JOBSET,
    ("PyTorchJob", "kubeflow.org"): _PYTORCHJOB,
    ("TrainJob", "trainer.kubeflow.org"): _TRAINJOB,
    ("Job", "batch.volcano.sh"): _VOLCANO,
    ("Service", ""): _SERVICE,
    ("ConfigMap", ""): _CONFIG_MAP,
}


def forms_of_fields(manifest: Manifest) -> Iterator[FieldFault]:
    """Find fields whose value does not have the form that Kubernetes requires."""
    for document in manifest.documents:
        yield from _check(document, _METADATA)
    for (kind, group), table in _KINDS.items():
        for document in manifest.of(kind, group):
            yield from _check(document, table)
    for pods in manifest.pods:
        yield from _check(pods.template, _POD)
        for container in pods.containers:
            yield from _check(container, _CONTAINER)
        if pods.is_job:
            yield from _check(pods.maker, _JOB)


def _check(part: DocumentPart, table: dict[str, Form]) -> Iterator[FieldFault]:
    for pattern, form in table.items():
        for path, value in select(part.value, pattern):
            if (text := form(value)) is not None:
                yield FieldFault(part.owner, part.path + path, text)
