"""Reads the catalog's data files on accelerators, hosts, fabrics and model presets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal

Table = Literal["accelerators", "hosts", "fabrics", "models", "network_env", "sources"]

_FOLDER = Path(__file__).parent
_MOST = 4
"""Most names that a help text suggests."""


@cache
def table(name: Table) -> dict[str, dict[str, Any]]:
    """Return a table of the catalog as a dictionary from entry name to entry.

    Every entry has ``source`` and ``as_of``. Entries of machines also have ``sources``, which maps each figure to an
    entry of the table ``sources`` with text and date. The figures of a dictionary may share a source
    (``peak_tflops``) or have separate sources (``achievable_tflops.fp8``).
    """
    loaded: dict[str, dict[str, Any]] = json.loads(_bytes(name))
    return loaded


def table_hash(name: Table) -> str:
    """Return the SHA-256 of a table's file, for ``Plan.inputs``."""
    return hashlib.sha256(_bytes(name)).hexdigest()


def did_you_mean(name: str, entries: Iterable[str]) -> str:
    """Return a help text that names the known entries nearest to ``name``, or all entries if none is near.

    Entries that begin with ``name`` come first, as h100-sxm for h100; the others are ordered by their edit distance.
    """
    names, written = sorted(entries), name.lower().replace("_", "-").strip("-")
    longer = [each for each in names if written and each.startswith(f"{written}-")]
    longer = longer or [each for each in names if len(written) > 1 and each.startswith(written)]
    near = longer[:_MOST] or get_close_matches(written, names, n=_MOST, cutoff=0.55)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known names: {', '.join(names)}"


@cache
def _bytes(name: Table) -> bytes:
    return (_FOLDER / f"{name}.json").read_bytes()
