"""Records plans of awkward specs in ``golden/plans.json``: ``python tests/unit/_golden.py`` writes it anew.

Layouts, predicted bytes and seconds, and the codes and places of findings; wording is not recorded. The planning
machine is fixed: two cores with the memory and speed set below.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from _golden_specs import names, text_of

from partool.catalog import devices, hardware, profile
from partool.catalog.machine import Machine
from partool.plan.data_files import PYTHON_STDLIB
from partool.planner import PlanResult, data_counts, make_plan
from partool.planner.rules.data_size import count_tokens
from partool.spec import load_text
from partool.spec.data import DataSpec

RECORD = Path(__file__).parent / "golden" / "plans.json"


@contextmanager
def fixed_machine() -> Iterator[None]:
    """Plan as on one fixed machine, whatever hardware and calibration this one has."""
    fixed = Machine("cpu", 0, 2, 16 * 2**30)
    with pytest.MonkeyPatch.context() as patch:
        for module in (devices, hardware, profile):
            patch.setattr(module, "this_machine", lambda: fixed)
        patch.setattr(devices, "cpu_gflops_per_core", lambda: 50.0)
        patch.setenv("PARTOOL_HOME", "/nonexistent")
        patch.setattr(data_counts, "count_tokens", _counted)
        yield


def _counted(data: DataSpec) -> int:
    """Return the number of tokens; of Python's standard library, which differs between versions, a fixed one."""
    return 12_000_000 if data.source == PYTHON_STDLIB else count_tokens(data)


@cache
def result_of(name: str) -> PlanResult:
    """Return the plan of a spec, if it has one, and all findings; several tests look at one plan."""
    text, folder = text_of(name)
    loaded = load_text(text)
    if loaded.spec is None:
        return PlanResult(None, loaded.diagnostics)
    result = make_plan(loaded.spec, base_dir=folder, default_name="spec")
    return PlanResult(result.plan, [*loaded.diagnostics, *result.diagnostics])


def record_of(name: str) -> dict[str, Any]:
    """Plan one spec; return the figures that must not change."""
    result = result_of(name)
    found = [(one.code, ".".join(map(str, one.path))) for one in result.diagnostics]
    record: dict[str, Any] = {"findings": sorted(found)}
    if result.plan is not None:
        plan = json.loads(result.plan.to_json())
        memory, time = plan["prediction"]["memory"], plan["prediction"]["time"]
        record |= {
            "layout": plan["layout"],
            "memory_bytes": memory["terms_bytes"],
            "host_bytes": memory["host_terms_bytes"],
            "time_s": time["terms_s"],
            "traffic_bytes": time["traffic_bytes"],
            "others": [[one["step_time_s"], one["memory_bytes"]] for one in plan["alternatives"]],
        }
    return record


if __name__ == "__main__":
    with fixed_machine(), ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        every = dict(zip(names(), pool.map(record_of, names()), strict=True))
    RECORD.write_text(json.dumps(every, indent=1, sort_keys=True) + "\n", encoding="utf-8")
