"""Code that the folder of a Hugging Face model brings: which classes its ``config.json`` asks for, and its hash.

transformers runs such code where it is told ``trust_remote_code``. partool is told so on its command line only; a plan
holds the hash of the code that was allowed, and no rank runs any other.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def asked_code(folder: Path) -> dict[str, str]:
    """Return the classes that a folder's ``config.json`` takes from code, and the file of each; empty: none.

    Under ``auto_map`` stand ``FILE.CLASS``, and ``REPOSITORY--FILE.CLASS`` for code that is not in the folder.
    """
    found = {}
    for reference in _references(_auto_map(folder)):
        file, _, name = reference.rpartition(".")
        found[name] = file if "--" in file else f"{file}.py"
    return found


def code_files(folder: Path) -> list[Path]:
    """Return the Python files of a folder, in the order of their names."""
    return sorted(path for path in folder.rglob("*.py") if path.is_file())


def code_hash(folder: Path) -> str:
    """Return the SHA-256 of the classes that a folder asks for and of all its Python files; raises OSError."""
    digest = hashlib.sha256(json.dumps(_auto_map(folder), sort_keys=True).encode())
    for path in code_files(folder):
        for part in (str(path.relative_to(folder)).encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _auto_map(folder: Path) -> Any:
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content.get("auto_map") if isinstance(content, dict) else None


def _references(auto_map: Any) -> list[str]:
    if isinstance(auto_map, str):
        return [auto_map]
    values = auto_map.values() if isinstance(auto_map, dict) else auto_map if isinstance(auto_map, list) else ()
    return [reference for value in values for reference in _references(value)]
