"""Traces of the ranks of several plans for GPUs, dry-run in one process: ``python _dry_traces.py < PLANS``.

Standard input is a JSON list of plans; standard output has one line of JSON per plan, the list of its ranks' traces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planned import plan_of

from partool.plan.rank_trace import RankTrace
from partool.plan.types import Plan

ROOT = Path(__file__).parents[2]
Recorded = tuple[Plan, list[RankTrace]]


def recorded_once(specs: Mapping[str, str], folder: Path) -> dict[str, Recorded]:
    """Return :func:`recorded`, which only the first of several test processes calls; the others read its results.

    ``folder`` is the same in all of them, and does not exist before.
    """
    done = folder / "done.json"
    try:
        folder.mkdir()
    except FileExistsError:
        begun_s = time.monotonic()
        while not done.exists() and time.monotonic() - begun_s < _PATIENCE_S:
            time.sleep(0.1)
        return {name: _read(*found) for name, found in json.loads(done.read_text()).items()}
    found = recorded(specs)
    unfinished = folder / "unfinished.json"
    unfinished.write_text(json.dumps({name: _written(each) for name, each in found.items()}))
    unfinished.replace(done)
    return found


_PATIENCE_S = 150.0


def _written(found: Recorded) -> tuple[Any, Any]:
    plan, traces = found
    return plan.model_dump(mode="json"), [trace.model_dump(mode="json") for trace in traces]


def _read(plan: Any, traces: Any) -> Recorded:
    return Plan.from_json(json.dumps(plan)), [RankTrace.model_validate_json(json.dumps(trace)) for trace in traces]


def recorded(specs: Mapping[str, str]) -> dict[str, Recorded]:
    """Return the plan and the traces of all ranks of each spec."""
    plans = {name: plan_of(text) for name, text in specs.items()}
    asked = json.dumps([plan.model_dump(mode="json") for plan in plans.values()])
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, __file__],
        input=asked,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(plans)
    return {
        name: (plan, [RankTrace.model_validate_json(json.dumps(trace)) for trace in traces])
        for (name, plan), traces in zip(plans.items(), lines, strict=True)
    }


def _main() -> None:
    from partool_runtime.dry import shim

    plans = [Plan.model_validate_json(json.dumps(each)) for each in json.load(sys.stdin)]
    shim.load(Path(os.environ["PARTOOL_HOME"]) / "dry")
    from partool_runtime.dry.__main__ import _install
    from partool_runtime.dry.rank import dry_rank

    _install(plans[0])
    for plan in plans:
        traces = [dry_rank(plan, rank) for rank in range(plan.layout.mesh.world_size)]
        print(json.dumps([trace.model_dump(mode="json") for trace in traces]), flush=True)


if __name__ == "__main__":
    _main()
