"""The first contact with GPUs: cases that hang are found, the others are run, and each fault is named."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
from often import often

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import first_contact

HANGS_AT_B = """
import faulthandler, json, os, signal, sys, time
from pathlib import Path
job, out = json.loads(open(sys.argv[1]).read()), Path(sys.argv[2])
found = {"process": os.getpid(), "contexts": None}
stacks = out.with_suffix(".stack").open("w")

def waits_for_nobody():
    time.sleep(600)

for name in job["plans"]:
    faulthandler.dump_traceback_later(job["hang_s"], file=stacks)
    signal.setitimer(signal.ITIMER_REAL, job["hang_s"] + 2)
    if name == "b":
        waits_for_nobody()
    found[name] = {"losses": [1.0, 0.5], "groups": {"collective": 1}, "host_waits": 1}
    out.write_text(json.dumps(found))
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_case_that_hangs_costs_only_its_own_result(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks show where they wait."""
    script = tmp_path / "rank.py"
    script.write_text(HANGS_AT_B)
    monkeypatch.setattr(first_contact, "RANK", script)
    monkeypatch.setattr(first_contact, "HANG_S", 1.0)
    plans = {name: tmp_path / name for name in "abc"}
    found = first_contact.run_all(plans, tmp_path / "round", ranks, {}, time.monotonic() + 40)
    assert found["a"]["losses"] == found["c"]["losses"] == [[1.0, 0.5]] * ranks
    assert ["waits_for_nobody" in stack[0] for stack in found["b"]["stacks"]] == [True] * ranks
    late = first_contact.run_all(plans, tmp_path / "late", ranks, {}, time.monotonic())
    assert late == {name: {"not_run": "the time is up"} for name in "abc"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "some",
    [
        ("zero 3", "zb-v"),
        pytest.param(("zero 3", "optimizer on the host", "ring", "zb-v", "weipipe"), marks=pytest.mark.long),
    ],
    ids=len,
)
def test_cases_on_two_ranks_of_a_cpu_show_no_fault(
    some: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step runs, groups are those of the planner, and losses are the same for every way to train."""
    every = first_contact.cases(2)
    monkeypatch.setattr(first_contact, "cases", lambda ranks: {name: every[name] for name in some})
    monkeypatch.setattr(first_contact, "ROUNDS", {"as usual": {}})
    result = first_contact.contact("cpu", 2, 100.0, tmp_path)
    assert (result["wrong"], result["not_planned"]) == ([], {})
    assert set(result["rounds"]["as usual"]) == {*some, "contexts"}


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("ranks", often([1, 2, 4, 8], [1]))
def test_every_case_has_a_plan(ranks: int, kind: str) -> None:
    for name, parallel in first_contact.cases(ranks).items():
        plan, errors = first_contact.plan_of(parallel, ranks, kind, "h100-sxm")
        assert plan is not None, (name, errors)
        assert plan.layout.mesh.world_size == ranks


def found_in(result: dict[str, Any]) -> list[str]:
    """Return what is wrong with the second of two cases."""
    plan, _ = first_contact.plan_of(first_contact.cases(2)["zero 3"], 2, "cpu")
    assert plan is not None
    good = {"losses": [[5.0, 4.0]] * 2, "groups": [{"collective": 1}] * 2, "host_waits": [1, 1]}
    rounds = {"as usual": {"one": good, "two": good | result if "losses" in result else result}}
    return first_contact.wrong(rounds, {"one": plan, "two": plan})


def test_faults_are_named() -> None:
    good = {"losses": [[5.0, 4.0]] * 2}
    assert found_in(good) == []
    assert found_in({"losses": [[5.0, 4.2]] * 2}) == ["as usual, two: losses [5.0, 4.2] instead of [5.0, 4.0]"]
    (groups,) = found_in(good | {"groups": [{"collective": 1}, {"collective": 1, "wires": 2}]})
    assert groups.endswith("groups {'collective': 1, 'wires': 2}, the planner counts {'collective': 1}")
    assert found_in(good | {"host_waits": [2, 2]}) == []
    assert found_in(good | {"host_waits": [1, 3]}) == ["as usual, two: the host waits for the device 3 times in a step"]
    assert found_in({"failed": ["a line"]}) == ["as usual, two: hangs or fails"]
    assert found_in({"not_run": "the time is up"}) == ["as usual, two: was not run: the time is up"]


def test_contexts_are_those_of_the_ranks() -> None:
    lines = ["7, GPU-a, 534", "7, GPU-b, 534", "8, GPU-b, 9000", "9, GPU-a, 1", "9, GPU-b, 1", "No devices were found"]
    seen = first_contact.own_contexts(lines, [7, 8])
    assert seen == {"7": ["GPU-a, 534", "GPU-b, 534"], "8": ["GPU-b, 9000"]}
    assert first_contact.wrong({"as usual": {"contexts": seen}}, {}) == [
        "as usual: process 7 has contexts on 2 devices"
    ]
    assert first_contact.own_contexts(lines, [1]) is None
    assert first_contact.own_contexts(None, [7]) is None
