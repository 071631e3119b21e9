"""Cells of a row: numbers, words, and what the whole row says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_MEANS = r"(?:megatron[- ])?(?:fsdp2?|hsdp|zero[- ]?\d?|dist(?:ributed|\.)?[ -]?opt\w*)"
_OFF = re.compile(
    rf"\b(?:no|non|not|without|w/o)[ -]+{_MEANS}|\b{_MEANS}\s*(?:[:=]\s*|\s)\(?(?:off|no|0|false|none|disabled)\b"
)
"""Sharding that a row says it does not use: ``no FSDP``, ``FSDP=0``, ``FSDP off``."""
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


@dataclass(frozen=True)
class Cells:
    """One row of a table; a column that is missing is blank."""

    values: Mapping[str, str]

    def text(self, name: str) -> str:
        """Return a cell without surrounding blanks."""
        return (self.values.get(name) or "").strip()

    def lower(self, *names: str) -> str:
        """Return some cells in lower case, joined by blanks."""
        return " ".join(self.text(name).lower() for name in names)

    def number(self, name: str) -> float | None:
        """Return the first positive number of a cell, or None."""
        match = _NUMBER.search(self.text(name))
        if not match:
            return None
        try:
            value = float(match.group().replace(",", ""))
        except ValueError:
            return None
        return value if 0 < value < 1e18 else None

    def count(self, name: str, default: int = 0) -> int:
        """Return the first number of a cell as a whole number, or a default."""
        value = self.number(name)
        return default if value is None or value > 1e9 else max(round(value), 0) or default

    def used(self, *names: str) -> str:
        """Return some cells in lower case without the kinds of sharding that they say are off, each cell by itself.

        A cell does not speak of another: FSDP2 beside a blank schedule and recomputation ``none`` is on.
        """
        return " ".join(_OFF.sub(" ", self.lower(name)) for name in names)

    @property
    def everything(self) -> str:
        """All cells that describe the run, in lower case, without the kinds of sharding that they say are off."""
        return self.used("source", "model", "zero_or_fsdp", "vpp_or_schedule", "recompute", "method", "notes")
