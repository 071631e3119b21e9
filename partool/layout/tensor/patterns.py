"""Apply the user's patterns, which say how parameters are cut and take precedence over all other rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase

from partool.diagnostics.record import Diagnostic
from partool.layout.tensor.choice import LINEAR, CutChoice, Subject, Unclear, head_kind
from partool.layout.tensor.cutting import collapsed_name
from partool.layout.tensor.infer import by_heads
from partool.spec.parallel import Style, TensorPattern

Patterns = Mapping[str, Style | TensorPattern]
PATH = ("parallel", "tensor", "patterns")
_MATRIX: tuple[Style, ...] = ("column", "column_gathered", "row", "replicated")
_ALLOWED: dict[str, tuple[Style, ...]] = {
    "linear": _MATRIX,
    "conv1d": _MATRIX,
    "experts": ("column", "row", "replicated"),
    "embedding": ("vocabulary", "replicated"),
    "other": ("column", "replicated"),
}
"""Kind of module → styles that a pattern may give it; modules of other kinds can only be replicated."""


def ways(name: str) -> list[str]:
    """Return the names that a pattern for a parameter may match: its own name, and the names of modules around it."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts), 0, -1)]


def matching(patterns: Patterns, *names: str) -> str | None:
    """Return the first pattern that matches a parameter in ``names`` or a module that contains such a parameter."""
    candidates = {way for name in names if name for way in ways(name)}
    return next((one for one in patterns if any(fnmatchcase(name, one) for name in candidates)), None)


def unmatched(patterns: Patterns, names: Iterable[str]) -> list[Diagnostic]:
    """Return a finding for each pattern that matches no parameter and no module with parameters."""
    all_names = {way for name in names for way in ways(name)}
    findings = []
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in all_names):
            near = get_close_matches(pattern, sorted({collapsed_name(name) for name in all_names}), 2, 0.5)
            help = f"nearest: {' or '.join(near)}" if near else "partool plan --show tensor lists all names"
            message = f"pattern {pattern!r} matches no parameter and no module"
            findings.append(Diagnostic("PT440", message, path=(*PATH, pattern), help=help))
    return findings


def wanted(subject: Subject, pattern: str, patterns: Patterns) -> CutChoice | Unclear | Diagnostic:
    """Return the choice that ``pattern`` makes for a parameter."""
    structure, group, module, name = subject
    entry = patterns[pattern]
    entry = TensorPattern(style=entry) if isinstance(entry, str) else entry
    rule = f"pattern {pattern!r}"
    is_head = module.name == structure.head
    allowed = _ALLOWED["embedding"] if is_head else _ALLOWED.get(module.kind, ("replicated",))
    if module.kind == "embedding" and module.name != structure.embedding:
        allowed = ("replicated",)
    if entry.style not in allowed:
        message = f"pattern {pattern!r} makes {collapsed_name(name)} {entry.style}, which a {module.kind} cannot be"
        return Diagnostic("PT441", message, path=(*PATH, pattern), help=f"one of: {', '.join(allowed)}")
    in_attention = group is not None and group.attention and module.kind in LINEAR
    parts = tuple(entry.parts or ())
    if group is not None and in_attention and entry.style in ("column", "row") and not entry.unit and not entry.heads:
        if not parts:
            return by_heads(group, module, entry.style, rule, "whole heads")
        if all(head_kind(structure, width) for width in parts):
            return CutChoice(entry.style, rule, "whole heads of each part", parts, heads="query")
    return CutChoice(entry.style, rule, "", parts, entry.unit or 1, entry.heads)
