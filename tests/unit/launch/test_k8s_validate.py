"""partool's own rules of manifests: the findings of each, and none for valid manifests."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from _k8s_case import EVERY_KIND, k8s_job
from _manifest_edits import CRDS, GONE, documents, edited, rendered

from partool.launch.k8s.validate import own_rules, validate_offline
from partool.launch.k8s.validate.forms import parse_quantity
from partool.launch.k8s.validate.manifest import Manifest
from partool.launch.k8s.validate.reading import manifest_of
from partool.render.render import render

CODES = {f"{rule.__module__.rpartition('.')[2]}.{rule.__name__}": (code, rule) for code, rule in own_rules.RULES}


class Case(NamedTuple):
    """A rule, a manifest that breaks it, and the finding's place and text."""

    rule: str
    kind: str
    edits: tuple[tuple[str, Any], ...]
    says: str


def case(rule: str, kind: str, *edits: tuple[str, Any], says: str) -> Case:
    return Case(rule, kind, edits, says)


SECRET = {"name": "API_TOKEN", "value": "hunter2hunter2"}
CASES = [
    case("reference_rules.identities", "job", ("kind", GONE), says="kind: is missing"),
    case("reference_rules.identities", "job", ("apiVersion", GONE), says="apiVersion: is missing"),
    case("reference_rules.identities", "jobset", ("metadata.name", GONE), says="metadata.name: is missing"),
    case("reference_rules.identities", "job", ("map:metadata.namespace", "b"), says="different namespaces: b, ml"),
    case("field_rules.forms_of_fields", "job", ("metadata.name", "My_Run"), says="'My_Run' must be lower-case"),
    case("field_rules.forms_of_fields", "job", ("metadata.labels.team", "a b"),
         says="metadata.labels.team: 'a b' must"),
    case("field_rules.forms_of_fields", "job", ("metadata.labels.a b", "c"), says="must be NAME or DOMAIN/NAME"),
    case("field_rules.forms_of_fields", "job", ("job:completions", -1), says="spec.completions: -1 must be at least 0"),
    case("field_rules.forms_of_fields", "job", ("job:parallelism", 2**31), says="must be at most 2147483647"),
    case("field_rules.forms_of_fields", "job", ("pod:spec.restartPolicy", "never"), says="'never' is none of"),
    case("field_rules.forms_of_fields", "job", ("main:resources.limits.memory", "64 GB"), says="a number with a unit"),
    case("field_rules.forms_of_fields", "job", ("main:resources.limits.cpu", "-1"), says="must not be negative"),
    case("field_rules.forms_of_fields", "job", ("main:ports.0.containerPort", 0), says="0 must be at least 1"),
    case("field_rules.forms_of_fields", "job", ("main:ports.0.name", "a-very-long-port-name"), says="at most 15"),
    case("field_rules.forms_of_fields", "job", ("main:env.0.name", "1ST"), says="no digit first"),
    case("field_rules.forms_of_fields", "job", ("main:image", "my image"), says="without blanks"),
    case("field_rules.forms_of_fields", "job", ("pod:spec.volumes.0.configMap.defaultMode", 512), says="at most 511"),
    case("field_rules.forms_of_fields", "job", ("service:spec.ports.0.port", 70000), says="at most 65535"),
    case("field_rules.forms_of_fields", "job", ("map:data.a/b", "c"), says="'a/b' must be letters"),
    case("field_rules.forms_of_fields", "jobset", ("metadata.name", "1st"), says="beginning with a letter"),
    case("field_rules.forms_of_fields", "jobset", ("spec.failurePolicy.rules.0.action", "Fail"), says="is none of"),
    case("field_rules.forms_of_fields", "pytorchjob", ("spec.runPolicy.cleanPodPolicy", "Some"), says="is none of"),
    case("field_rules.forms_of_fields", "trainjob", ("spec.trainer.numNodes", 0), says="0 must be at least 1"),
    case("field_rules.forms_of_fields", "volcano", ("spec.policies.0.action", "Restart"), says="is none of"),
    case("job_rules.pod_names", "job", ("metadata.name", "a" * 56), says="-1-xxxxx: 64 characters, at most 63"),
    case("job_rules.pod_names", "jobset", ("metadata.name", "a" * 49), says="-node-0-1-xxxxx: 64 characters"),
    case("job_rules.pod_names", "pytorchjob", ("metadata.name", "a" * 55), says="-worker-0: 64 characters"),
    case("job_rules.pod_names", "trainjob", ("metadata.name", "a" * 49), says="-node-0-1-xxxxx: 64 characters"),
    case("job_rules.pod_names", "volcano", ("metadata.name", "a" * 57), says="-node-1: 64 characters"),
    case("pod_rules.missing_parts", "job", ("pod:spec.containers", []), says="there must be at least one"),
    case("pod_rules.missing_parts", "job", ("main:image", GONE), says="containers[0].image: is missing"),
    case("pod_rules.missing_parts", "job", ("main:volumeMounts.0.mountPath", GONE), says="mountPath: is missing"),
    case("pod_rules.missing_parts", "job", ("pod:spec.imagePullSecrets.0.name", GONE), says="name: is missing"),
    case("pod_rules.annotation_sizes", "job", ("metadata.annotations.a", "x" * 2**18), says="at most 262144"),
    case("reference_rules.config_map_sizes", "job", ("map:data.more", "x" * 2**20), says="at most 1048576"),
    case("reference_rules.config_map_sizes", "job", ("map:binaryData", {"plan.json": "e30="}), says="is in data"),
    case("reference_rules.duplicates", "job", ("main:env.1.name", "HOME"), says="variable 'HOME' is already used"),
    case("reference_rules.duplicates", "job", ("main:volumeMounts.1.mountPath", "/etc/partool"), says="mount path"),
    case("reference_rules.duplicates", "job", ("pod:spec.volumes.1.name", "plan"), says="the volume 'plan'"),
    case("reference_rules.duplicates", "job", ("main:ports.1", {"containerPort": 29500}), says="port '29500/TCP'"),
    case(
        "reference_rules.duplicates", "job", ("pod:spec.initContainers", [{"name": "node", "image": "a"}]),
        says="initContainers[0].name: the container 'node'",
    ),
    case("reference_rules.objects_once", "job", ("service:metadata.name", "llama-12345678"),
         ("service:kind", "Job"), ("service:apiVersion", "batch/v1"), says="kind and name of an earlier object"),
    case("reference_rules.mounts", "job", ("main:volumeMounts.0.name", "plans"), says="has no volume 'plans'"),
    case("reference_rules.mounts", "job", ("main:volumeMounts.3.subPath", "../x"), says="without .."),
    case("reference_rules.mounts", "job", ("pod:spec.volumes.0.emptyDir", {}), says="must have one source"),
    case("reference_rules.mounts", "job", ("pod:spec.volumes.5", {"name": "x", "emptyDir": {}}), says="no container"),
    case("reference_rules.variable_sources", "job", ("main:env.4.value", "x"), says="has a value and a source"),
    case("reference_rules.variable_sources", "job", ("main:env.4.valueFrom", {}), says="must have one source"),
    case("reference_rules.variable_sources", "trainjob",
         ("spec.trainer.env.4.valueFrom.secretKeyRef.key", GONE), says="secretKeyRef.key: is missing"),
    case("reference_rules.config_maps", "job", ("map:metadata.name", "other"),
         says="has no ConfigMap 'llama-12345678-"),
    case("reference_rules.config_maps", "job",
         ("pod:spec.volumes.0.configMap.items", [{"key": "x", "path": "x"}]), says="has no key 'x'"),
    case("reference_rules.services", "job", ("service:spec.clusterIP", GONE), says='must be "None"'),
    case("reference_rules.services", "job", ("service:spec.publishNotReadyAddresses", False), says="must be true"),
    case("reference_rules.services", "job", ("service:spec.selector", {"app": "x"}), says="does not select the pods"),
    case("reference_rules.services", "job", ("pod:spec.subdomain", "other"), says="has no Service 'other'"),
    case("reference_rules.services", "job", ("pod:spec.subdomain", GONE), says="subdomain: is missing"),
    case("job_rules.restart_policies", "job", ("pod:spec.restartPolicy", GONE), says="Always, the default, is not for"),
    case("job_rules.restart_policies", "job", ("pod:spec.restartPolicy", "OnFailure"), says="needs Never, not OnFail"),
    case("job_rules.restart_policies", "jobset", ("pod:spec.restartPolicy", GONE), says="not OnFailure, the default,"),
    case("job_rules.per_index", "job", ("job:completionMode", GONE), says="needs completionMode: Indexed"),
    case("job_rules.per_index", "job", ("job:backoffLimitPerIndex", GONE), says="needs backoffLimitPerIndex"),
    case("job_rules.per_index", "job", ("job:maxFailedIndexes", 3), says="is above completions"),
    case("job_rules.gangs", "job", ("job:parallelism", 1), says="1 pods at a time of 2"),
    case("job_rules.gangs", "job", ("job:completionMode", "NonIndexed"), says="must be Indexed"),
    case("job_rules.gangs", "job", ("job:maxFailedIndexes", 1), says="must be 0"),
    case("job_rules.gangs", "jobset", ("job:backoffLimit", 6), says="must be 0 in a JobSet"),
    case("job_rules.gangs", "jobset", ("job:backoffLimit", GONE), says="must be 0 in a JobSet"),
    case("job_rules.selectors", "job", ("job:selector", {"matchLabels": {}}), says="made by the Job controller"),
    case("job_rules.failure_policies", "job", ("job:podReplacementPolicy", "TerminatingOrFailed"),
         says="must be Failed"),
    case("job_rules.failure_policies", "job", ("job:podFailurePolicy.rules.0.onExitCodes.values", [78, 75]),
         says="ascending order"),
    case("job_rules.failure_policies", "job", ("job:podFailurePolicy.rules.0.onExitCodes.values", [0]),
         says="0 is no failure"),
    case("job_rules.failure_policies", "job", ("job:podFailurePolicy.rules.0.onExitCodes.values", []),
         says="at least one"),
    case("job_rules.failure_policies", "job", ("job:podFailurePolicy.rules.0.onExitCodes.containerName", "x"),
         says="no container 'x'"),
    case("job_rules.failure_policies", "job", ("job:podFailurePolicy.rules.0.onPodConditions", []), says="either"),
    case("job_rules.failure_policies", "job", ("job:podFailurePolicy.rules.2.action", "FailJob"),
         says="a disruption must Ignore in a Job, not FailJob"),
    case("job_rules.failure_policies", "jobset", ("job:podFailurePolicy.rules.2.action", "Ignore"),
         says="a disruption must FailJob in a JobSet, not Ignore"),
    case("job_rules.failure_policies", "jobset", ("job:podFailurePolicy.rules.0.action", "FailIndex"),
         says="FailIndex needs backoffLimitPerIndex"),
    case("job_rules.failure_policies", "job",
         ("job:podFailurePolicy.rules", [{"action": "Count", "onPodConditions": [{"type": "X"}]}] * 21),
         says="at most 20"),
    case("kind_rules.jobset_order", "jobset",
         ("spec.replicatedJobs.0.dependsOn", [{"name": "x", "status": "Ready"}]), says="has none before it"),
    case("kind_rules.jobset_order", "jobset",
         ("spec.replicatedJobs.1", {"name": "b", "dependsOn": [{"name": "c", "status": "Ready"}], "template": {}}),
         says="no replicated job 'c'"),
    case("kind_rules.jobset_order", "jobset",
         ("spec.replicatedJobs.1", {"name": "b", "dependsOn": [{"name": "node", "status": "Ready"}], "template": {}}),
         ("spec.startupPolicy", {"startupPolicyOrder": "InOrder"}), says="cannot go with startupPolicy InOrder"),
    case("kind_rules.jobset_order", "jobset", ("spec.coordinator", {"replicatedJob": "x"}),
         says="no replicated job 'x'"),
    case("kind_rules.jobset_order", "jobset",
         ("spec.successPolicy", {"operator": "All", "targetReplicatedJobs": ["x"]}), says="no replicated job 'x'"),
    case("kind_rules.jobset_order", "jobset", ("spec.network.publishNotReadyAddresses", False), says="must be true"),
    case("kind_rules.jobset_failures", "jobset", ("spec.failurePolicy.restartStrategy", "InPlaceRestart"),
         says="is off"),
    case("kind_rules.jobset_failures", "jobset", ("spec.failurePolicy.rules.0.action", "RestartJob"), says="is off"),
    case("kind_rules.jobset_failures", "jobset", ("spec.failurePolicy.rules", []), says="without it counting"),
    case("kind_rules.pytorchjobs", "pytorchjob", ("spec.pytorchReplicaSpecs.Master", GONE), says="lacks Master"),
    case("kind_rules.pytorchjobs", "pytorchjob", ("spec.pytorchReplicaSpecs.Master.replicas", 2), says="must be 1"),
    case("kind_rules.pytorchjobs", "pytorchjob", ("spec.nprocPerNode", 8), says='must be a text: "8"'),
    case("kind_rules.pytorchjobs", "pytorchjob", ("main:name", "node"), says="one must be named pytorch"),
    case("kind_rules.trainjobs", "trainjob", ("spec.trainer.env.0.name", "PET_NNODES"),
         says="PET_NNODES is set by the"),
    case("kind_rules.trainjobs", "trainjob", ("spec.runtimeRef", {}), says="runtimeRef.name: is missing"),
    case("kind_rules.volcano_jobs", "volcano", ("spec.minAvailable", 1), says="1 of 2 pods"),
    case("kind_rules.volcano_jobs", "volcano", ("spec.schedulerName", "default-scheduler"), says="must be volcano"),
    case("kind_rules.volcano_jobs", "volcano", ("spec.policies.0.event", "PodFailed"), says="either events or"),
    case("kind_rules.volcano_jobs", "volcano", ("spec.policies.0.exitCode", 0), says="0 is no failure"),
    case("kind_rules.volcano_jobs", "volcano", ("spec.policies.0.action", GONE), says="action: is missing"),
    case("kind_rules.kueue", "jobset", ("metadata.labels.kueue|x-k8s|io/queue-name", GONE),
         ("pod:metadata.labels.kueue|x-k8s|io/queue-name", "q"), says="on the pods, and not on the object"),
    case("kind_rules.kueue", "jobset", ("metadata.annotations.kueue|x-k8s|io/podset-required-topology", "a/b"),
         says="on the pod template only"),
    case("kind_rules.kueue", "jobset", ("main:resources", GONE), says="there are none"),
    case("pod_rules.requests_and_limits", "job", ("main:resources.requests.cpu", "500"), says="500 is above the limit"),
    case("pod_rules.requests_and_limits", "job", ("main:resources.requests.nvidia|com/gpu", "4"),
         says="4 must equal the limit 8"),
    case("pod_rules.requests_and_limits", "job", ("main:resources.requests.amd|com/gpu", "4"),
         says="must be in limits"),
    case("pod_rules.requests_and_limits", "trainjob", ("spec.trainer.resourcesPerNode.limits.nvidia|com/gpu", "1500m"),
         says="devices are whole"),
    case("pod_rules.requests_and_limits", "job", ("main:resources.limits.gpu", "1"), says="is no resource of"),
    case("pod_rules.shared_memory", "job", ("pod:spec.volumes.1.emptyDir.sizeLimit", "900Gi"),
         says="memory limit 106Gi"),
    case("pod_rules.shared_memory", "job", ("pod:spec.volumes.1.emptyDir.sizeLimit", GONE), says="is missing"),
    case("pod_rules.exec_form", "job", ("main:command", ["sh", "-c", "python train.py"]), says="keep the stop signal"),
    case("pod_rules.exec_form", "job", ("main:command", ["bash", "run.sh"]), says="keep the stop signal"),
    case("pod_rules.exec_form", "trainjob", ("spec.trainer.command", ["/bin/bash", "-lc", "exec a; b"]),
         says="keep the"),
    case("pod_rules.literal_secrets", "job", ("main:env.0", SECRET), says="API_TOKEN looks like a secret"),
    case("pod_rules.literal_secrets", "trainjob", ("spec.trainer.env.0", SECRET), says="API_TOKEN looks like a secret"),
    case("pod_rules.security", "job", ("main:securityContext.runAsUser", 0), says="is root, and runAsNonRoot is true"),
    case("pod_rules.security", "job", ("main:securityContext.privileged", True), says="cannot be false"),
    case("pod_rules.token", "job", ("pod:spec.automountServiceAccountToken", GONE), says="must be false"),
    case("pod_rules.tolerations", "job", ("pod:spec.tolerations.0.value", "x"), says="cannot go with operator Exists"),
    case("pod_rules.tolerations", "job", ("pod:spec.tolerations.0.tolerationSeconds", 5), says="needs the effect NoEx"),
    case("pod_rules.tolerations", "job", ("pod:spec.tolerations.0", {"effect": "NoSchedule"}), says="must be Exists"),
    case("pod_rules.host_network", "job", ("pod:spec.hostNetwork", True), says="must be ClusterFirstWithHostNet"),
    case("pod_rules.host_network", "job", ("pod:spec.hostNetwork", True), ("main:ports.0.hostPort", 1),
         says="must equal"),
    case("agent_rules.grace", "job", ("pod:spec.terminationGracePeriodSeconds", 60),
         says="60 must be above the agent's 60"),
    case("agent_rules.grace", "jobset", ("pod:spec.terminationGracePeriodSeconds", GONE),
         says="30, the default, must be"),
    case("agent_rules.nodes", "job", ("job:completions", 3), says="3 pods for a plan of 2 nodes"),
    case("agent_rules.nodes", "pytorchjob", ("spec.pytorchReplicaSpecs.Worker.replicas", 2),
         says="3 pods for a plan of 2"),
    case("agent_rules.nodes", "trainjob", ("spec.trainer.numNodes", 4), says="4 pods for a plan of 2"),
    case("agent_rules.nodes", "job", ("main:command.11", "4"), says="--nodes 4 for a plan of 2 nodes"),
    case("agent_rules.devices", "job", ("main:resources.limits.nvidia|com/gpu", "4"), says="4 for 8 ranks on a node"),
    case("agent_rules.devices", "trainjob", ("spec.trainer.resourcesPerNode.limits.nvidia|com/gpu", GONE),
         says="none for 8"),
    case("agent_rules.hashes", "job", ("main:command.9", "0" * 64), says="is not the hash on the objects"),
    case("agent_rules.hashes", "job", ("metadata.annotations.partool|dev/plan-hash", "0" * 64),
         says="different hashes"),
    *(
        case("agent_rules.meeting_place", kind, (f"{where}.15", "localhost:29500"),
             says=f"pod 0 is llama-12345678{host}")
        for kind, where, host in (
            ("job", "main:command", "-0.llama-12345678"),
            ("jobset", "main:command", "-node-0-0.llama-12345678"),
            ("pytorchjob", "main:command", "-master-0"),
            ("trainjob", "spec.trainer.command", "-node-0-0.llama-12345678"),
            ("volcano", "main:command", "-node-0.llama-12345678"),
        )
    ),
    case("agent_rules.variables", "job", ("main:command.13", "$(RANK)"), says="$(RANK) names a variable"),
    case("agent_rules.variables", "pytorchjob", ("main:command.13", "$(JOB_COMPLETION_INDEX)"), says="does not have"),
    case("agent_rules.plans", "job", ("map:data.plan|json", "{"), says="is no JSON object"),
]  # fmt: skip


