"""Rules about clusters (PT560) and Kubernetes jobs (PT561 to PT579)."""

from __future__ import annotations

from partool.diagnostics.record import Rule, command_rule

RULES: tuple[Rule, ...] = (
    command_rule(
        "PT560",
        "The cluster lacks what the plan needs, or does not allow it",
        "Not every scheduler refuses a job that can never start: one beyond its partition's limits may wait for ever.",
        "partool launch mine.yaml --target slurm --dry-run --set launch.slurm.time=30-00:00:00   # the limit is a day",
        "partool launch mine.yaml --target slurm --dry-run --set launch.slurm.time=1-00:00:00",
    ),
    command_rule(
        "PT561",
        "The plan is too large for a ConfigMap",
        "The plan is sent to the cluster as a Kubernetes object, which may take at most 1 MiB in all.",
        "partool launch --target k8s large.yaml   # a plan of 900 kB or more",
        "partool launch --target slurm large.yaml",
    ),
    command_rule(
        "PT562",
        "This kind of object has no field for a setting",
        "A TrainJob leaves much to its runtime, and a Volcano job has no deadline; a setting without a field is "
        "refused.",
        "launch: {k8s: {kind: volcano, deadline_s: 3600}}",
        "launch: {k8s: {kind: jobset, deadline_s: 3600}}",
    ),
    command_rule(
        "PT563",
        "This kind of object counts a preemption as a failure",
        "JobSets and Jobs read the agent's exit code, and restart without limit after a preemption; others count it as "
        "a failure.",
        "launch: {restarts: 1, k8s: {kind: pytorchjob}}",
        "launch: {restarts: 1, k8s: {kind: jobset}}",
    ),
    command_rule(
        "PT564",
        "Kubernetes does not accept the name",
        "Names of Services begin with a letter; names of resources that device plugins offer have a domain.",
        "name: 7b-pretrain\nlaunch: {k8s: {device_resource: gpu}}",
        "name: pretrain-7b\nlaunch: {k8s: {device_resource: nvidia.com/gpu}}",
    ),
    command_rule(
        "PT565",
        "Kubernetes has no job arrays, and no jobs that change size",
        "Each object runs one plan, whose layout is made for its number of nodes.",
        "partool launch --target k8s --array optimizer.lr=1e-4,3e-4 mine.yaml",
        "for lr in 1e-4 3e-4; do partool launch --target k8s --set optimizer.lr=$lr mine.yaml; done",
    ),
    command_rule(
        "PT566",
        "A path is in none of the mounts",
        "Pods see their image and their mounts, and write only to mounts and /tmp; the launcher's folders are neither.",
        "data: {source: /home/me/tokens}   # target k8s, without mounts",
        "data: {source: /data/tokens}\nlaunch: {mounts: [{source: 'pvc:datasets', target: /data}]}",
    ),
    command_rule(
        "PT567",
        "The annotations are too large",
        "All annotations of an object may take 256 KiB together; partool adds the origin of each variable.",
        "launch: {k8s: {annotations: {notes: '... 300 kB ...'}}}",
        "launch: {k8s: {annotations: {notes: 'see the wiki'}}}",
    ),
    command_rule(
        "PT568",
        "A value in a manifest has a form that Kubernetes refuses",
        "The server checks forms of names, labels, quantities and numbers that published schemas leave out.",
        "metadata: {name: My_Run, labels: {team: a b}}",
        "metadata: {name: my-run, labels: {team: a-b}}",
    ),
    command_rule(
        "PT569",
        "A name in a manifest is used twice, or refers to nothing",
        "Volumes, ports, variables and objects are found by name; a pod that waits for a missing one never starts.",
        "volumeMounts: [{name: data, mountPath: /data}]   # and no volume is called data",
        "volumes: [{name: data, emptyDir: {}}]   # and the same mount",
    ),
    command_rule(
        "PT570",
        "A job's fields contradict each other, or split its pods",
        "Controllers refuse some combinations of fields, and pods must start and restart together; no schema says so.",
        "podFailurePolicy: {rules: [...]}   # with restartPolicy: OnFailure",
        "podFailurePolicy: {rules: [...]}   # with restartPolicy: Never",
    ),
    command_rule(
        "PT571",
        "Pods would not run as the plan says",
        "Too short a grace period loses the checkpoint, a shell keeps the stop signal from the agent, a written secret "
        "leaks.",
        "terminationGracePeriodSeconds: 30   # and the agent waits 60 s for a checkpoint",
        "terminationGracePeriodSeconds: 90",
    ),
    command_rule(
        "PT572",
        "A manifest does not fit its schema",
        "Strict schemas of Kubernetes and of the cluster's add-ons find misspelt fields, which would be silently "
        "dropped.",
        "spec: {paralelism: 2}",
        "spec: {parallelism: 2}",
    ),
    command_rule(
        "PT573",
        "The cluster's add-on is of a version that was not tested",
        "TrainJob changed its fields three times within one API version; fields that are gone would have no effect.",
        "partool launch --target k8s --set launch.k8s.kind=trainjob mine.yaml   # Kubeflow Trainer 2.0 on the cluster",
        "partool launch --target k8s --set launch.k8s.kind=jobset mine.yaml",
    ),
    command_rule(
        "PT574",
        "The Kubernetes client is not installed",
        "Rendering needs no client; submitting to a cluster and querying it use the official Python client, an extra.",
        "pip install partool && partool launch --target k8s mine.yaml",
        "pip install 'partool[k8s]' && partool launch --target k8s mine.yaml",
    ),
    command_rule(
        "PT575",
        "The name is taken on the cluster",
        "A run's objects have the run's name; an object of that name which this launch did not make is never touched.",
        "partool launch --target k8s mine.yaml   # somebody else launched the same plan in this namespace",
        "partool launch --target k8s mine.yaml --set name=mine-2",
    ),
    command_rule(
        "PT576",
        "The cluster cannot be reached",
        "The kubeconfig (KUBECONFIG, else ~/.kube/config) says which cluster; failed calls are retried for some "
        "seconds.",
        "KUBECONFIG=old.yaml partool status last",
        "kubectl get --raw /version && partool status last",
    ),
    command_rule(
        "PT577",
        "The cluster does not allow the request",
        "A cluster's roles (RBAC) allow verbs, kinds and namespaces one by one; the message says which is missing.",
        "partool launch --target k8s --set launch.k8s.namespace=other-team mine.yaml",
        "partool doctor --target k8s mine.yaml   # says what is allowed and what is not",
    ),
    command_rule(
        "PT578",
        "The cluster refuses the object",
        "The server's schemas, quotas and admission webhooks decide; unknown fields are refused, never dropped.",
        "partool launch --target k8s mine.yaml",
        "partool launch --target k8s --dry-run mine.yaml   # asks the server, and creates nothing",
    ),
    command_rule(
        "PT579",
        "The cluster does not know this kind of job",
        "JobSet, PyTorchJob, TrainJob and Volcano jobs are add-ons of a cluster; every cluster has Indexed Jobs.",
        "partool launch --target k8s mine.yaml   # no JobSet there",
        "partool launch --target k8s --set launch.k8s.kind=job mine.yaml",
    ),
)
