"""Reads a file into a :class:`Spec`; reports all findings at once and raises no exception."""

from __future__ import annotations

import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from partool.diagnostics.record import Diagnostic, Span
from partool.spec import _pydantic, _yaml
from partool.spec._overrides import apply_overrides
from partool.spec._source import Source
from partool.spec.checks import check
from partool.spec.foreign import foreign
from partool.spec.spec import Spec
from partool.spec.stand_ins import REQUIRED, Rest, remaining

MAX_BYTES = 1_000_000


@dataclass
class Loaded:
    """Result of reading a spec: the spec (None after errors), its text, and all findings with their positions."""

    spec: Spec | None
    source: Source
    diagnostics: list[Diagnostic] = field(default_factory=list)
    rest: Rest | None = None
    """After errors: the spec with defaults in place of what was refused; None if the file holds no sections."""

    @property
    def has_errors(self) -> bool:
        """True if any finding is an error."""
        return any(finding.severity == "error" for finding in self.diagnostics)

    def add(self, findings: list[Diagnostic]) -> None:
        """Add findings made after reading, each with its position; warnings that the file silences are dropped."""
        located = [self.source.located(finding) for finding in findings]
        self.diagnostics += [finding for finding in located if not self.source.ignores(finding)]
        self.diagnostics.sort(key=lambda d: (d.span.file, d.span.line, d.span.column) if d.span else ("", 0, 0))


def load(path: Path, overrides: list[str] | None = None) -> Loaded:
    """Read a spec from a file; ``overrides`` are ``key.sub=value`` strings that override it."""
    source = Source(str(path))
    text = read(path)
    if isinstance(text, Diagnostic):
        return Loaded(None, source, [text])
    source.text = text
    return _load(source, overrides or [])


def load_text(text: str, file: str = "<text>", overrides: list[str] | None = None) -> Loaded:
    """Read a spec from a string."""
    return _load(Source(file, text), overrides or [])


def read(path: Path) -> str | Diagnostic:
    """Return a file's text, or a finding about the file; never raises."""
    start = Span(str(path), 1, 1, 1, 1)
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return Diagnostic("PT002", f"{str(path)!r} is a folder", help="name the spec in it")
        if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device might never end
            return Diagnostic("PT002", f"{str(path)!r} is not a regular file")
        if status.st_size > MAX_BYTES:
            message = f"the file has {status.st_size:,} bytes; no spec has more than {MAX_BYTES:,}"
            return Diagnostic("PT003", message, span=start)
        data = path.read_bytes()
    except FileNotFoundError:
        return Diagnostic("PT001", f"there is no file {str(path)!r}", help=_similar(path))
    except (OSError, ValueError) as error:
        return Diagnostic("PT002", f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        span = Span(str(path), line, column, line, column + 1)
        message = f"the file is not UTF-8 text: byte 0x{data[error.start]:02x} at offset {error.start}"
        return Diagnostic("PT004", message, span=span, help="save it as UTF-8")


def _similar(path: Path) -> str:
    import difflib

    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"did you mean {str(path.parent / near[0])!r}?" if near else ""


def _load(source: Source, overrides: list[str]) -> Loaded:
    document, findings = _yaml.parse(source)
    if document is None and not findings:
        findings = [
            Diagnostic("PT005", "the spec is empty", span=Span(source.file, 1, 1, 1, 1), help=_yaml._EMPTY_HELP)
        ]
    if document is None or any(finding.code == "PT009" for finding in findings):
        return Loaded(None, source, findings)
    if not isinstance(document, dict):
        kind = "a list" if isinstance(document, list) else "a single value"
        message = f"the spec is {kind}, not a section with keys"
        findings.append(Diagnostic("PT007", message, span=source.span((), key=True), help="begin with `model:`"))
        return Loaded(None, source, findings)
    if foreign_tool := foreign(document, source.file):
        findings.append(Diagnostic("PT012", foreign_tool[0], span=source.span((), key=True), help=foreign_tool[1]))
        return Loaded(None, source, findings)
    findings += apply_overrides(document, overrides, source)
    source.note_secrets(document)
    spec, wrong = _validate(document)
    loaded = Loaded(spec, source)
    loaded.add(findings + wrong)
    if spec is not None and not loaded.has_errors:
        loaded.add(check(spec))
    if loaded.has_errors:
        loaded.spec = None
        _check_the_rest(loaded, document)
    return loaded


def _check_the_rest(loaded: Loaded, document: dict[str, Any]) -> None:
    """Add the findings of rules that do not depend on the errors found so far, and the spec without these errors."""
    errors = [finding for finding in loaded.diagnostics if finding.severity == "error"]
    rest = Rest(document).without({finding.path for finding in errors})
    for finding in errors:
        if finding.code == "PT101" and finding.path:
            rest = rest.doubting(_pydantic.meant_by(finding.path))
    loaded.rest, more = remaining(rest, check, loaded.diagnostics)
    loaded.add(more)


def validate_section(name: str, section: Any) -> tuple[Spec | None, list[Diagnostic]]:
    """Return (spec with the user's section and placeholders for other sections, or None after errors; findings)."""
    return _validate({**REQUIRED, name: section})


def _validate(document: dict[str, Any]) -> tuple[Spec | None, list[Diagnostic]]:
    try:
        return Spec.model_validate(document), []
    except ValidationError as error:
        return None, _pydantic.findings(error, document)
    except RecursionError:
        return None, [Diagnostic("PT009", "values are nested too deep")]
