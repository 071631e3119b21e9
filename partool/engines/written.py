"""Settings of a plan in an engine's own words, and differences between the settings of two plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from partool.diagnostics.record import Diagnostic
from partool.plan.types import Plan


@dataclass(frozen=True, slots=True)
class EngineTerm:
    """A setting that a plan decides."""

    name: str
    value: Any
    """Text, number, list or truth value; True for a flag without value."""
    path: str
    """Field of the spec that the setting says."""


@dataclass
class EngineTerms:
    """The settings of a plan for one engine, in the order in which they are written."""

    plan: Plan
    terms: list[EngineTerm] = field(default_factory=list)
    findings: list[Diagnostic] = field(default_factory=list)
    untold: dict[str, object] = field(default_factory=dict)
    """Fields of the spec, by path, that decide the layout and that the engine's files cannot say."""

    def put(self, name: str, value: Any, path: str) -> None:
        """Add a setting; None and False add none."""
        if value is not None and value is not False:
            self.terms.append(EngineTerm(name, value, path))

    def state(self, name: str, value: Any, path: str) -> None:
        """Add a setting whose value may be False."""
        self.terms.append(EngineTerm(name, value, path))

    def cannot(self, message: str, path: str, way_out: str) -> None:
        """Add an error: the engine has no words for a part of the plan."""
        self.findings.append(Diagnostic("PT828", message, path=tuple(path.split(".")), help=way_out))

    @property
    def by_name(self) -> dict[str, EngineTerm]:
        """The settings by name."""
        return {term.name: term for term in self.terms}


@dataclass(frozen=True, slots=True)
class EngineChange:
    """A setting that differs between two plans; None on the side that does not have it."""

    name: str
    path: str
    before: Any
    after: Any


def changes(before: EngineTerms, after: EngineTerms) -> Iterator[EngineChange]:
    """Yield the settings that differ, in the order of the later plan; then those that are gone."""
    old, new = before.by_name, after.by_name
    for term in after.terms:
        was = old.get(term.name)
        if was is None or was.value != term.value:
            yield EngineChange(term.name, term.path, None if was is None else was.value, term.value)
    for term in before.terms:
        if term.name not in new:
            yield EngineChange(term.name, term.path, term.value, None)
    for path in sorted(before.untold.keys() | after.untold.keys()):
        earlier, later = (each.untold.get(path) for each in (before, after))
        if earlier != later:
            yield EngineChange("", path, earlier, later)


def nested(terms: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested sections for names that are joined by dots."""
    tree: dict[str, Any] = {}
    for name, value in terms.items():
        *sections, last = name.split(".")
        into = tree
        for section in sections:
            into = into.setdefault(section, {})
        into[last] = value
    return tree
