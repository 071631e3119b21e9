"""Differences between what two plans would run."""

from __future__ import annotations

import json
from typing import Any

from partool.plan.types import Plan
from partool.spec.numbers import GIB
from partool.spec.runs import in_runs


def differences(old: Plan, new: Plan) -> list[str]:
    """Return a line such as ``layout.data.zero: 1 → 2`` for each value that decides what runs and that differs."""
    # If the tensor ranks differ, so does the partition of every parameter: one line each would be noise.
    same_ranks = _tensor(old) == _tensor(new)
    before, after = (flat(plan.deciding() | {"partition": _partition(plan, same_ranks)}) for plan in (old, new))
    keys = list(dict.fromkeys([*before, *after]))
    return [
        f"{key}: {shown(before.get(key))} → {shown(after.get(key))}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def _tensor(plan: Plan) -> tuple[object, ...]:
    layout = plan.layout
    return layout.mesh.tp, layout.tensor.inner, layout.tensor.sequence_norms, plan.model, plan.hf, plan.module


def _partition(plan: Plan, shown: bool) -> dict[str, str]:
    """Return parameter name → a text on how the tensor ranks share the parameter; empty unless ``shown``."""
    if not shown:
        return {}
    texts = {}
    for row in plan.partition:
        parts = "; ".join(
            f"dimension {cut.dim}: " + ", ".join("+".join(f"{a}-{b}" for a, b in spans) or "-" for spans in cut.ranges)
            for cut in row.cuts
        )
        texts[row.name] = " ".join(filter(None, (row.style, f"(gradients {row.gradients})", parts)))
    return texts


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key → value for the innermost values of nested dictionaries; lists count as values."""
    if not isinstance(value, dict) or not value:
        return {prefix: value}
    pairs = [flat(inner, f"{prefix}.{key}" if prefix else key) for key, inner in value.items()]
    return {key: inner for pair in pairs for key, inner in pair.items()}


def shown(value: Any) -> str:
    """Return a value as one line of text; in a long list, equal neighbours are written as one entry and the count."""
    if isinstance(value, list) and len(value) > 3:
        runs = in_runs([json.dumps(item, ensure_ascii=False) for item in value])
        return runs[0] if len(runs) == 1 else f"[{', '.join(runs)}]"
    return json.dumps(value, ensure_ascii=False)


def moved_inputs(old: Plan, new: Plan) -> list[str]:
    """Return the names of inputs (spec, catalog, model configuration, ...) that differ from the old plan's inputs."""
    names = dict.fromkeys([*old.inputs, *new.inputs])
    moved = [name for name in names if old.inputs.get(name) != new.inputs.get(name)]
    if old.partool_version != new.partool_version:
        moved.append(f"partool ({old.partool_version} → {new.partool_version})")
    return moved


def verified_change(old: Plan, new: Plan) -> str:
    """Return in words which of two plans holds a dry run, which corrects its memory; empty if both do, or neither."""
    if (old.verification is None) is (new.verification is None):
        return ""
    which, verified, other = ("new", new, old) if old.verification is None else ("old", old, new)
    executed, predicted = (plan.prediction.memory.total_bytes / GIB for plan in (verified, other))
    return f"only the {which} one was dry-run: {executed:.2f} GiB by its dry run, {predicted:.2f} GiB predicted"


def predictions(old: Plan, new: Plan) -> list[tuple[str, float, float]]:
    """Return predicted figures of both plans as (name, old, new): step time and memory, then each of their terms."""
    rows = [("step_time_s", old.prediction.time.step_time_s, new.prediction.time.step_time_s)]
    rows += [("memory_bytes", float(old.prediction.memory.total_bytes), float(new.prediction.memory.total_bytes))]
    for prefix, before, after in (
        ("time", old.prediction.time.terms_s, new.prediction.time.terms_s),
        ("memory", old.prediction.memory.terms_bytes, new.prediction.memory.terms_bytes),
    ):
        for name in dict.fromkeys([*before, *after]):
            first, second = float(before.get(name, 0.0)), float(after.get(name, 0.0))
            if first or second:
                rows.append((f"{prefix}.{name}", first, second))
    return rows
