"""The distance of a table's entry from a request is the sum of these terms.

* 1 for each octave between the numbers of rows,
* 2 for each octave between a width of the request and of the entry,
* 4 for another device of the architecture, and 1 for each octave between the devices' numbers of units,
* 1 for each minor version between the Triton versions, or 8 for another major version,
* 2 for a later change of the kernel's code, which makes a measurement a guess,
* 8 for an unmeasured entry, or 16 for the kernel's rule.
"""

from __future__ import annotations

import math

ROWS, WIDTH, MINOR, MAJOR, STALE, DEVICE, MODELLED, HEURISTIC = 1.0, 2.0, 1.0, 8.0, 2.0, 4.0, 8.0, 16.0
_VENDORS = ("nvidia ", "amd ", "instinct ", "radeon ")


def same_device(first: str, second: str) -> bool:
    """Return whether two names mean the same device in different spellings: ``NVIDIA H200`` and ``h200``."""
    return _plain(first) == _plain(second)


def _plain(name: str) -> str:
    plain = name.casefold().replace("_", " ").replace("-", " ").strip()
    for vendor in _VENDORS:
        plain = plain.removeprefix(vendor)
    return plain


def octaves(first: int, second: int) -> float:
    """Return the number of octaves (doublings) between two numbers, or 0 where a number is unknown (0)."""
    return abs(math.log2(first / second)) if first and second else 0.0


def versions_apart(first: str, second: str) -> float:
    """Return the distance between two versions of Triton, or 0 where ``second`` is empty."""
    if not second:
        return 0.0
    (major, minor), (other, another) = (map(int, version.split(".")[:2]) for version in (first, second))
    return MAJOR * abs(major - other) if major != other else MINOR * abs(minor - another)
