"""Finds and hashes the Python code that builds a user's model.

For a Hugging Face folder this is the code that transformers runs with ``trust_remote_code``, for a module of the user's
own the files that importing and running it loads. Users can allow such code only on partool's command line; a plan
holds the hashes of the code that was allowed, and ranks run no other code.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

DEQUANTIZE = (
    "write the weights as bf16: from_pretrained(FOLDER, quantization_config=Mxfp4Config(dequantize=True)) of "
    "transformers, then save_pretrained(OTHER)"
)
"""What to do with a folder of GPT-OSS whose experts are in mxfp4."""


def asked_code(folder: Path) -> dict[str, str]:
    """Return class name → file name, for the classes that ``auto_map`` in a folder's ``config.json`` takes from code.

    ``auto_map`` holds ``FILE.CLASS``, or ``REPOSITORY--FILE.CLASS`` for code that is not in the folder.
    """
    files = {}
    for reference in _references(_auto_map(folder)):
        file, _, name = reference.rpartition(".")
        files[name] = file if "--" in file else f"{file}.py"
    return files


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
    module_spec = None
    for end in range(module.count(".") + 1):
        name = ".".join(module.split(".")[: end + 1])
        module_spec = PathFinder.find_spec(name, places)
        if module_spec is None:
            raise FileNotFoundError(f"there is no module {name} in {folder} or on the module path")
        places = (
            None if module_spec.submodule_search_locations is None else list(module_spec.submodule_search_locations)
        )
    if module_spec is None or module_spec.origin is None:
        raise FileNotFoundError(f"the module {module} has no file")
    return Path(module_spec.origin)


def module_hash(file: Path) -> str:
    """Return the SHA-256 of a file; raises OSError."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def file_of_module(module: str, file: Path, *, package: bool) -> str:
    """Return the name of a module's file in a plan, which is the same wherever the module lies: ``net/layers.py``."""
    path = module.replace(".", "/")
    return f"{path}/{file.name}" if package else f"{path}{''.join(file.suffixes[-1:])}"


def files_hash(files: Mapping[str, str]) -> str:
    """Return one SHA-256 over the names and the hashes of a user's files."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()


def changed_files(files: Mapping[str, str], folder: str) -> list[str]:
    """Return the names of the user's files that have another content now, without running any code.

    A file that is not found is not among them: a module may be one that only a finder of its package finds.
    """
    return [name for name, digest in sorted(files.items()) if hash_now(name, folder) not in (digest, "")]


def hash_now(name: str, folder: str) -> str:
    """Return the SHA-256 of a user's file, given by its name in a plan; empty if it is not found."""
    module = name.partition(".")[0].removesuffix("/__init__").replace("/", ".")
    try:
        return module_hash(module_file(module, folder))
    except OSError:
        return ""


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
