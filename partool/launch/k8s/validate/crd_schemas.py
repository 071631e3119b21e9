"""Checks of add-on objects against the cluster's definitions (CRDs); unknown fields are errors."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partool.launch.k8s.validate.crd_cache import Definition, cached_crds, current_context, definitions
from partool.launch.k8s.validate.findings import FieldFault, at
from partool.launch.k8s.validate.manifest import DocumentPart, Manifest
from partool.launch.k8s.validate.reading import UnreadableError
from partool.launch.k8s.validate.schema_words import in_words
from partool.launch.k8s.validate.structural import doubled, strict, subschema
from partool.launch.target import Level

NAME = "CRD schemas"


@dataclass(frozen=True, slots=True)
class Shape:
    """Fields that a definition must have for partool's objects to work as intended."""

    tested: str
    needs: dict[str, str | None]
    """Place in the schema → required type; None allows any type."""
    former: dict[str, str]
    """Place in the schema that exists only in another version of the add-on → name of that version."""


SHAPES = {
    ("trainer.kubeflow.org", "TrainJob"): Shape(
        "Kubeflow Trainer 2.3",
        {
            "spec.runtimePatches.*.trainingRuntimeSpec.template.spec.replicatedJobs": "array",
            "spec.trainer.numProcPerNode": "integer",
            "spec.trainer.resourcesPerNode": "object",
            "spec.runtimeRef.name": "string",
        },
        {"spec.podSpecOverrides": "Trainer 2.0", "spec.podTemplateOverrides": "Trainer 2.1"},
    ),
    ("jobset.x-k8s.io", "JobSet"): Shape(
        "JobSet 0.12",
        {
            "spec.failurePolicy.rules.*.onJobFailureReasons": "array",
            "spec.failurePolicy.rules.*.onJobFailureMessagePatterns": "array",
            "spec.failurePolicy.restartStrategy": "string",
            "spec.replicatedJobs.*.template.spec": "object",
        },
        {},
    ),
}
"""Add-ons whose definition has changed within one version of their API."""


@dataclass(frozen=True, slots=True)
class CrdSource:
    """Definitions of add-on types, and the origin of the definitions."""

    words: str
    definitions: tuple[Definition, ...]
    problem: str = ""
    """Reason why there are no definitions."""

    def of(self, document: DocumentPart) -> Definition | None:
        """Return the definition of a document's kind and version; None if there is none."""
        wanted = (document.text("kind"), document.text("apiVersion"))
        return next((each for each in self.definitions if (each.kind, each.api_version) == wanted), None)

    def others(self, document: DocumentPart) -> list[str]:
        """Return the names of the versions in which the cluster serves a document's kind."""
        group, kind = _group(document), document.text("kind")
        same = [each for each in self.definitions if each.kind == kind and each.api_version.startswith(f"{group}/")]
        return [each.api_version for each in same if each.served]


def source(crds: Path | None, context: str | None) -> CrdSource:
    """Return the definitions in a folder, or the definitions that ``doctor`` stored for a context's cluster."""
    folder = crds if crds is not None else cached_crds(context)
    if folder is None:
        name = current_context() if context is None else context
        return CrdSource(
            "", (), f"no definitions of the cluster {name}: partool doctor --target k8s stores them, or --crds DIR"
        )
    words = str(folder) if crds is not None else f"definitions of {current_context() if context is None else context}"
    if not folder.is_dir():
        return CrdSource(words, (), f"{folder} is no folder")
    try:
        loaded = definitions(folder)
    except (OSError, UnreadableError) as error:
        return CrdSource(words, (), str(error))
    return CrdSource(words, loaded, "" if loaded else f"{folder} holds no CustomResourceDefinition")


def custom(manifest: Manifest) -> list[DocumentPart]:
    """Return the manifest's objects whose kinds are defined by add-ons."""
    return [each for each in manifest.documents if _is_custom(_group(each))]


def _is_custom(group: str) -> bool:
    """Return True if an API group belongs to an add-on, as every group that ends in ``x-k8s.io`` does."""
    return "." in group and (group.endswith(".x-k8s.io") or not group.endswith(".k8s.io"))


def why_not(manifest: Manifest, crd_source: CrdSource, package: str) -> str | None:
    """Return the reason why no object of an add-on can be checked; None if at least one can."""
    objects = custom(manifest)
    if not objects:
        return "no object of an add-on"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed: pip install 'partool[k8s]'"
    if crd_source.problem:
        return crd_source.problem
    if not any(crd_source.of(each) or crd_source.others(each) for each in objects):
        return f"{crd_source.words}: no definition of {', '.join(each.text('kind') or '?' for each in objects)}"
    return None


def level(manifest: Manifest, crd_source: CrdSource) -> Level:
    """Check objects of add-ons against their definitions."""
    problem = why_not(manifest, crd_source, "jsonschema")
    if problem is not None:
        return Level(NAME, False, problem)
    findings = []
    for document in custom(manifest):
        findings += [each.diagnostic("PT573") for each in _gate(document, crd_source)]
        definition = crd_source.of(document)
        if definition is not None:
            findings += [each.diagnostic("PT572") for each in errors(document, definition)]
    against = [f"{each.api_version} {each.kind}" for each in map(crd_source.of, custom(manifest)) if each is not None]
    return Level(NAME, True, f"{crd_source.words}: {', '.join(against) or 'no version that fits'}", tuple(findings))


def errors(document: DocumentPart, definition: Definition) -> Iterator[FieldFault]:
    """Find the fields of an object that do not satisfy the schema of the object's definition."""
    yield from in_words(_validator(_Held(definition)).iter_errors(document.value), document.owner, ())
    yield from doubled(definition.schema, document.value, document.owner)


def _gate(document: DocumentPart, crd_source: CrdSource) -> Iterator[FieldFault]:
    definition = crd_source.of(document)
    if definition is None or not definition.served:
        others = crd_source.others(document)
        if others:
            text = f"the cluster serves {', '.join(others)}, not {document.text('apiVersion')}"
            yield at(document, "apiVersion", text=text)
        return
    shape = SHAPES.get((_group(document), definition.kind))
    if shape is None:
        return
    lacking = [place for place, kind in shape.needs.items() if not _has(definition, place, kind)]
    if lacking:
        text = f"the cluster's definition is not that of {shape.tested}, which was tested: it lacks "
        text += ", ".join(f"{place} ({shape.needs[place]})" for place in lacking)
        older = [f"{place} ({when})" for place, when in shape.former.items() if _has(definition, place, None)]
        text += f", and has {', '.join(older)}" if older else ""
        yield at(document, "apiVersion", text=text, help="launch: {k8s: {kind: jobset}}, or job, which needs no add-on")


def _has(definition: Definition, place: str, kind: str | None) -> bool:
    sub = subschema(definition.schema, place)
    return sub is not None and kind in (None, sub.get("type"))


class _Held:
    """Cache key for a definition. Keys are compared by the identity of the schema, as each file is read only once."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition

    def __hash__(self) -> int:
        return id(self.definition.schema)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other.definition.schema is self.definition.schema


@functools.lru_cache(maxsize=32)
def _validator(key: _Held) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(strict(key.definition.schema))


def _group(document: DocumentPart) -> str:
    return (document.text("apiVersion") or "").rpartition("/")[0]
