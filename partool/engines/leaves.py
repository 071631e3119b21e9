"""Values of a YAML or JSON text by their names joined by dots, with their lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

_DEPTH = 6
"""Sections within sections that are read one by one."""


def leaves(
    node: Any, before: str = "", depth: int = 0, *, opaque: Collection[str] = ()
) -> Iterator[tuple[str, Any, int]]:
    """Yield name, value and line of each value of a mapping; sections that are empty or in ``opaque`` are values.

    A value that cannot be built, as a date in a thirteenth month, is its text or its kind.
    """
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{before}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value and name not in opaque and depth < _DEPTH:
            yield from leaves(value, f"{name}.", depth + 1, opaque=opaque)
            continue
        try:
            plain = SafeConstructor().construct_object(value, deep=True)
        except (yaml.YAMLError, ValueError, RecursionError):
            plain = value.value if isinstance(value, yaml.ScalarNode) else f"a {value.id}"
        yield name, plain, key.start_mark.line + 1
