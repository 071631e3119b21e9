"""Cases that run each time, and those that belong to the longer suites."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def often(names: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return the names as parameters of a test: those of ``kept`` run each time, the others with the longer suites.

    A name that is a tuple is several parameters.
    """
    return [
        pytest.param(*(name if isinstance(name, tuple) else [name]), marks=() if name in kept else pytest.mark.long)
        for name in names
    ]


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
