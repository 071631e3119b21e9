"""A rendered manifest as data, with access to the jobs, pods and containers in documents of every kind."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A mapping in a document, at any depth."""

    owner: str
    """Name of the document, ``kind/name``."""
    path: Path
    value: dict[str, Any]

    def get(self, *path: str | int) -> Any:
        """Return the value at a path below this mapping; None if it is missing or of another shape."""
        return dig(self.value, *path)

    def text(self, *path: str | int) -> str | None:
        """Return the text at a path below this mapping; None if there is none."""
        value = self.get(*path)
        return value if isinstance(value, str) else None

    def number(self, *path: str | int) -> int | None:
        """Return the whole number at a path below this mapping; None if there is none."""
        value = self.get(*path)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def part(self, *path: str | int) -> DocumentPart:
        """Return the mapping at a path below this mapping; an empty mapping if there is none."""
        value = self.get(*path)
        return DocumentPart(self.owner, self.path + path, value if isinstance(value, dict) else {})

    def parts(self, *path: str | int) -> list[DocumentPart]:
        """Return the mappings in a list at a path below this mapping."""
        value = self.get(*path)
        items = enumerate(value) if isinstance(value, list) else ()
        return [
            DocumentPart(self.owner, (*self.path, *path, index), item)
            for index, item in items
            if isinstance(item, dict)
        ]


@dataclass(frozen=True, slots=True)
class Pods:
    """Identical pods: their template, and the part of the document that creates them."""

    template: DocumentPart
    maker: DocumentPart
    """The spec of a Job; for a replica or task, the mapping that holds ``template``."""
    kind: str
    """Kind of the document that creates the pods."""
    count: int | None
    """Number of pods; None if the document does not give a number."""
    longest_name: str | None
    """Longest pod name, including the random letters that the pods' controller appends; None if unknown."""
    is_job: bool
    """True if a batch Job creates the pods; the Job is the document itself or belongs to a JobSet."""
    is_patch: bool = False
    """True if the template holds only a TrainJob's additions to its runtime's templates."""

    @property
    def spec(self) -> DocumentPart:
        """Spec of the pods."""
        return self.template.part("spec")

    @property
    def containers(self) -> list[DocumentPart]:
        """All containers, the init containers last."""
        return self.spec.parts("containers") + self.spec.parts("initContainers")


@dataclass(frozen=True)
class Manifest:
    """All documents of a manifest."""

    documents: tuple[DocumentPart, ...]

    @functools.cached_property
    def pods(self) -> list[Pods]:
        """The identical pods of every pod template in the documents."""
        return [pods for document in self.documents for pods in _pods(document)]

    @property
    def jobs(self) -> list[Pods]:
        """The pods that batch Jobs create."""
        return [pods for pods in self.pods if pods.is_job]

    def of(self, kind: str, group: str = "") -> list[DocumentPart]:
        """Return the documents of a kind in an API group."""
        of_kind = [document for document in self.documents if document.get("kind") == kind]
        return [document for document in of_kind if _group(document) == group]


def dig(value: Any, *path: str | int) -> Any:
    """Return the value at ``path`` below ``value``; None if it is missing."""
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def select(value: Any, pattern: str) -> Iterator[tuple[Path, Any]]:
    """Yield (path, value) of each match of a pattern like ``ports.*.containerPort``: ``*`` is any item, ``@`` any key.

    For a pattern that ends in ``@``, the yielded values are the keys of a mapping.
    """
    yield from _select(value, pattern.split("."), ())


def _select(value: Any, steps: list[str], path: Path) -> Iterator[tuple[Path, Any]]:
    if not steps:
        yield path, value
    elif steps[0] == "@" and isinstance(value, dict):
        yield from (((*path, key), key) for key in value)
    elif steps[0] == "*" and isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _select(item, steps[1:], (*path, key))
    elif isinstance(value, dict) and steps[0] in value:
        yield from _select(value[steps[0]], steps[1:], (*path, steps[0]))


def place(path: Path) -> str:
    """Return a path in the usual notation: ``spec.template.spec.containers[0].name``."""
    text = ""
    for key in path:
        if isinstance(key, int):
            text += f"[{key}]"
        elif str(key).replace("-", "").replace("_", "").isalnum():
            text += f".{key}" if text else key
        else:
            text += f'["{key}"]'
    return text or "(the whole object)"


def _group(document: DocumentPart) -> str:
    version = document.text("apiVersion") or ""
    return version.partition("/")[0] if "/" in version else ""


def _pods(document: DocumentPart) -> Iterator[Pods]:
    pods_of = _MAKERS.get((_group(document), str(document.get("kind"))))
    if pods_of is not None:
        yield from pods_of(document, document.text("metadata", "name"))


def _job(document: DocumentPart, name: str | None) -> Iterator[Pods]:
    spec = document.part("spec")
    count = _count(spec)
    longest = None if name is None else f"{name}-{max((count or 1) - 1, 0)}-xxxxx"
    yield Pods(spec.part("template"), spec, "Job", count, longest, True)


def _jobset(document: DocumentPart, name: str | None) -> Iterator[Pods]:
    for replicated in document.parts("spec", "replicatedJobs"):
        spec = replicated.part("template", "spec")
        replicas = 1 if replicated.get("replicas") is None else replicated.number("replicas") or 0
        count, job_name = _count(spec) or 1, replicated.text("name")
        longest = None
        if name is not None and job_name is not None:
            longest = f"{name}-{job_name}-{max(replicas - 1, 0)}-{max(count - 1, 0)}-xxxxx"
        yield Pods(spec.part("template"), spec, "JobSet", replicas * count, longest, True)


def _pytorchjob(document: DocumentPart, name: str | None) -> Iterator[Pods]:
    replicas = document.get("spec", "pytorchReplicaSpecs")
    for role in replicas if isinstance(replicas, dict) else ():
        maker = document.part("spec", "pytorchReplicaSpecs", role)
        count = 1 if maker.get("replicas") is None else maker.number("replicas")
        longest = None if name is None else f"{name}-{str(role).lower()}-{max((count or 1) - 1, 0)}"
        yield Pods(maker.part("template"), maker, "PyTorchJob", count, longest, False)


def _volcano(document: DocumentPart, name: str | None) -> Iterator[Pods]:
    for task in document.parts("spec", "tasks"):
        count, task_name = task.number("replicas"), task.text("name")
        longest = None if name is None or task_name is None else f"{name}-{task_name}-{max((count or 1) - 1, 0)}"
        yield Pods(task.part("template"), task, "Volcano Job", count, longest, False)


def _trainjob(document: DocumentPart, name: str | None) -> Iterator[Pods]:
    count = document.number("spec", "trainer", "numNodes")
    for patch in document.parts("spec", "runtimePatches"):
        for replicated in patch.parts("trainingRuntimeSpec", "template", "spec", "replicatedJobs"):
            longest = None if name is None else f"{name}-{replicated.text('name')}-0-{max((count or 1) - 1, 0)}-xxxxx"
            spec = replicated.part("template", "spec")
            yield Pods(spec.part("template"), spec, "TrainJob", count, longest, False, is_patch=True)


def _count(spec: DocumentPart) -> int | None:
    completions = spec.number("completions")
    return spec.number("parallelism") if completions is None else completions


_MAKERS = {
    ("batch", "Job"): _job,
    ("jobset.x-k8s.io", "JobSet"): _jobset,
    ("kubeflow.org", "PyTorchJob"): _pytorchjob,
    ("batch.volcano.sh", "Job"): _volcano,
    ("trainer.kubeflow.org", "TrainJob"): _trainjob,
}
