"""Which keys the format has, read from the models: for suggestions, overrides and the schema."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from typing import Any, get_args

from partool.spec._base import Section
from partool.spec.spec import Spec

SHORTHAND = {"model": "preset", "hardware": "accelerator", "data": "source"}
"""Sections that may be written as one word, and the key that the word then is the value of."""


@cache
def sections() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the keys of every section, by the section's path."""
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    _collect(Spec, (), found)
    return found


def _collect(model: type[Section], path: tuple[str, ...], found: dict[tuple[str, ...], tuple[str, ...]]) -> None:
    found[path] = tuple(model.model_fields)
    for name, info in model.model_fields.items():
        for inner in _models(info.annotation):
            _collect(inner, (*path, name), found)


def _models(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


def near(word: str, words: list[str]) -> str | None:
    """Return the word most like the given one, None if none is."""
    matches = get_close_matches(word.lower(), words, n=1, cutoff=0.6)
    return matches[0] if matches else None


def suggestion(key: str, section: tuple[str, ...]) -> str:
    """Return what the user may have meant by an unknown key of a section; empty if there is no guess."""
    elsewhere = [path for path, keys in sections().items() if key in keys and path != section]
    if len(elsewhere) == 1:
        return f"`{key}` belongs " + (f"under {'.'.join(elsewhere[0])}" if elsewhere[0] else "at the top level")
    guess = near(key, list(sections().get(section, ())))
    if guess:
        return f"did you mean `{guess}`?"
    if elsewhere:
        return f"`{key}` is a key of {' and of '.join('.'.join(path) or 'the top level' for path in elsewhere)}"
    other = near(key, sorted({name for keys in sections().values() for name in keys}))
    if other:
        where = next(path for path, keys in sections().items() if other in keys)
        return f"did you mean `{'.'.join((*where, other))}`?"
    return "its keys are " + ", ".join(sections()[section]) if section in sections() else ""
