"""Base class of every section of a spec, and types for bare values, names and the word ``auto``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from pydantic_core import CoreSchema, core_schema

Auto = Literal["auto"]


class Section(BaseModel):
    """A section of the YAML file: unknown keys and wrong types are errors, values never change after loading."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


def shorthand(field: str, *kinds: type, none: tuple[str, ...] = ()) -> Any:
    """Return a before-validator that reads a bare value, as in ``model: llama3-8b``, as ``{field: value}``.

    ``kinds`` are the types that the bare value may have, by default text. ``none`` names further fields that the bare
    word ``none`` sets to ``none`` too.
    """

    def expand(value: Any) -> Any:
        if not isinstance(value, kinds or str) or isinstance(value, bool):
            return value
        return dict.fromkeys((field, *(none if value == "none" else ())), value)

    return expand


ONE_KEY: dict[tuple[str | int, ...], str] = {("parallel", "expert"): "degree"}
"""Path of a value that may be written as a section → the section's only key."""


def section_of(field: str) -> Any:
    """Return a before-validator that reads a section of one key, such as ``expert: {degree: 4}``, as its value."""

    def unwrap(value: Any) -> Any:
        return value[field] if isinstance(value, dict) and set(value) == {field} else value

    return unwrap


class OneOf:
    """Annotation of text that must be one of some names: ``Annotated[str, OneOf(names)]``; in JSON Schema an enum.

    It replaces ``Literal`` for names that are defined elsewhere: type checkers refuse ``Literal[NAMES]``.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return the schema of a ``Literal`` of the names."""
        return core_schema.literal_schema(list(self.names))
