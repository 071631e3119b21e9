"""Lists with one entry per layer or stage, in which ``full × 40`` stands for 40 equal entries."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from pydantic_core import CoreSchema, core_schema

from partool.spec.numbers import MOST_LAYERS

_RUN = re.compile(r"\s*(?P<value>\w+)\s*[×x*]\s*(?P<count>\d+)\s*", re.ASCII)


class Runs:
    """Annotation of a list that may hold runs: ``[full × 40, none × 40]`` is a list of 80 entries.

    ``read`` turns the text before the × into an entry, ``values`` is a regular expression of the texts that it takes.
    If a run cannot be read, no run is expanded, so that the error names the place and the text that the user wrote.
    """

    def __init__(self, read: Callable[[str], Any], values: str) -> None:
        self.read, self.values = read, values

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        """Return the schema of the list, which runs are expanded for."""
        return core_schema.no_info_before_validator_function(self.expanded, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        """Return the JSON Schema of the list, whose items may also be runs."""
        list_schema: dict[str, Any] = dict(handler(schema))
        run = {"type": "string", "pattern": rf"^ *({self.values}) *[×x*] *[1-9][0-9]{{0,3}} *$", "title": "run"}
        return list_schema | {"items": {"anyOf": [list_schema["items"], run]}}

    def expanded(self, value: Any) -> Any:
        """Return a list with every run replaced by its entries; other values are unchanged."""
        if not isinstance(value, list):
            return value
        runs = [self._run(entry) for entry in value]
        lengths = [count for _, count in runs]
        if sum(lengths) > MOST_LAYERS:
            return value
        if 0 in lengths:
            return [entry for entry, _ in runs]
        return [entry for entry, count in runs for _ in range(count)]

    def _run(self, entry: Any) -> tuple[Any, int]:
        """Return an entry and how often it stands there; 0 for a run that cannot be read, which stays as it is."""
        match = _RUN.fullmatch(entry) if isinstance(entry, str) else None
        if match is None:
            return entry, 1
        if re.fullmatch(self.values, match["value"]) is None or len(match["count"]) > 4 or not int(match["count"]):
            return entry, 0
        return self.read(match["value"]), int(match["count"])


def in_runs(values: Sequence[Any]) -> list[Any]:
    """Return a list in the form that :class:`Runs` reads: equal neighbours become one run."""
    runs: list[Any] = []
    for value, group in groupby(values):
        count = len(list(group))
        runs.append(f"{value} × {count}" if count > 1 else value)
    return runs
