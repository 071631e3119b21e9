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
    found = {}
    for path in paths:
        whole, digest = absolute(path, base_dir), hashlib.sha256()
        for file in [whole] if whole.is_file() else sorted((*whole.rglob("*.json"), *whole.rglob("*.csv"))):
            digest.update(f"{file.relative_to(whole)}\n".encode() + file.read_bytes())
        found[f"kernels.tuned/{path}"] = digest.hexdigest()
    return found