def says(manifest: Manifest, rule: str | None = None) -> list[str]:
    rules = own_rules.RULES if rule is None else [CODES[rule]]
    return [f"{found.code} {found.message}" for found in own_rules.check(manifest, rules)]


@pytest.mark.parametrize("each", CASES, ids=lambda each: f"{each.rule}-{each.kind}-{each.says[:24]}")
def test_rule(each: Case) -> None:
    assert says(edited(each.kind), each.rule) == []
    found = says(edited(each.kind, *each.edits), each.rule)
    assert any(each.says in text and text.startswith(CODES[each.rule][0]) for text in found), found


def test_every_rule_has_a_case() -> None:
    assert {each.rule for each in CASES} == set(CODES)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_choices_of_the_user_are_no_faults(kind: str) -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"k8s": {"host_network": True, "user": 0, "storage": "pvc:a"}},
        {"k8s": {"cpu": "1500m", "memory": "2Ti", "shared_memory": "1Gi", "keep_finished_s": 0}},
        {"k8s": {"device_resource": "example.com/gpu", "node_selector": {"a/b": "c"}, "queue": "q"}},
        {
            "env": {"A": "$(B) $$(C) $", "SECRET_FILE": "/run/x"},
            "python": "/opt/a$(b)/python",
            "shutdown_timeout_s": 3600,
        },
        {
            "k8s": {"tolerations": [{"key": "a"}, {"key": "b", "value": "c"}], "labels": {"a.b/c": ""}},
            "restarts": 10**6,
        },
    ]
    for nodes in (1, 3):
        for fields in choices:
            if kind == "trainjob" and fields.get("k8s", {}).get("host_network"):
                continue  # refused: a TrainJob has no such field
            text = render("k8s", k8s_job(kind, nodes, **fields)).text
            levels = validate_offline(text, crds=CRDS if CRDS.is_dir() else None)
            found = [d.message for level in levels for d in level.findings]
            assert found == [], fields


