"""Runs, manifests and pods for the tests of the Kubernetes target, written by hand, as rendering has its own tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from k8s_http import serving
from k8s_server import Cluster, now
from launch_helpers import make_plan

from partool.launch.k8s.status import KINDS
from partool.launch.k8s.target import K8sTarget
from partool.launch.store import Run, RunStore
from partool.launch.submit import submit_new
from partool.plan.types import Plan
from partool.render.job import Job, Rendered

SECRET = "s3cret-t0ken"


def plan_of(nodes: int = 2, per_node: int = 2, **k8s: Any) -> Plan:
    """Return a plan for the given number of pods; keywords are fields of ``launch.k8s``."""
    plan = make_plan(nodes * per_node, target="k8s", image="example.com/partool:1", k8s={"kind": "jobset"} | k8s)
    devices = plan.devices.model_copy(update={"nodes": nodes, "per_node": per_node})
    return plan.model_copy(update={"devices": devices})


def job_of(plan: Plan, run: Run) -> Job:
    return Job(plan, run.id, PurePosixPath(run.path))


def manifest(job: Job) -> Rendered:
    """Return a small manifest: the plan, and an object of the given kind around the simplest pod."""
    kind, name = job.plan.launch.k8s.kind, job.run_id
    labels = {"app.kubernetes.io/managed-by": "partool", "partool.dev/run": name}
    meta = {"name": name, "labels": labels, "annotations": {"partool.dev/plan-hash": job.plan.hash}}
    agent = "pytorch" if kind == "pytorchjob" else "node"
    container = {"name": agent, "image": job.plan.launch.image, "env": [{"name": "A", "value": "1"}]}
    pod = {"metadata": {"labels": labels}, "spec": {"restartPolicy": "Never", "containers": [container]}}
    nodes = job.plan.devices.nodes
    batch = {"parallelism": nodes, "completions": nodes, "completionMode": "Indexed", "template": pod}
    replicas = {"replicas": 1, "restartPolicy": "Never", "template": pod}
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"}
    spec = {
        "job": batch,
        "jobset": {"replicatedJobs": [{"name": "node", "template": {"spec": batch}}]},
        "pytorchjob": {"pytorchReplicaSpecs": {"Master": replicas, "Worker": replicas}},
        "trainjob": {"runtimeRef": runtime, "trainer": {"numNodes": nodes, "image": job.plan.launch.image}},
        "volcano": {"minAvailable": nodes, "tasks": [{"name": "node", "replicas": nodes, "template": pod}]},
    }[kind]
    api_version, object_kind = KINDS[kind]
    config_meta = {"name": f"{name}-plan", "labels": labels}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": config_meta, "data": {"plan.json": "{}\n"}}
    documents = [config, {"apiVersion": api_version, "kind": object_kind, "metadata": meta, "spec": spec}]
    text = yaml.safe_dump_all(documents, sort_keys=False)
    return Rendered("manifest.yaml", {"manifest.yaml": text, "plan.json": job.plan.to_json()})


class Case:
    """A served cluster, with its own target and store of runs."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.store = RunStore(folder / "home")
        self.target = K8sTarget()

    def submit(self, plan: Plan | None = None) -> Run:
        """Submit a plan as a new run."""
        plan = plan or plan_of()
        run = self.store.next_submitted(plan.name, plan.hash)
        job = job_of(plan, run)
        return submit_new(self.target, job, manifest(job), None)

    def pod(self, run: Run, node: int = 0, *, attempt: int = 0, state: str = "running", **status: Any) -> str:
        """Create a pod of a run; keywords are fields of its status. Returns its name."""
        name = f"{run.id}-node-0-{node}-{attempt}"
        labels = {"partool.dev/run": run.id, "batch.kubernetes.io/job-completion-index": str(node)}
        labels["jobset.sigs.k8s.io/restart-attempt"] = str(attempt)
        phase = {"running": "Running", "waiting": "Pending"}.get(state, "Failed")
        container: dict[str, Any] = {"name": "node", "restartCount": 0, "state": {state: {}}}
        known = {"phase": phase, "startTime": now(), "containerStatuses": [container]} | status
        meta = {"name": name, "labels": labels}
        spec = {"containers": [{"name": "node", "image": "i"}]}
        self.cluster.put({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": known})
        return name

    def end_pod(self, name: str, code: int, message: str = "", reason: str = "Error", at: str = "") -> None:
        """End the agent of a pod, and with it its log."""
        ended = {"exitCode": code, "message": message, "reason": reason, "finishedAt": at or now()}
        container = {"name": "node", "restartCount": 0, "state": {"terminated": ended}}
        with self.cluster.changed:
            log = self.cluster.logs.get((name, "node", False))
            if log is not None:
                log.ended = True
            phase = "Failed" if code else "Succeeded"
            self.cluster.set_status("pods", name, phase=phase, containerStatuses=[container])


@contextmanager
def case(folder: Path, **options: Any) -> Iterator[Case]:
    """Serve a cluster and point KUBECONFIG and PARTOOL_HOME at it."""
    cluster = Cluster(**options)
    cluster.token = SECRET
    before = {name: os.environ.get(name) for name in ("KUBECONFIG", "PARTOOL_HOME")}
    with serving(cluster) as url:
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig(folder / "kubeconfig", url))
        os.environ["PARTOOL_HOME"] = str(folder / "home")
        try:
            yield Case(cluster, folder)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def condition(kind: str, reason: str = "", message: str = "", at: str = "") -> dict[str, Any]:
    """Return a condition with status True."""
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": at or now()}
