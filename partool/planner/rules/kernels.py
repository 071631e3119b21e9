"""Tables of kernels that a spec names: their paths and hashes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path


def absolute(path: str, base_dir: Path) -> Path:
    """Return the absolute path of a table: ``~`` is the user's home, relative paths start from the spec's folder."""
    return Path(os.path.normpath(base_dir / os.path.expanduser(path)))


def table_hashes(paths: Sequence[str], base_dir: Path) -> dict[str, str]:
    """Return path in the spec → SHA-256 of the table; a folder's hash covers the names and contents of its files."""
    hashes = {}
    for path in paths:
        table, digest = absolute(path, base_dir), hashlib.sha256()
        for file in [table] if table.is_file() else sorted((*table.rglob("*.json"), *table.rglob("*.csv"))):
            digest.update(f"{file.relative_to(table)}\n".encode() + file.read_bytes())
        hashes[f"kernels.tuned/{path}"] = digest.hexdigest()
    return hashes
