"""Finds and hashes the Python code in a Hugging Face model's folder, and the classes that ``config.json`` names.

transformers runs such code with ``trust_remote_code``. Users can allow such code only on partool's command line; a plan
holds the hash of the code that was allowed, and ranks run no other code.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any


def asked_code(folder: Path) -> dict[str, str]:
    """Return class name → file name, for the classes that ``auto_map`` in a folder's ``config.json`` takes from code.

    ``auto_map`` holds ``FILE.CLASS``, or ``REPOSITORY--FILE.CLASS`` for code that is not in the folder.
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
    """Return one SHA-256 over the folder's ``auto_map`` and all Python files of the folder; raises OSError."""
    digest = hashlib.sha256(json.dumps(_auto_map(folder), sort_keys=True).encode())
    for path in code_files(folder):
        for part in (str(path.relative_to(folder)).encode(), path.read_bytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def module_file(module: str, folder: str) -> Path:
    """Return the file of a Python module, looked for in ``folder`` first, without running any code.

    Raises OSError if there is no such module.
    """
    places: list[str] | None = [folder, *sys.path]
    found = None
    for end in range(module.count(".") + 1):
        name = ".".join(module.split(".")[: end + 1])
        found = PathFinder.find_spec(name, places)
        if found is None:
            raise FileNotFoundError(f"there is no module {name} in {folder} or on the module path")
        places = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
    if found is None or found.origin is None:
        raise FileNotFoundError(f"the module {module} has no file")
    return Path(found.origin)


def module_hash(file: Path) -> str:
    """Return the SHA-256 of a file; raises OSError."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


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
