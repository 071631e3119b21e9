"""Ranks that the agent started run on the cores it assigned."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from launch_helpers import HERE, make_plan, ranks_environment
from patience import PATIENCE

CORES = sorted(os.sched_getaffinity(0))
pytestmark = [
    pytest.mark.skipif(len(CORES) < 2, reason="one core leaves nothing to choose"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system call numbers"),
]


def machine(root: Path) -> None:
    """Write sysfs of a machine with two NUMA nodes with one core of this machine each; only node 0 has memory."""
    node = root / "sys/devices/system/node"
    for number, core in enumerate(CORES[:2]):
        (node / f"node{number}").mkdir(parents=True)
        (node / f"node{number}/cpulist").write_text(f"{core}\n")
    (node / "has_memory").write_text("0\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/status").write_text(f"Cpus_allowed_list:\t{CORES[0]},{CORES[1]}\nMems_allowed_list:\t0\n")


def started(tmp_path: Path, ranks: int, numa: str) -> tuple[list[tuple[list[int], dict[str, str]]], str]:
    """Return the cores and the partool variables of each rank of a finished run, and the agent's messages."""
    machine(tmp_path / "machine")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "plan.json").write_text(make_plan(ranks, numa=numa).to_json())
    (run_dir / "script.json").write_text("{}")
    process = subprocess.run(
        [sys.executable, str(HERE / "numa_agent.py"), str(run_dir / "plan.json"), "--run-dir", str(run_dir)],
        env=ranks_environment(PARTOOL_TEST_ROOT=str(tmp_path / "machine")),
        capture_output=True,
        text=True,
        timeout=60 * PATIENCE,
    )
    assert process.returncode == 0, process.stderr
    found = [json.loads((run_dir / f"start-{rank}-1.json").read_text()) for rank in range(ranks)]
    told = ("PARTOOL_CPUS", "PARTOOL_MEMORY_NODE", "PARTOOL_MEMORY_POLICY")
    return [
        (start["cores"], {name: start["env"][name] for name in told if name in start["env"]}) for start in found
    ], process.stderr


def test_each_rank_runs_on_the_cores_it_was_given(tmp_path: Path) -> None:
    (first, second), errors = started(tmp_path, 2, "auto")
    assert first == (
        [CORES[0]],
        {"PARTOOL_CPUS": str(CORES[0]), "PARTOOL_MEMORY_NODE": "0", "PARTOOL_MEMORY_POLICY": "preferred"},
    )
    assert second == ([CORES[1]], {"PARTOOL_CPUS": str(CORES[1])})
    assert errors == ""


@pytest.mark.long
def test_none_leaves_ranks_alone(tmp_path: Path) -> None:
    ranks, errors = started(tmp_path, 2, "none")
    assert ranks == [(CORES, {})] * 2
    assert errors == ""


@pytest.mark.long
def test_shares_that_would_differ_are_said(tmp_path: Path) -> None:
    ranks, errors = started(tmp_path, 3, "auto")
    assert ranks == [(CORES, {})] * 3
    assert errors == "partool: note: 3 of 3 ranks are not bound to cores: " + (
        "3 ranks cannot share 2 memory nodes evenly\n"
    )