def test_findings_name_the_object_and_the_field() -> None:
    found = says(edited("jobset", ("main:env.0.name", "a b")))
    place = "spec.replicatedJobs[0].template.spec.template.spec.containers[0].env[0].name"
    assert found == [f"PT568 JobSet/llama-12345678: {place}: 'a b' must be letters, digits, -, _, dots, no digit first,"
                     " at most 1024 characters"]  # fmt: skip
    assert 'metadata.labels["a b"]' in says(edited("job", ("metadata.labels.a b", "c")))[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the manifest is empty"),
        ("- a\n- b\n", "document 0 of the manifest is no mapping"),
        ("a: [1\n", "the manifest is not YAML"),
        ("kind: Job\nspec: {a: 1, b: {c: 1, c: 2}}\n", "the key 'c' stands twice"),
        ("a: !!python/name:os.system x\n", "the manifest is not YAML"),
    ],
)
def test_unreadable(text: str, message: str) -> None:
    (level,) = validate_offline(text)
    assert level.ran
    assert [d.code for d in level.findings] == ["PT568"]
    assert message in level.findings[0].message


def test_a_manifest_of_something_else_is_no_error_of_the_program() -> None:
    odd: list[dict[str, Any]] = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": None, "spec": None},
        {"apiVersion": 3, "kind": ["Job"], "metadata": {"name": 3, "labels": []}, "spec": {"template": {"spec": 1}}},
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "spec": {"replicatedJobs": [None, 3, {"name": []}]},
        },
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "spec": {"pytorchReplicaSpecs": {1: {"replicas": "x"}}},
        },
        {"apiVersion": "v1", "kind": "ConfigMap", "data": {"plan.json": 3}},
    ]
    for document in odd:
        assert says(manifest_of([document]))


