"""Cases that run each time, and those that belong to the longer suites."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def often(names: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the names as parameters of a test: those of ``kept`` run each time, the others with the longer suites.

    A name that is a tuple is several parameters. A test may have some of ``kept`` only, but not none.
    """
    every = list(names)
    _known(every, kept, all_of_them=False)
    return [
        pytest.param(*(name if isinstance(name, tuple) else [name]), marks=() if name in kept else pytest.mark.long)
        for name in every
    ]


def named(cases: Mapping[str, Any], kept: Collection[str]) -> list[Any]:
    """Return the values of ``cases`` as parameters with their names: those of ``kept`` run each time.

    A value that is a tuple is several parameters; a named tuple is one.
    """
    _known(list(cases), kept, all_of_them=True)
    return [
        pytest.param(
            *(case if type(case) is tuple else [case]), id=name, marks=() if name in kept else pytest.mark.long
        )
        for name, case in cases.items()
    ]


def _known(names: list[Any], kept: Collection[Any], *, all_of_them: bool) -> None:
    """Raise ValueError if a kept name is unknown: a misspelt one would make its case a long one without a word."""
    there = [name in names for name in kept]
    if not (all(there) if all_of_them else any(there)):
        raise ValueError(f"of {list(kept)}, some are not among the cases {names}")


def beginning(name: str, kept: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    """Return the marks of a case: it runs each time if its name begins with one of ``kept``."""
    return [] if name.startswith(kept) else [pytest.mark.long]


def chosen(request: pytest.FixtureRequest, cases: Mapping[str, Case]) -> dict[str, Case]:
    """Return the cases that the selected tests of a fixture's file have among their parameters."""
    wanted = {
        value
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if isinstance(value, str)
    }
    return {name: case for name, case in cases.items() if name in wanted}
