"""Specs with a launch section, and their findings."""

from __future__ import annotations

from pathlib import Path

from planned import plan_of

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan
from partool.planner.resolve import resolve
from partool.spec import load, load_text

HEAD = """\
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
hardware: {accelerator: h100-sxm, nodes: NODES, per_node: 8, fabric: ib-ndr}
data: python-stdlib
training: {global_batch: 32}
"""
FIRST = 5
"""Number of the first line after the head."""


def spec_text(section: str, *, nodes: int = 1, hardware: str = "") -> str:
    """Return a spec: four lines of a model and of machines, then the lines of ``section``."""
    head = HEAD.replace("NODES", str(nodes))
    if hardware:
        head = "\n".join(f"hardware: {hardware}" if "hardware" in line else line for line in head.splitlines()) + "\n"
    return head + section


def findings(text: str, folder: Path | None = None) -> list[Diagnostic]:
    """Return all findings of a spec made before its layouts are searched, with their places."""
    if folder is None:
        loaded = load_text(text, "spec.yaml")
    else:
        (folder / "spec.yaml").write_text(text, encoding="utf-8")
        loaded = load(folder / "spec.yaml")
    found = list(loaded.diagnostics)
    if loaded.spec is not None:
        found += loaded.source.attach(resolve(loaded.spec, folder or Path("/spec-folder")).diagnostics)
    return found


def planned(text: str, folder: Path) -> Plan:
    """Return a spec's plan."""
    return plan_of(text, folder=folder, name="spec")


def place(finding: Diagnostic) -> tuple[str, int]:
    """Return a finding's code and line."""
    assert finding.span is not None
    return finding.code, finding.span.line
