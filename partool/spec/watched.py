"""Records which fields a rule reads, so that a finding which follows from a stand-in value is not reported.

If a value of a spec is refused, another value stands in for it while the rest of the spec is checked
(:mod:`partool.spec.stand_ins`). A rule that reads a stand-in says nothing about what the user wrote. Within
:func:`standing_in`, sections made by :func:`watched` record their reads, and :func:`independent` leaves out each
finding that a rule makes after it has read a stand-in. Outside of :func:`standing_in`, nothing is recorded or left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from partool.diagnostics.record import Diagnostic
from partool.spec._source import SpecPath

AnySection = TypeVar("AnySection", bound=BaseModel)
_MARK = "_origins"
_WHOLE = frozenset({"__dict__", "model_dump", "model_fields_set"})
"""Attributes that show all fields of a section."""


@dataclass
class StandIns:
    """The values that stand-ins replace, and what was read and left out so far."""

    refused: frozenset[SpecPath]
    left_out: list[Diagnostic] = field(default_factory=list)
    """Findings that follow from stand-ins."""
    reads: set[SpecPath] | None = None
    """Paths that the present rule has read; None between rules."""

    def touched(self, path: SpecPath) -> bool:
        """Return True if a path lies in a refused value or section, or if a refused value lies below the path."""
        return any(path[: len(other)] == other[: len(path)] for other in self.refused)

    def kept(self, findings: Iterable[Diagnostic]) -> list[Diagnostic]:
        """Return the findings that do not follow from stand-ins; ``findings`` may read fields while it is iterated."""
        kept: list[Diagnostic] = []
        for finding in findings:
            follows = self.touched(finding.path) or any(map(self.touched, self.reads or ()))
            (self.left_out if follows else kept).append(finding)
        return kept


_CURRENT: ContextVar[StandIns | None] = ContextVar("stand_ins", default=None)


@contextmanager
def standing_in(refused: frozenset[SpecPath]) -> Iterator[StandIns]:
    """Let :func:`independent` leave out findings that follow from stand-ins for the values at ``refused``."""
    current = StandIns(refused)
    token = _CURRENT.set(current)
    try:
        yield current
    finally:
        _CURRENT.reset(token)


def watching() -> bool:
    """Return True within :func:`standing_in`."""
    return _CURRENT.get() is not None


def independent(rule: Callable[..., Iterable[Diagnostic]], *arguments: Any) -> list[Diagnostic]:
    """Return a rule's findings without those that follow from stand-ins.

    A finding follows from a stand-in if its path touches one, or if the rule had read one when it made the finding.
    """
    with reading() as reads:
        return reads.kept(rule(*arguments))


@contextmanager
def reading() -> Iterator[StandIns]:
    """Record what is read within this context, for :meth:`StandIns.kept`, which elsewhere keeps everything."""
    current = _CURRENT.get() or StandIns(frozenset())
    current.reads = set()
    try:
        yield current
    finally:
        current.reads = None


def note_read(*paths: SpecPath) -> None:
    """Record the paths of a value that the present rule has, and that was computed from these fields before."""
    current = _CURRENT.get()
    if current is not None and current.reads is not None:
        current.reads.update(paths)


Origins = Mapping[str, tuple[SpecPath, ...]]


def watched(section: AnySection, origins: Origins | None = None, path: SpecPath = ()) -> AnySection:
    """Return a section whose reads are recorded; the section itself outside of :func:`standing_in`.

    ``origins`` maps each field to the paths of the spec that decide its value; by default the section is that at
    ``path``, and each field has its own path.
    """
    if not watching():
        return section
    fields = type(section).model_fields
    if origins is None:
        origins = {name: ((*path, name),) for name in fields}
    values = {
        name: watched(value, None, (*path, name)) if isinstance(value, BaseModel) and path_of(origins, name) else value
        for name, value in section.__dict__.items()
    }
    copy: AnySection = object.__new__(_watched_class(type(section)))
    object.__setattr__(copy, "__dict__", values | {_MARK: origins})
    object.__setattr__(copy, "__pydantic_fields_set__", set(section.model_fields_set))
    object.__setattr__(copy, "__pydantic_extra__", None)
    object.__setattr__(copy, "__pydantic_private__", None)
    return copy


def path_of(origins: Origins, name: str) -> bool:
    """Return True if a field is a field of the spec, whose own fields are watched one by one."""
    return len(origins[name]) == 1 and origins[name][0][-1:] == (name,)


@cache
def _watched_class(kind: type[AnySection]) -> type[AnySection]:
    """Return a subclass whose instances record which fields are read."""
    fields = frozenset(kind.model_fields)

    def everything(self: Any) -> dict[str, Any]:
        inside = object.__getattribute__(self, "__dict__")
        note_read(*(path for paths in inside[_MARK].values() for path in paths))
        return {name: value for name, value in inside.items() if name != _MARK}

    def get(self: Any, name: str) -> Any:
        if name in _WHOLE:
            everything(self)
        value = object.__getattribute__(self, name)
        if name in fields and not isinstance(value, _Watched):
            note_read(*object.__getattribute__(self, "__dict__")[_MARK][name])
        return value

    def equal(self: Any, other: object) -> bool:
        if not isinstance(other, kind):
            return False
        return everything(self) == {name: value for name, value in other.__dict__.items() if name != _MARK}

    def hashed(self: Any) -> int:
        everything(self)
        return kind.__hash__(self)

    def model_dump(self: Any, **options: Any) -> dict[str, Any]:
        everything(self)
        return _plain(self, kind).model_dump(**options)

    namespace = {
        "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__getattribute__": get,
        "__eq__": equal, "__hash__": hashed, "model_dump": model_dump, "model_config": ConfigDict(defer_build=True),
    }  # fmt: skip
    metaclass: Any = type(kind)
    made: type[AnySection] = metaclass(kind.__name__, (kind, _Watched), namespace)
    return made


def _plain(section: Any, kind: type[AnySection]) -> AnySection:
    """Return a watched section as a section of its own class."""
    inside = object.__getattribute__(section, "__dict__")
    values = {
        name: _plain(value, type(value).__mro__[1]) if isinstance(value, _Watched) else value
        for name, value in inside.items()
        if name != _MARK
    }
    return kind.model_construct(_fields_set=set(section.__pydantic_fields_set__), **values)


class _Watched:
    """Mark of the classes that record reads."""

    __slots__ = ()
