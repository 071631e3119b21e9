"""The row of a finished attempt in ``measured_runs.csv``, a file next to the runs' folders."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from partool.layout.parameters import count, parameters
from partool.plan.run_rows import COLUMNS, LEAST_STEPS, RUNS_FILE, SOURCE, append_row, term_column
from partool.plan.types import Plan
from partool_runtime.telemetry.summary import TOTAL, mfu

RUNS = "runs"


def write_run_row(
    plan: Plan, run_dir: Path, table: Sequence[Mapping[str, Any]], steps: Sequence[int], ended: str
) -> str | None:
    """Append this attempt's row; return the text of an error, else None, so that an error ends no run.

    ``table`` holds the rows of ``summary.json``, ``steps`` the numbers of the steps from which the medians are
    computed. No row is written for a job that does not train, with fewer than ``LEAST_STEPS`` steps, without a step
    time, or for a run outside a store (``.../runs/<id>``), such as the runs that tests and benchmarks start.
    """
    measured = {(row["section"], row["term"]): row["measured"] for row in table}
    if (
        plan.job != "train"
        or run_dir.parent.name != RUNS
        or len(steps) < LEAST_STEPS
        or not measured.get(("time", TOTAL))
    ):
        return None
    try:
        append_row(run_dir.parent.parent / RUNS_FILE, _row(plan, run_dir, table, steps, ended))
    except OSError as error:
        return f"{run_dir.parent.parent / RUNS_FILE} cannot be written: {error.strerror or error}"
    return None


def _row(
    plan: Plan, run_dir: Path, table: Sequence[Mapping[str, Any]], steps: Sequence[int], ended: str
) -> dict[str, str]:
    columns: dict[str, object] = {}
    for row in table:
        if row["term"] != TOTAL:
            columns[term_column("predicted", row["section"], row["term"])] = row["predicted"]
            columns[term_column("measured", row["section"], row["term"])] = row["measured"]
    total = {row["section"]: row for row in table if row["term"] == TOTAL}
    attempt = os.environ.get("PARTOOL_ATTEMPT", "1")
    columns |= _shared(plan, run_dir, total["time"]["measured"], total["memory"]["measured"])
    columns |= {
        "notes": f"attempt {attempt}, medians of {len(steps)} of its steps {min(steps)} to {max(steps)}; {ended}",
        "stack": "partool",
        "partool_version": plan.partool_version,
        "calibration": plan.inputs.get("calibration", ""),
        "time_scalar": plan.prediction.time_scalar,
        "memory_scalar": plan.prediction.memory_scalar,
        "attempt": attempt,
        "steps": len(steps),
        "predicted_step_time_s": total["time"]["predicted"],
        "predicted_memory_bytes": total["memory"]["predicted"],
        "measured_memory_bytes": total["memory"]["measured"],
    }
    return {name: _text(value) for name, value in columns.items()}


def _shared(plan: Plan, run_dir: Path, step_time_s: float, memory_bytes: float | None) -> dict[str, object]:
    """Return the values, by column name, of the columns that rows of published runs also have."""
    model, devices, layout, training = plan.model, plan.devices, plan.layout, plan.training
    mesh, world = layout.mesh, layout.mesh.world_size
    flops = plan.prediction.time.model_flops
    utilisation = mfu(flops, step_time_s, devices.peak_flops, world)
    values = (
        SOURCE, run_dir.name, time.gmtime().tm_year, _model_name(plan),
        round(count(parameters(model)) / 1e9, 6), model.layers, model.hidden, model.ffn_hidden, model.heads,
        model.kv_heads, model.vocab, training.sequence_length, devices.accelerator, world, devices.per_node,
        f"{devices.link_bytes_per_s / 1e9:.3g} GB/s per rank in the plan",
        "single node" if devices.nodes == 1 else f"{devices.fabric_bytes_per_s / 1e9:.3g} GB/s per rank in the plan",
        training.precision, mesh.dp, mesh.tp, mesh.pp, mesh.cp, layout.expert,
        layout.pipeline.schedule if mesh.pp > 1 else "",
        f"ZeRO-{layout.data.zero}", _shares_norms(plan), _recompute(layout.recompute), layout.micro_batch,
        training.global_batch, step_time_s, flops / step_time_s / world / 1e12,
        None if utilisation is None else 100 * utilisation,
        training.global_batch * training.sequence_length / step_time_s / world,
        None if memory_bytes is None else memory_bytes / 2**30, "",
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def _model_name(plan: Plan) -> str:
    source = plan.model_source
    return source.removeprefix("preset ") if source.startswith("preset ") else plan.name


def _shares_norms(plan: Plan) -> str:
    """Return "yes" if tensor ranks shard the sequence for norms, else "no"; an empty text without tensor ranks."""
    return ("yes" if plan.layout.tensor.sequence_norms else "no") if plan.layout.mesh.tp > 1 else ""


def _recompute(policies: Sequence[str]) -> str:
    kinds = sorted(set(policies))
    return kinds[0] if len(kinds) == 1 else ", ".join(f"{kind}: {policies.count(kind)} layers" for kind in kinds)


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.7g}" if isinstance(value, float) else str(value)
