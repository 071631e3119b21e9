"""Keys of plans of this version that have moved since; older plans are read with the new ones."""

from __future__ import annotations

import json
from typing import Any


def with_moved_keys(text: str) -> str:
    """Return a plan's JSON with ``telemetry.trackers`` in place of ``launch.tensorboard``, which 0.1.0 wrote."""
    if '"tensorboard"' not in text:
        return text
    try:
        plan = json.loads(text)
    except (ValueError, RecursionError):  # said by whoever reads the plan
        return text
    if not isinstance(plan, dict):
        return text
    moved = [_move(section) for section in (plan, plan.get("spec")) if isinstance(section, dict)]
    return json.dumps(plan) if any(moved) else text


def _move(section: dict[str, Any]) -> bool:
    launch = section.get("launch")
    if not isinstance(launch, dict) or "tensorboard" not in launch:
        return False
    if launch.pop("tensorboard") is True:
        section.setdefault("telemetry", {"trackers": [{"name": "tensorboard"}]})
    return True
