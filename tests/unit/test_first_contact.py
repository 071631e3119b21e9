"""The first contact with GPUs: cases that hang are found, the others are run, and each fault is named."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import first_contact

HANGS_AT_B = """
import faulthandler, json, os, sys, time
job = json.loads(open(sys.argv[1]).read())
found = {}
for name in job["plans"]:
    faulthandler.dump_traceback_later(job["hang_s"], exit=True)
    if name == "b":
        time.sleep(600)
    found[name] = {"losses": [1.0, 0.5], "groups": {"collective": 1}, "host_waits": 1}
    open(sys.argv[2], "w").write(json.dumps(found))
"""


@pytest.mark.timeout(60)
def test_a_case_that_hangs_costs_only_its_own_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "rank.py"
    script.write_text(HANGS_AT_B)
    monkeypatch.setattr(first_contact, "RANK", script)
    monkeypatch.setattr(first_contact, "HANG_S", 1.0)
    plans = {name: tmp_path / name for name in "abc"}
    found = first_contact.run_all(plans, tmp_path / "round", 2, {}, time.monotonic() + 40)
    assert found["a"]["losses"] == found["c"]["losses"] == [[1.0, 0.5]] * 2
    assert any("rank.py" in line for line in found["b"]["failed"]), "the stack is shown"
    late = first_contact.run_all(plans, tmp_path / "late", 2, {}, time.monotonic())
    assert late == {name: {"not_run": "the time is up"} for name in "abc"}


@pytest.mark.timeout(120)
def test_cases_on_two_ranks_of_a_cpu_show_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step runs, groups are those of the planner, and losses are the same for every way to train."""
    some = ("zero 3", "optimizer on the host", "ring", "zb-v", "weipipe")
    every = first_contact.cases(2)
    monkeypatch.setattr(first_contact, "cases", lambda ranks: {name: every[name] for name in some})
    monkeypatch.setattr(first_contact, "ROUNDS", {"as usual": {}})
    result = first_contact.contact("cpu", 2, 100.0, tmp_path)
    assert (result["wrong"], result["not_planned"]) == ([], {})
    assert set(result["rounds"]["as usual"]) == {*some, "contexts"}


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_every_case_has_a_plan(ranks: int) -> None:
    for name, parallel in first_contact.cases(ranks).items():
        plan, errors = first_contact.plan_of(parallel, ranks, "cpu")
        assert plan is not None, (name, errors)
        assert plan.layout.mesh.world_size == ranks


def faults(result: dict[str, Any]) -> list[str]:
    """Return what is wrong with the second of two cases."""
    plan, _ = first_contact.plan_of(first_contact.cases(2)["zero 3"], 2, "cpu")
    assert plan is not None
    good = {"losses": [[5.0, 4.0]] * 2, "groups": [{"collective": 1}] * 2, "host_waits": [1, 1]}
    return first_contact.wrong({"as usual": {"one": good, "two": good | result}}, {"one": plan, "two": plan})


def test_faults_are_named() -> None:
    assert faults({}) == []
    assert faults({"losses": [[5.0, 4.2]] * 2}) == ["as usual, two: losses [5.0, 4.2] instead of [5.0, 4.0]"]
    (groups,) = faults({"groups": [{"collective": 1}, {"collective": 1, "wires": 2}]})
    assert groups.endswith("groups {'collective': 1, 'wires': 2}, the planner counts {'collective': 1}")
    assert faults({"host_waits": [1, 2]}) == ["as usual, two: the host waits 2 times in a step"]
    assert faults({"failed": ["a line"]}) == ["as usual, two: hangs or fails"]
    assert first_contact.contexts_wrong(["7, GPU-a, 534", "7, GPU-b, 534", "8, GPU-b, 9000"]) == [
        "process 7 has contexts on 2 devices"
    ]
