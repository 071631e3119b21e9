"""Findings for programs: JSON, GitHub workflow commands, SARIF 2.1.0."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.diagnostics.rules import RULES
from partool.diagnostics.secrets import masked_lines, without_secrets


def as_dict(finding: Diagnostic) -> dict[str, object]:
    """Return a finding as data for JSON; secrets in its texts are hidden."""
    finding = without_secrets(finding)
    return {
        "code": finding.code,
        "severity": finding.severity,
        "message": finding.message,
        "path": list(finding.path),
        "location": _location(finding.span),
        "help": finding.help,
        "related": [{"location": _location(label.span), "message": label.text} for label in finding.related],
    }


def _location(span: Span | None) -> dict[str, Any] | None:
    if span is None:
        return None
    start, end = {"line": span.line, "column": span.column}, {"line": span.end_line, "column": span.end_column}
    return {"file": span.file, "start": start, "end": end}


def render_github(findings: list[Diagnostic]) -> str:
    """Return workflow commands, which GitHub shows next to the lines of the findings.

    https://docs.github.com/actions/reference/workflow-commands-for-github-actions
    """
    return "".join(_github(without_secrets(finding)) for finding in findings)


def _github(finding: Diagnostic) -> str:
    kind = {"error": "error", "warning": "warning", "note": "notice"}[finding.severity]
    fields = {"title": finding.code}
    if span := finding.span:
        fields = {"file": _relative(span.file), "line": str(span.line), "col": str(span.column)} | fields
    properties = ",".join(f"{key}={_escaped(value, properties=True)}" for key, value in fields.items())
    message = finding.message + (f"\n{finding.help}" if finding.help else "")
    return f"::{kind} {properties}::{_escaped(message)}\n"


def _escaped(text: str, *, properties: bool = False) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if properties else text


def _relative(file: str) -> str:
    path = os.path.relpath(file) if Path(file).is_absolute() else file
    return Path(path).as_posix() if not path.startswith("..") else file


def render_sarif(findings: list[Diagnostic], lines: Mapping[str, list[str]], version: str) -> str:
    """Return a SARIF 2.1.0 log; a finding's fingerprint depends on the text in ``lines``, not on the line's number."""
    codes = sorted({finding.code for finding in findings})
    driver = {
        "name": "partool",
        "version": version,
        "rules": [_sarif_rule(code) for code in codes],
    }
    hidden = {name: masked_lines(texts) for name, texts in lines.items()}
    results = [_sarif_result(without_secrets(finding), codes, hidden) for finding in findings]
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }
    return json.dumps(log, indent=2, ensure_ascii=False) + "\n"


def _sarif_rule(code: str) -> dict[str, Any]:
    rule = RULES.get(code)
    title, reason = (rule.title, rule.reason) if rule else (code, code)
    return {"id": code, "shortDescription": {"text": title}, "fullDescription": {"text": reason}}


def _sarif_result(finding: Diagnostic, codes: list[str], lines: Mapping[str, list[str]]) -> dict[str, Any]:
    text = finding.message + (f". {finding.help}" if finding.help else "")
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": finding.severity,
        "message": {"text": text},
    }
    span = finding.span
    if span is not None and not span.file.startswith("--set"):
        region = {
            "startLine": span.line,
            "startColumn": span.column,
            "endLine": span.end_line,
            "endColumn": max(span.end_column, span.column + 1) if span.end_line == span.line else span.end_column,
        }
        physical = {"artifactLocation": {"uri": _relative(span.file)}, "region": region}
        result["locations"] = [{"physicalLocation": physical}]
        source = lines.get(span.file, [])
        line = source[span.line - 1].strip() if 0 < span.line <= len(source) else ""
        key = "\x00".join([finding.code, _relative(span.file), ".".join(map(str, finding.path)), line])
        result["partialFingerprints"] = {"partool/v1": hashlib.sha256(key.encode()).hexdigest()[:32]}
    return result
