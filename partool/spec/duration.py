"""Durations as people write them."""

from __future__ import annotations

import re

_UNITS_S = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}


def duration_s(text: str) -> float | None:
    """Return the seconds of a positive duration such as ``90s``, ``30min`` or ``1.5h``; None for anything else."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.ASCII)
    if match is None or match[2] not in _UNITS_S:
        return None
    return float(match[1]) * _UNITS_S[match[2]] or None
