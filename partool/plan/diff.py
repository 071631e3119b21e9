"""What two plans would do differently."""

from __future__ import annotations

import json
from typing import Any

from partool.plan.types import Plan

_NOT_RUN = {"prediction", "alternatives", "reasons", "findings", "inputs", "spec", "partool_version"}


def differences(old: Plan, new: Plan) -> list[str]:
    """Return one line per value that decides what runs and differs, as ``layout.zero: 1 → 2``; none if all agree."""
    before, after = (_flat(plan.model_dump(mode="json", exclude=_NOT_RUN)) for plan in (old, new))
    keys = list(dict.fromkeys([*before, *after]))
    return [
        f"{key}: {_shown(before.get(key))} → {_shown(after.get(key))}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    pairs = [_flat(inner, f"{prefix}.{key}" if prefix else key) for key, inner in value.items()]
    return {key: inner for pair in pairs for key, inner in pair.items()}


def _shown(value: Any) -> str:
    """Return a value in one line; a long list of equal entries as one of them and their number."""
    if isinstance(value, list) and len(value) > 3 and all(item == value[0] for item in value):
        return f"{json.dumps(value[0])} × {len(value)}"
    return json.dumps(value, ensure_ascii=False)
