"""Stores definitions of add-on types (CRDs) of clusters, and reads definitions from this store or a user's folder.

The store is ``~/.cache/partool/crds/CONTEXT``.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from partool.launch.k8s.validate.reading import UnreadableError, load_documents

IN_CLUSTER = "in-cluster"
"""Name used in place of the context if there is no kubeconfig."""
_ENDINGS = (".yaml", ".yml", ".json")


@dataclass(frozen=True, slots=True)
class Definition:
    """One version of a type that a cluster defines."""

    kind: str
    api_version: str
    """API version, ``group/version``."""
    schema: dict[str, Any]
    """``openAPIV3Schema`` of the version."""
    served: bool
    file: str


def cached_crds(context: str | None = None) -> Path | None:
    """Return the folder with the definitions of a context's cluster; None if ``doctor`` has not stored definitions.

    By default the context is the kubeconfig's current context.
    """
    folder = _folder(current_context() if context is None else context)
    return folder if folder.is_dir() and any(file.suffix in _ENDINGS for file in folder.iterdir()) else None


def store_crds(context: str | None, documents: Iterable[dict[str, Any]]) -> Path:
    """Store ``documents`` in place of the definitions of a context's cluster; returns their folder. Raises OSError."""
    folder = _folder(current_context() if context is None else context)
    folder.mkdir(parents=True, exist_ok=True)
    names = set()
    for document in documents:
        name = quote(str(document["metadata"]["name"]), safe="") + ".json"
        _write(folder / name, json.dumps({"kind": "CustomResourceDefinition", **document}))
        names.add(name)
    for file in folder.iterdir():
        if file.suffix in _ENDINGS and file.name not in names:
            file.unlink()
    return folder


def definitions(folder: Path) -> tuple[Definition, ...]:
    """Return the types that the files in a folder define; raises UnreadableError and OSError."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in _ENDINGS and file.is_file())
    return tuple(each for file in files for each in _of_file(file, file.stat().st_mtime_ns, file.stat().st_size))


def current_context() -> str:
    """Return the current context of the kubeconfig; ``in-cluster`` if there is none."""
    places = os.environ.get("KUBECONFIG") or "~/.kube/config"
    for place in filter(None, places.split(os.pathsep)):
        try:
            content = yaml.safe_load(Path(place).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        name = content.get("current-context") if isinstance(content, dict) else None
        if isinstance(name, str) and name:
            return name
    return IN_CLUSTER


def _folder(context: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
    # The name of a context may be any text, including paths and "..".
    name = (
        quote(context or IN_CLUSTER, safe="").replace(".", "%2E") if set(context) <= {"."} else quote(context, safe="")
    )
    return root / "partool" / "crds" / name


def _write(file: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.replace(temporary, file)


@functools.lru_cache(maxsize=256)
def _of_file(file: Path, modified_ns: int, size_bytes: int) -> tuple[Definition, ...]:
    """Return the types that ``file`` defines. The result is cached until the file's time of change or size differs."""
    text = file.read_text(encoding="utf-8")
    if "CustomResourceDefinition" not in text:
        return ()
    try:
        documents = [json.loads(text)] if file.suffix == ".json" else load_documents(text)
    except ValueError as error:
        raise UnreadableError(f"{file} is not JSON: {error}") from error
    except UnreadableError as error:
        raise UnreadableError(f"{file}: {error}") from error
    return tuple(each for document in documents for each in _of_document(document, file.name))


def _of_document(document: Any, file: str) -> Iterable[Definition]:
    if not isinstance(document, dict):
        return
    for item in document.get("items") or ():  # a list, as kubectl get crd -o yaml prints it
        yield from _of_document(item, file)
    if document.get("kind") != "CustomResourceDefinition":
        return
    spec = document["spec"]
    for version in spec["versions"]:
        schema = (version.get("schema") or {}).get("openAPIV3Schema") or {}
        api_version = f"{spec['group']}/{version['name']}"
        yield Definition(spec["names"]["kind"], api_version, schema, bool(version.get("served", True)), file)
