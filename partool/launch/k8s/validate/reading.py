"""Strict reading of a manifest's text: a key that occurs twice is an error, as it is for a strict API server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from partool.launch.k8s.validate.manifest import DocumentPart, Manifest

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UnreadableError(Exception):
    """The text is not a manifest; the message says where and why."""


class _Strict(_LOADER):  # type: ignore[misc]  # the class is known at run time
    """YAML loader that refuses keys which occur twice in one mapping."""


def _mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    mapping = loader.construct_mapping(node, deep=True)
    if len(mapping) < len(node.value):
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
            seen.add(key)
    return dict(mapping)


_Strict.add_constructor("tag:yaml.org,2002:map", _mapping)


def load_documents(text: str) -> list[Any]:
    """Return the documents, except empty ones, of a YAML or JSON text; raises UnreadableError."""
    try:
        return [document for document in yaml.load_all(text, _Strict) if document is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise UnreadableError(f"the manifest is not YAML: {error}") from error


def read_manifest(text: str) -> Manifest:
    """Return the manifest in ``text``; raises UnreadableError if there is no document or a document is no mapping."""
    return manifest_of(load_documents(text))


def manifest_of(documents: Sequence[Any]) -> Manifest:
    """Return a manifest of documents that have already been parsed; raises UnreadableError."""
    if not documents:
        raise UnreadableError("the manifest is empty")
    parts = []
    for index, document in enumerate(documents):
        if not isinstance(document, dict):
            raise UnreadableError(f"document {index} of the manifest is no mapping")
        metadata = document.get("metadata")
        name = metadata.get("name") if isinstance(metadata, dict) else None
        parts.append(DocumentPart(f"{document.get('kind')}/{name}", (), document))
    return Manifest(tuple(parts))