def test_secret_values_are_not_repeated() -> None:
    assert "hunter2" not in "".join(says(edited("job", ("main:env.0", SECRET))))


@pytest.mark.parametrize(
    ("text", "number"),
    [("64Gi", 64 * 2**30), ("1500m", 1.5), ("8", 8), (8, 8), ("1e3", 1000),
     ("5E", 5 * 10**18), (".5", 0.5), ("+1k", 1000),
     ("1 Gi", None), ("Gi", None), ("1KiB", None), ("", None), (True, None), (None, None), ("1e", None)],
)  # fmt: skip
def test_quantities(text: Any, number: float | None) -> None:
    assert parse_quantity(text) == number


def test_rules_need_no_package() -> None:
    """The rules and the parser import only partool's own dependencies."""
    import subprocess
    import sys

    code = (
        "import sys\n"
        "for name in ('kubernetes', 'kubernetes_validate', 'jsonschema', 'celpy'): sys.modules[name] = None\n"
        "from partool.launch.k8s.validate import validate_offline\n"
        "levels = validate_offline(sys.stdin.read())\n"
        "print([(level.ran, len(level.findings)) for level in levels], levels[1].note)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=rendered("jobset"), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith("[(True, 0), (False, 0), (False, 0), (False, 0)] not installed: pip install kub")


def test_documents_are_copies() -> None:
    documents("job")[0]["kind"] = "x"
    assert documents("job")[0]["kind"] == "ConfigMap"
