"""Checks of a manifest without a cluster: partool's rules, strict schemas, and the rules in CRDs."""

from __future__ import annotations

from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.launch.k8s.validate import cel, core_schemas, crd_schemas, own_rules
from partool.launch.k8s.validate.crd_cache import cached_crds, store_crds
from partool.launch.k8s.validate.manifest import Manifest
from partool.launch.k8s.validate.reading import UnreadableError, read_manifest
from partool.launch.target import Level

__all__ = ["cached_crds", "store_crds", "validate_manifest", "validate_offline"]

OWN = "own rules"


def validate_offline(
    text: str, *, crds: Path | None = None, context: str | None = None, core_version: str | None = None
) -> list[Level]:
    """Check a manifest's text; each returned level states what it compared the text with, or why it did not run.

    ``crds`` is a folder of definitions (CRDs), by default the definitions that ``doctor`` stored for the cluster of
    ``context``. ``core_version`` is a version of Kubernetes, such as ``1.34`` or a version that
    a server reports (``v1.34.2-gke.1``); the default is the newest known version.
    """
    try:
        manifest = read_manifest(text)
    except UnreadableError as error:
        return [Level(OWN, True, "the manifest cannot be read", (Diagnostic("PT568", str(error)),))]
    return validate_manifest(manifest, crds=crds, context=context, core_version=core_version)


def validate_manifest(
    manifest: Manifest, *, crds: Path | None = None, context: str | None = None, core_version: str | None = None
) -> list[Level]:
    """Check a manifest that has already been read, as :func:`validate_offline` does."""
    crd_source = crd_schemas.source(crds, context)
    rules_level = Level(OWN, True, f"{len(own_rules.RULES)} rules", tuple(own_rules.check(manifest)))
    core = core_schemas.level(manifest, core_version)
    return [rules_level, core, crd_schemas.level(manifest, crd_source), cel.level(manifest, crd_source)]
