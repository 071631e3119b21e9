"""Finds problems of a job that appear only when the job is rendered for Kubernetes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan
from partool.render.job import Job
from partool.render.k8s.environment import environment
from partool.render.k8s.objects import key_variable, workload_metadata
from partool.render.k8s.resources import memory
from partool.spec.patterns import within
from partool.spec.targets.k8s.rules import POD_SCRATCH, POD_STORAGE, quantity, shared_memory
from partool.spec.targets.k8s.section import K8sSpec
from partool.strategies.engines import ENGINES

Rule = Callable[[Job], Iterator[Diagnostic]]

_MOST_PLAN_BYTES = 900_000
"""Maximum bytes of a plan: an object of Kubernetes may have about 1 MiB, including its metadata."""
_MOST_ANNOTATION_BYTES = 256 * 1024
"""Maximum bytes of all annotations of an object together (apimachinery, ValidateAnnotationsSize)."""
_MOST_TRAINJOB_VARIABLES = 128
_PATH = ("launch", "k8s")


def findings(job: Job) -> list[Diagnostic]:
    """Return errors that prevent rendering of a job, and warnings about behaviour that its spec does not suggest."""
    return [finding for rule in _RULES for finding in rule(job)]


def _size(job: Job) -> Iterator[Diagnostic]:
    size = len(job.plan.to_json())
    if size > _MOST_PLAN_BYTES:
        message = f"the plan has {size:,} bytes, and a ConfigMap has room for {_MOST_PLAN_BYTES:,}"
        help = "fix more of `parallel`, which shortens the table of candidates, or use the target slurm"
        yield Diagnostic("PT561", message, help=help)


def _kind(job: Job) -> Iterator[Diagnostic]:
    """Refuse settings of the spec for which the chosen kind of object has no field."""
    launch = job.plan.launch
    default = K8sSpec()
    kind, k8s = launch.k8s.kind, launch.k8s
    lacking: dict[str, list[tuple[tuple[str, ...], bool]]] = {
        "trainjob": [
            (("launch", "restarts"), launch.restarts > 0),
            ((*_PATH, "host_network"), k8s.host_network),
            ((*_PATH, "image_pull_policy"), k8s.image_pull_policy is not None),
            ((*_PATH, "priority"), k8s.priority is not None and k8s.queue is None),
            ((*_PATH, "keep_finished_s"), k8s.keep_finished_s != default.keep_finished_s),
        ],
        "volcano": [((*_PATH, "deadline_s"), k8s.deadline_s is not None)],
    }
    for path, asked in lacking.get(kind, []):
        if asked:
            help = "use kind: jobset, or drop it"
            if kind == "trainjob":
                help += f" and set it in the runtime {k8s.runtime}"
            yield Diagnostic("PT562", f"{path[-1]} has no place in a {kind}", path=path, help=help)
    count = len(environment(job.plan) + key_variable(job))
    if kind == "trainjob" and count > _MOST_TRAINJOB_VARIABLES:
        message = f"a trainjob takes {_MOST_TRAINJOB_VARIABLES} environment variables, and there are {count}"
        yield Diagnostic("PT562", message, path=("launch", "env"), help="use kind: jobset, or set fewer")


def _restarts(job: Job) -> Iterator[Diagnostic]:
    """Warn if the chosen kind of job counts a preemption as a failure."""
    kind, restarts = job.plan.launch.k8s.kind, job.plan.launch.restarts
    texts = {
        ("pytorchjob", False): "a pytorchjob without restarts ends for good when a pod is preempted",
        ("pytorchjob", True): f"a pytorchjob counts preemptions and configuration errors among its {restarts} restarts",
        ("volcano", True): f"a volcano job counts preemptions among its {restarts} restarts",
    }
    text = texts.get((kind, restarts > 0))
    if text is not None:
        path = ("launch", "restarts")
        help = "use kind: jobset, which tells them apart, or set more restarts"
        yield Diagnostic("PT563", text, severity="warning", path=path, help=help)


def _names(job: Job) -> Iterator[Diagnostic]:
    """Refuse names that are valid labels but that Kubernetes does not accept elsewhere."""
    if job.run_id[0].isdigit():
        message = f"{job.run_id} begins with a digit, and names of Services and JobSets begin with a letter (RFC 1035)"
        yield Diagnostic("PT564", message, path=("name",), help=f"set name: run-{job.plan.name}")
    k8s = job.plan.launch.k8s
    rdma = k8s.rdma.resource if k8s.rdma else None
    for field, name in (("device_resource",), k8s.device_resource), (("rdma", "resource"), rdma):
        if name is not None and "/" not in name:
            message = f"{name} is no resource of a device plugin, whose names have a domain"
            yield Diagnostic("PT564", message, path=(*_PATH, *field), help="nvidia.com/gpu and rdma/hca are such names")
    for index, mount in enumerate(job.plan.launch.mounts):
        if ".." in mount.source.split("/"):
            path = ("launch", "mounts", index, "source")
            yield Diagnostic("PT564", f"{mount.source} contains ..", path=path, help="write the path without it")


def _several(job: Job) -> Iterator[Diagnostic]:
    if job.tasks:
        message = f"an array of {len(job.tasks)} tasks is for Slurm: objects of Kubernetes run one plan each"
        yield Diagnostic("PT565", message, help="launch each task by itself, or use the target slurm")
    if job.sizes:
        message = "fewer nodes than planned are for Slurm: JobSets of changing size are behind an alpha gate"
        yield Diagnostic("PT565", message, path=("launch", "min_nodes"), help="drop min_nodes, or use the target slurm")


def _paths(job: Job) -> Iterator[Diagnostic]:
    """Warn of reading from folders that no mount provides (the image may hold them); refuse writing to such folders."""
    targets = [POD_STORAGE, POD_SCRATCH, *(mount.target for mount in job.plan.launch.mounts)]
    help = "add launch: {mounts: [{source: 'pvc:CLAIM', target: /data}]}, and use paths below its target"
    for path, name, writes in _read_and_written(job.plan):
        if not name.startswith("/") or any(within(name, target) for target in targets):
            continue
        if writes and not job.plan.launch.k8s.writable_root:
            message = f"{name} is in none of the mounts: pods can write only to mounts and {POD_SCRATCH}"
            yield Diagnostic("PT566", message, path=path, help=f"{help}; or set launch.k8s.writable_root")
        else:
            message = f"{name} is in none of the mounts: unless it is part of the image, no pod has it"
            yield Diagnostic("PT566", message, severity="warning", path=path, help=help)


def _read_and_written(plan: Plan) -> Iterator[tuple[tuple[str | int, ...], str, bool]]:
    """Yield (field of the spec, path, True if ranks write to the path)."""
    for source in plan.data.every_source:
        yield ("data", "source"), source, False
    for place, table in enumerate(plan.kernels.tuned):
        yield ("kernels", "tuned", place), table, False
    on_disk = "nvme" in (plan.layout.offload.optimizer, plan.layout.offload.parameters)
    named: list[tuple[tuple[str, ...], str | None, bool]] = [
        (("data", "tokenizer"), plan.data.tokenizer, False),
        (("data", "cache"), plan.data.cache, True),
        (("model", "weights", "path"), plan.weights.path, False),
        (("training", "distill", "teacher"), None if plan.teacher is None else plan.teacher.weights.path, False),
        (("checkpoint", "dir"), plan.checkpoint.dir, True),
        (("parallel", "offload", "dir"), plan.layout.offload.dir if on_disk else None, True),
    ]
    yield from ((path, name, writes) for path, name, writes in named if name is not None)


def _script(job: Job) -> Iterator[Diagnostic]:
    """Refuse another training system's script that needs to be told what to run: pods give it no arguments."""
    given = {*job.plan.launch.env, *job.plan.launch.secrets}
    for name in job.program.needs if job.program is not None else ():
        if name not in given:
            message = f"{ENGINES[job.plan.engine].title} starts a script of yours, and the pods do not know which"
            help = f"--set launch.env.{name}=/path/in/the/image/train.py"
            yield Diagnostic("PT828", message, path=("launch", "env"), help=help)


