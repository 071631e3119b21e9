"""``--set key.sub=value``: values that override the file."""

from __future__ import annotations

from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.diagnostics.secrets import MASK, masked, masked_lines
from partool.spec import _pydantic, _yaml
from partool.spec._base import ONE_KEY
from partool.spec._source import Source, SpecPath, is_secret

SHORTHAND: dict[SpecPath, tuple[str, ...]] = {
    ("model",): ("preset",),
    ("hardware",): ("accelerator",),
    ("data",): ("source",),
    ("parallel", "tensor"): ("degree",),
    ("parallel", "pipeline"): ("stages",),
    ("parallel", "sequence"): ("degree",),
    ("parallel", "offload"): ("optimizer", "parameters", "activations"),
}
"""Section that may be one bare value → the key that this value sets, then further keys that the value ``none`` sets."""


def apply_overrides(document: dict[str, Any], overrides: list[str], source: Source) -> list[Diagnostic]:
    """Write the overrides into ``document``; return a finding for each override that is malformed or unknown."""
    findings = []
    for text in overrides:
        finding = _apply(document, text, source)
        if finding is not None:
            findings.append(finding)
    return findings


def _apply(document: dict[str, Any], text: str, source: Source) -> Diagnostic | None:
    key, equals, value_text = text.partition("=")
    path: SpecPath = tuple(part.strip() for part in key.split("."))
    shown = without_value(text)
    span = Span(f"--set {shown}", 1, 1, 1, len(shown) + 1)
    if not equals or not all(path):
        message = f"--set takes key=value, not {shown!r}"
        return Diagnostic("PT107", message, span=span, help="such as training.steps=100")
    if path[-1] == ONE_KEY.get(path[:-1]):
        path = path[:-1]  # `expert.degree` is what `expert` says
    if finding := _unknown(path, span):
        return finding
    value_source = Source(span.file, value_text)
    value, wrong = _yaml.parse(value_source)
    if wrong and wrong[0].code != "PT005":
        return Diagnostic("PT107", f"--set {key}: {wrong[0].message}", path=path, span=span, help=wrong[0].help)
    _write(document, path, value)
    for places in (source.values, source.keys):  # drop the spans of the values that were replaced
        for old in [inner for inner in places if inner[: len(path)] == path]:
            del places[old]
    source.values[path] = span
    source.keys[path] = span
    return None


def without_value(text: str) -> str:
    """Return an override as text for display, without its value if this value holds a secret."""
    key, equals, value = text.partition("=" if "=" in text else ":")
    path = tuple(part.strip() for part in key.split("."))
    hides = is_secret(path) or masked_lines(lines := value.split("\n")) != lines
    return masked(key) + equals + (MASK if hides else value)


def _unknown(path: SpecPath, span: Span) -> Diagnostic | None:
    for length in range(1, len(path) + 1):
        siblings = _pydantic.known_keys(path[: length - 1])
        if _pydantic.is_open(path[: length - 1]):
            continue
        if path[length - 1] not in siblings:
            if not siblings and length > 1:
                message = f"`{_pydantic.dotted(path[: length - 1])}` is a value, it has no `{path[length - 1]}`"
                return Diagnostic("PT101", message, path=path[:length], span=span)
            where = f"in `{_pydantic.dotted(path[: length - 1])}`" if length > 1 else "at the top level of a spec"
            help = _pydantic.suggest(str(path[length - 1]), siblings)
            message = f"there is no `{path[length - 1]}` {where}"
            return Diagnostic("PT101", message, path=path[:length], span=span, help=help)
    return None


def _write(document: dict[str, Any], path: SpecPath, value: Any) -> None:
    section: dict[str, Any] = document
    for length, part in enumerate(path[:-1], 1):
        inner = section.get(str(part))
        if isinstance(inner, str | int) and path[:length] in SHORTHAND:
            names = SHORTHAND[path[:length]]  # `model: llama3-8b` with --set model.layers=4
            inner = dict.fromkeys(names if inner == "none" else names[:1], inner)
        elif not isinstance(inner, dict):
            inner = {}
        section[str(part)] = inner
        section = inner
    section[str(path[-1])] = value
