"""Findings: the record, the rules' texts, and how findings are shown."""

from partool.diagnostics.record import Diagnostic, Label, Severity, Span

__all__ = ["Diagnostic", "Label", "Severity", "Span"]
