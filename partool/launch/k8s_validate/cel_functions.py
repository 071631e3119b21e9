"""Functions that Kubernetes adds to CEL and ``cel-python`` lacks: those of texts and lists.

Source: https://kubernetes.io/docs/reference/using-api/cel/. A rule that uses another one is counted as not evaluated.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Callable
from typing import Any


def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions by name; a method's first argument is the value before the dot."""
    types: Any = importlib.import_module("celpy.celtypes")
    text, number, true = types.StringType, types.IntType, types.BoolType

    def texts(items: list[str]) -> Any:
        return types.ListType([text(item) for item in items])

    def index(value: Any, item: Any) -> Any:
        if isinstance(value, str):
            return number(value.find(item))
        return number(list(value).index(item) if item in value else -1)

    def last_index(value: Any, item: Any) -> Any:
        if isinstance(value, str):
            return number(value.rfind(item))
        return number(max((at for at, each in enumerate(value) if each == item), default=-1))

    def find(value: Any, pattern: str) -> Any:
        match = re.search(pattern, value)
        return text(match.group() if match else "")

    return {
        "lowerAscii": lambda value: text(value.lower()),
        "upperAscii": lambda value: text(value.upper()),
        "trim": lambda value: text(value.strip()),
        "split": lambda value, by, *most: texts(value.split(by, *(int(each) - 1 for each in most))),
        "join": lambda items, by="": text(str(by).join(items)),
        "replace": lambda value, old, new: text(value.replace(old, new)),
        "substring": lambda value, start, end=None: text(value[int(start) : None if end is None else int(end)]),
        "find": find,
        "indexOf": index,
        "lastIndexOf": last_index,
        "isSorted": lambda items: true(all(first <= second for first, second in itertools.pairwise(items))),
        "sum": lambda items: sum(items[1:], items[0]) if items else number(0),
        "min": min,
        "max": max,
    }
