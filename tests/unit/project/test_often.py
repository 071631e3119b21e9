"""A misspelt name of a case that is to run each time is an error, not a longer suite."""

from __future__ import annotations

import pytest
from often import named, often


def long(parameters: list) -> list[bool]:
    return [bool(parameter.marks) for parameter in parameters]


def test_kept_names_run_each_time() -> None:
    assert long(often(["a", "b"], ["b"])) == long(named({"a": 1, "b": (2, 3)}, ["b"])) == [True, False]
    assert [parameter.values for parameter in named({"a": 1, "b": (2, 3)}, ["b"])] == [(1,), (2, 3)]


def test_unknown_names_are_errors() -> None:
    with pytest.raises(ValueError, match="'c'"):
        often(["a", "b"], ["c"])
    with pytest.raises(ValueError, match="'c'"):
        named({"a": 1}, ["a", "c"])
