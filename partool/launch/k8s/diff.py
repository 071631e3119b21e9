"""Compares rendered objects with a cluster's objects.

A server adds defaults, bookkeeping and changes by webhooks to an object. Only rendered fields are compared, so these
additions do not show. A field that was rendered earlier and is no longer rendered shows only in lists whose entries
have names (variables, mounts, volumes, containers).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import yaml

Document = dict[str, Any]

_INJECTED = ("kube-api-access-", "istio-", "linkerd-")
_KEYS = ("name", "mountPath", "containerPort")


def same_fields(live: Any, rendered: Any) -> Any:
    """Return ``live``, the cluster's value, reduced to the fields that ``rendered`` also has."""
    if isinstance(rendered, dict) and isinstance(live, dict):
        return {name: same_fields(live[name], value) for name, value in rendered.items() if name in live}
    if isinstance(rendered, list) and isinstance(live, list):
        return _entries(live, rendered)
    return live


def _entries(live: list[Any], rendered: list[Any]) -> list[Any]:
    key = next((key for key in _KEYS if rendered and all(isinstance(e, dict) and key in e for e in rendered)), None)
    if key is None:
        paired = [same_fields(value, rendered[at]) if at < len(rendered) else value for at, value in enumerate(live)]
        # tolerations that clusters add to every pod come after the rendered ones
        return paired[: len(rendered)] if _are_tolerations(rendered) else paired
    wanted = {entry[key]: entry for entry in rendered}
    kept = [entry for entry in live if not str(entry.get(key, "")).startswith(_INJECTED)]
    return [same_fields(entry, wanted.get(entry.get(key), entry)) for entry in kept]


def _are_tolerations(entries: list[Any]) -> bool:
    return bool(entries) and all(isinstance(entry, dict) and {"operator", "effect"} & entry.keys() for entry in entries)


def renamed(value: Any, old: str, new: str) -> Any:
    """Return a copy of ``value`` in which the run name ``old`` is replaced by ``new`` in every text."""
    if isinstance(value, dict):
        return {renamed(name, old, new): renamed(each, old, new) for name, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, old, new) for each in value]
    return value.replace(old, new) if isinstance(value, str) else value


def unified(live: Document | None, rendered: Document, origin: str) -> str:
    """Return the unified diff from ``live`` to ``rendered``; empty if the documents are equal."""
    before = [] if live is None else _lines(same_fields(live, rendered))
    after = _lines(rendered)
    name = f"{rendered['kind']}/{rendered['metadata']['name']}"
    return "".join(difflib.unified_diff(before, after, f"cluster: {origin}", f"rendered: {name}"))


class _Dumper(yaml.SafeDumper):
    """YAML writer that writes texts of several lines as blocks, and repeated values in full."""

    def ignore_aliases(self, data: object) -> bool:
        """Return True, so that no YAML anchor is written: an anchor in only one document would show as a difference."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(str, _text)


def _lines(document: Document) -> Sequence[str]:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=True, width=1000).splitlines(keepends=True)
