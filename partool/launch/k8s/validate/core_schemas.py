"""Checks of built-in kinds of Kubernetes against the strict schemas in the package ``kubernetes-validate``.

The schemas refuse unknown fields, and thus find misspelt fields; they check little more than the types of values.
Templates of pods and Jobs inside add-ons' objects are checked too, because the definitions of add-ons may be missing or
may not describe these templates.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from partool.launch.k8s.validate.findings import FieldFault
from partool.launch.k8s.validate.manifest import DocumentPart, Manifest, Path
from partool.launch.k8s.validate.schema_words import in_words
from partool.launch.target import Level

NAME = "core schemas"
_INSTALL = "not installed: pip install kubernetes-validate"
_POD_TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
_DOCUMENTS = {
    ("v1", "ConfigMap"): "io.k8s.api.core.v1.ConfigMap",
    ("v1", "Service"): "io.k8s.api.core.v1.Service",
    ("v1", "Pod"): "io.k8s.api.core.v1.Pod",
    ("v1", "Secret"): "io.k8s.api.core.v1.Secret",
    ("v1", "PersistentVolumeClaim"): "io.k8s.api.core.v1.PersistentVolumeClaim",
    ("networking.k8s.io/v1", "NetworkPolicy"): "io.k8s.api.networking.v1.NetworkPolicy",
    ("batch/v1", "Job"): "io.k8s.api.batch.v1.Job",
}
"""(apiVersion, kind) of a document → name of its schema."""
_GROUPS = ("batch/", "apps/", "policy/", "networking.k8s.io/", "scheduling.k8s.io/", "rbac.authorization.k8s.io/")


class NoSuchVersionError(ValueError):
    """The package has no schemas of the requested version; the message lists the versions that it has."""


def level(manifest: Manifest, version: str | None) -> Level:
    """Check a manifest with the schemas of Kubernetes ``version``, such as ``1.34``; None selects the newest."""
    if importlib.util.find_spec("kubernetes_validate") is None:
        return Level(NAME, False, _INSTALL)
    try:
        chosen = _version(version)
    except NoSuchVersionError as error:
        return Level(NAME, False, str(error))
    faults: list[FieldFault] = []
    checked = 0
    for owner, path, value, schema in _targets(manifest):
        checked += 1
        faults += in_words(_validator(chosen, schema).iter_errors(value), owner, path)
    major, minor = _number(chosen)
    note = f"Kubernetes {major}.{minor}, {checked} objects and templates"
    if version is not None and _number(version) != (major, minor):
        note += f"; there are no schemas of {version} yet"
    if left_out := [each.owner for each in manifest.documents if _unknown_core(each)]:
        note += f"; without a schema: {', '.join(left_out)}"
    return Level(NAME, True, note, tuple(each.diagnostic("PT572") for each in faults))


def _targets(manifest: Manifest) -> Iterator[tuple[str, Path, Any, str]]:
    """Yield (owner, path, value, schema's name) for each value with a known schema."""
    for document in manifest.documents:
        schema = _schema_of(document)
        if schema is not None:
            yield document.owner, document.path, document.value, schema
    for pods in manifest.pods:
        template = pods.template
        if pods.kind == "JobSet":
            job = pods.maker
            spec = {"spec": job.value}
            yield template.owner, job.path[:-1], spec, "io.k8s.api.batch.v1.JobTemplateSpec"
        elif pods.is_patch:
            patched: dict[str, Any] = {"containers": [], **pods.spec.value}
            yield template.owner, pods.spec.path, patched, "io.k8s.api.core.v1.PodSpec"
        elif pods.kind != "Job":
            yield template.owner, template.path, template.value, _POD_TEMPLATE
    for document in manifest.of("TrainJob", "trainer.kubeflow.org"):
        resources = document.part("spec", "trainer", "resourcesPerNode")
        yield document.owner, resources.path, resources.value, "io.k8s.api.core.v1.ResourceRequirements"
        for variable in document.parts("spec", "trainer", "env"):
            yield document.owner, variable.path, variable.value, "io.k8s.api.core.v1.EnvVar"


def _schema_of(document: DocumentPart) -> str | None:
    return _DOCUMENTS.get((document.text("apiVersion") or "", document.text("kind") or ""))


def _unknown_core(document: DocumentPart) -> bool:
    """Return True for a built-in kind of Kubernetes that partool does not render."""
    version = document.text("apiVersion") or ""
    return _schema_of(document) is None and ("/" not in version or version.startswith(_GROUPS))


def _version(wanted: str | None) -> str:
    """Return the package's name for version ``wanted``; if all its versions are earlier, the name of the newest.

    Raises NoSuchVersionError.
    """
    utils: Any = importlib.import_module("kubernetes_validate.utils")
    have = {_number(version): version for version in utils.all_versions()}
    first, last = min(have), max(have)
    if wanted is None or _number(wanted) > last:
        return str(have[last])
    if _number(wanted) not in have:
        first_and_last = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        raise NoSuchVersionError(f"kubernetes-validate holds schemas of Kubernetes {first_and_last}, not {wanted}")
    return str(have[_number(wanted)])


def _number(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as ``1.34``, ``v1.34.2`` or ``1.34+``; (0, 0) for other texts."""
    match = re.match(r"v?(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


@functools.cache
def _schemas(version: str) -> dict[str, Any]:
    utils: Any = importlib.import_module("kubernetes_validate.utils")
    name = f"kubernetes-json-schema/v{version}-local-strict/_definitions.json"
    definitions: dict[str, Any] = utils.schema_contents(name, version)["$defs"]
    return definitions


@functools.cache
def _validator(version: str, schema: str) -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{schema}", "$defs": _schemas(version)})
