"""A run as trackers show it: its identity, its names, and the plan's outline as their configuration."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from partool.plan.types import Plan
from partool.spec.telemetry import TrackerSpec
from partool.strategies.trackers import TRACKERS

_STORE = "runs"
"""Name of the folder whose subfolders are named by unique ids of runs."""


def tracked_run(plan: Plan, run_dir: Path, tracker: TrackerSpec) -> str:
    """Return, as one line of JSON, what a tracker's process is told (``partool_runtime.trackers.types.TrackedRun``)."""
    record, telemetry = TRACKERS[tracker.name], plan.telemetry
    run_id = _run_id(run_dir)
    return json.dumps(
        {
            "tracker": tracker.name,
            "adapter": record.run,
            "run_id": run_id,
            "run_dir": str(run_dir.absolute()),
            "name": telemetry.name or run_id,
            "project": telemetry.project,
            "group": telemetry.group,
            "tags": telemetry.tags,
            "config": outline_of(plan),
            "uri": tracker.uri,
            "keys": record.keys,
        }
    )


def outline_of(plan: Plan) -> dict[str, Any]:
    """Return the plan's outline: what is trained, on what, how it is divided, and what is predicted.

    The sections ``launch`` and ``environment`` are left out: they say nothing about the training.
    """
    return {
        "job": plan.job,
        "name": plan.name,
        "partool_version": plan.partool_version,
        "plan": plan.hash,
        "model": {"source": plan.model_source, **_numbers(plan.model.model_dump(mode="json"))},
        "data": {"source": plan.data.source, "tokenizer": plan.data.tokenizer},
        "training": _numbers(plan.training.model_dump(mode="json")),
        "optimizer": _numbers(plan.optimizer.model_dump(mode="json")),
        "devices": {name: getattr(plan.devices, name) for name in ("accelerator", "nodes", "per_node")},
        "layout": {
            **plan.layout.mesh._asdict(),
            "zero": plan.layout.data.zero,
            "micro_batch": plan.layout.micro_batch,
            "accumulation": plan.layout.derived.accumulation,
        },
        "predicted": {
            "step_time_s": plan.prediction.time.step_time_s,
            "memory_bytes": plan.prediction.memory.total_bytes,
            "tokens_per_s": plan.prediction.time.tokens_per_s,
        },
    }


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values that are one number or word: lists per layer are no settings to compare runs by."""
    kept = {name: _numbers(value) if isinstance(value, dict) else value for name, value in values.items()}
    return {name: value for name, value in kept.items() if value not in (None, {}) and not isinstance(value, list)}


def _run_id(run_dir: Path) -> str:
    """Return an id that all attempts of a run share and no other run has: that of the store, or one of the folder."""
    run_dir = run_dir.absolute()
    if run_dir.parent.name == _STORE:
        return run_dir.name
    return f"{run_dir.name}-{hashlib.sha256(str(run_dir).encode()).hexdigest()[:8]}"
