"""Findings of validation, and the findings' messages."""

from __future__ import annotations

from dataclasses import dataclass

from partool.diagnostics.record import Diagnostic
from partool.launch.k8s.validate.manifest import DocumentPart, Path, place


@dataclass(frozen=True, slots=True)
class FieldFault:
    """An error in a field of a document."""

    owner: str
    path: Path
    text: str
    help: str = ""

    def diagnostic(self, code: str) -> Diagnostic:
        """Return the finding as a diagnostic with a rule's code; its text reads ``Job/mine: spec.completions: ...``."""
        return Diagnostic(code, f"{self.owner}: {place(self.path)}: {self.text}", help=self.help)


def at(part: DocumentPart, *path: str | int, text: str, help: str = "") -> FieldFault:
    """Return a finding about the field at ``path`` below ``part``."""
    return FieldFault(part.owner, part.path + path, text, help)
