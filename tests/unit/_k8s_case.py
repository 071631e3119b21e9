"""Jobs for the tests of Kubernetes objects, and access to parts of the rendered manifest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml
from _launch_case import launch_job, launch_plan

from partool.plan.types import Plan, Variable
from partool.render.job import Job
from partool.render.k8s import KINDS, render

IMAGE = "registry.example.com/team/partool:1.0"
ACCELERATORS = {"nvidia": ("h100-sxm", "cuda", 8), "amd": ("mi300x", "rocm", 8), "gh200": ("gh200-96", "cuda", 4),
                "cpu": ("cpu", "cpu", 2)}  # fmt: skip
"""Name in the golden files → catalog name, backend, devices per node."""
EVERY_KIND = sorted(KINDS)


def k8s_plan(kind: str = "jobset", nodes: int = 2, machine: str = "nvidia", **launch: Any) -> Plan:
    """Return a plan for Kubernetes; ``k8s`` among the keywords holds fields of that section."""
    accelerator, backend, per_node = ACCELERATORS[machine]
    section = {"kind": kind, "storage": "pvc:runs"} | launch.pop("k8s", {})
    return launch_plan(nodes, per_node, accelerator, backend, **{"target": "k8s", "image": IMAGE} | launch, k8s=section)


def k8s_job(kind: str = "jobset", nodes: int = 2, machine: str = "nvidia", **launch: Any) -> Job:
    """Return the job of such a plan."""
    return launch_job(k8s_plan(kind, nodes, machine, **launch))


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def documents(job: Job) -> list[dict[str, Any]]:
    """Return the documents of a job's rendered manifest, parsed."""
    return read(render(job).text)


def read(text: str) -> list[dict[str, Any]]:
    """Return the documents of a manifest."""
    return list(yaml.load_all(text, _LOADER))


def workload(job: Job) -> dict[str, Any]:
    """Return the object that runs the pods."""
    return documents(job)[-1]


def pods(job: Job) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each pod template with its number of pods; the parts of a TrainJob's template are merged."""
    yield from templates(job.plan.launch.k8s.kind, workload(job))


def templates(kind: str, item: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each pod template of a parsed object with its number of pods."""
    spec = item["spec"]
    match kind:
        case "jobset":
            inner = spec["replicatedJobs"][0]["template"]["spec"]
            yield inner["parallelism"] * spec["replicatedJobs"][0]["replicas"], inner["template"]
        case "job":
            yield spec["parallelism"], spec["template"]
        case "pytorchjob":
            for replicas in spec["pytorchReplicaSpecs"].values():
                yield replicas["replicas"], replicas["template"]
        case "volcano":
            yield spec["tasks"][0]["replicas"], spec["tasks"][0]["template"]
        case "trainjob":
            patch = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"][0]
            template = patch["template"]["spec"]["template"]
            trainer = {key: value for key, value in spec["trainer"].items() if not key.startswith("num")}
            trainer["resources"] = trainer.pop("resourcesPerNode")
            template["spec"]["containers"][0] |= trainer
            yield spec["trainer"]["numNodes"], template


def containers(job: Job) -> list[dict[str, Any]]:
    """Return the agent's container of each template."""
    return [template["spec"]["containers"][0] for _, template in pods(job)]


def expanded(text: str, variables: dict[str, str]) -> str:
    """Return a command's word or a variable's value after Kubernetes' expansion, by its documented rules.

    ``$(NAME)`` becomes the value where there is one, and ``$$`` becomes ``$``.
    """
    found, index = "", 0
    while index < len(text):
        if text[index] != "$" or index + 1 == len(text):
            found += text[index]
            index += 1
        elif text[index + 1] == "$":
            found += "$"
            index += 2
        elif text[index + 1] == "(" and ")" in text[index + 2 :]:
            end = text.index(")", index + 2)
            name = text[index + 2 : end]
            found += variables.get(name, f"$({name})")
            index = end + 1
        else:
            # Kubernetes copies the next byte as a character here, so rendered text must never reach this case.
            raise AssertionError(f"a lone $ in {text!r}")
    return found


def an_environment() -> tuple[Variable, ...]:
    """Return variables as the planner puts them into a plan."""
    return (
        Variable(name="NCCL_SOCKET_IFNAME", value="eth0", origin="network preset tcp (https://example.com, 2026-11)"),
        Variable(name="OMP_NUM_THREADS", value="4", origin="partool: the ranks share the node's cores"),
    )
