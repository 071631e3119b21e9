"""Manifests with one fault each: how many of them the levels find together, and that valid ones pass."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from _k8s_case import ACCELERATORS, EVERY_KIND
from _manifest_edits import CRDS, Mutation, documents, mutations, needs_crds, rendered

from partool.launch.k8s.validate import validate_manifest, validate_offline
from partool.launch.k8s.validate.reading import manifest_of

FAULTS = {"job": 532, "jobset": 530, "pytorchjob": 770, "trainjob": 429, "volcano": 455}
"""Kind → number of mutations of its manifest."""
MISSED: dict[str, set[str]] = {kind: set() for kind in EVERY_KIND}
"""Kind → mutations that no level finds."""
SAMPLE = 25
"""The short run tests one of every so many mutations."""


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_sound_manifests_pass_every_level(kind: str) -> None:
    crds = CRDS if CRDS.is_dir() else None
    for machine in ACCELERATORS:
        for nodes in (1, 2, 16):
            levels = validate_offline(rendered(kind, nodes, machine), crds=crds)
            assert [d.message for level in levels for d in level.findings] == []
            assert levels[0].ran


def test_golden_files_pass_every_level() -> None:
    crds = CRDS if CRDS.is_dir() else None
    files = sorted((Path(__file__).parents[1] / "golden" / "k8s").glob("*.yaml"))
    assert len(files) >= 60
    for file in files:
        text = file.read_text(encoding="utf-8").replace("    (the plan)\n", "    {}\n")
        assert [d.message for level in validate_offline(text, crds=crds) for d in level.findings] == [], file.name


def missed_of(kind: str, faults: Iterable[Mutation]) -> set[str]:
    found = set()
    for fault in faults:
        broken = documents(kind)
        fault.apply(broken)
        if not any(level.findings for level in validate_manifest(manifest_of(broken), crds=CRDS)):
            found.add(fault.name)
    return found


@needs_crds
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_faults_are_found(kind: str) -> None:
    pytest.importorskip("kubernetes_validate")
    faults = list(mutations(kind))
    assert len({fault.name for fault in faults}) == len(faults) == FAULTS[kind]
    sample = faults[::SAMPLE]
    assert missed_of(kind, sample) == MISSED[kind] & {fault.name for fault in sample}
    assert len(MISSED[kind]) <= 0.05 * len(faults)


@needs_crds
@pytest.mark.long
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_all_faults_are_found(kind: str) -> None:
    pytest.importorskip("kubernetes_validate")
    assert missed_of(kind, mutations(kind)) == MISSED[kind]