def _annotations(job: Job) -> Iterator[Diagnostic]:
    annotations = workload_metadata(job)["annotations"]
    size = sum(len(key.encode()) + len(value.encode()) for key, value in annotations.items())
    if size > _MOST_ANNOTATION_BYTES:
        message = f"the annotations have {size:,} bytes; an object has room for {_MOST_ANNOTATION_BYTES:,}"
        yield Diagnostic("PT567", message, path=(*_PATH, "annotations"), help="shorten them")


def _room(job: Job) -> Iterator[Diagnostic]:
    """Refuse a memory limit that /dev/shm alone would fill."""
    asked, limit = job.plan.launch.k8s.memory, memory(job.plan)
    shared = shared_memory(job.plan.launch, job.plan.devices)
    if quantity(limit) > quantity(shared):
        return
    if asked is not None:
        message = f"memory: {asked} is no more than the shared memory of {shared}, which counts against it"
        help = f"use more than {shared}, drop it, or set shared_memory"
        yield Diagnostic("PT528", message, path=(*_PATH, "memory"), help=help)
    else:
        message = f"shared_memory: {shared} counts against a pod's memory, which is {limit} at most on these nodes"
        yield Diagnostic("PT528", message, path=(*_PATH, "shared_memory"), help="use less, or drop it")


_RULES: tuple[Rule, ...] = (_room, _several, _size, _kind, _names, _annotations, _restarts, _paths, _script)
