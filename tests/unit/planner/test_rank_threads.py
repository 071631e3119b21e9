"""Threads of ranks: never more than the cores of their container, in manifests, in plans and in the agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from planned import plan_of

from partool.catalog.machine import available_cores, this_machine
from partool.plan.run import rank_environment
from partool.render.k8s.resources import resources
from partool.spec.targets.k8s.rules import quantity

SPEC = """
model: {layers: 2, hidden: 64, heads: 4, vocab: 256}
data: python-stdlib
hardware: {accelerator: cpu, per_node: 1}
launch: {target: k8s, image: "registry/train:1"}
"""


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("hardware.per_node=2",),
        ("launch.k8s.cpu=1",),
        ("launch.k8s.cpu=1500m",),
        ("hardware.host_cores=2",),
        ("hardware.host_cores=2", "hardware.per_node=2"),
    ],
)
def test_threads_stay_within_the_containers_cores(overrides: tuple[str, ...]) -> None:
    plan = plan_of(SPEC, *overrides)
    cores, ranks = quantity(resources(plan)["limits"]["cpu"]), plan.devices.per_node
    [threads] = [int(each.value) for each in plan.environment if each.name == "OMP_NUM_THREADS"]
    assert threads == plan.devices.threads_per_rank
    assert threads == 1 or threads * ranks <= cores


def test_the_default_limit_is_one_core_for_each_thread() -> None:
    plan = plan_of(SPEC, "hardware.per_node=1")
    assert plan.devices.threads_per_rank == this_machine().cores
    assert resources(plan)["limits"]["cpu"] == str(this_machine().cores)


def test_fewer_cores_are_priced_as_fewer() -> None:
    whole, half = plan_of(SPEC), plan_of(SPEC, f"launch.k8s.cpu={500 * this_machine().cores}m")
    assert half.devices.achievable_flops == pytest.approx(0.5 * whole.devices.achievable_flops)
    assert half.prediction.time.step_time_s > 1.3 * whole.prediction.time.step_time_s
    stated = ("hardware.achievable_tflops=1", "hardware.memory_gb_per_s=10")
    whole, half = plan_of(SPEC, *stated), plan_of(SPEC, *stated, "launch.k8s.cpu=500m")
    assert half.devices.achievable_flops == whole.devices.achievable_flops == 1e12
    assert half.devices.memory_bytes_per_s == whole.devices.memory_bytes_per_s


def test_slurms_cores_per_task_count_too() -> None:
    plan = plan_of(SPEC, "launch={target: slurm, slurm: {cpus_per_task: 1}}")
    assert plan.devices.threads_per_rank == 1


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "100000 100000\n"}, 1),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_containers_quota_limits_the_cores(tmp_path: Path, files: dict[str, str], cores: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == cores or cores is None
    if cores is None:
        assert available_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_the_agent_gives_ranks_no_more_threads_than_it_has_cores() -> None:
    """A plan for more cores than this process has: the plan's own variable does not win."""
    plan = plan_of(SPEC)
    more = plan.devices.model_copy(update={"threads_per_rank": 4096})
    variable = plan.environment[0].model_copy(update={"name": "OMP_NUM_THREADS", "value": "4096"})
    plan = plan.model_copy(update={"devices": more, "environment": (variable,)})
    assert rank_environment(plan)["OMP_NUM_THREADS"] == str(available_cores())
    code = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from partool.plan.run import rank_environment; from partool.plan.types import Plan\n"
        "print(rank_environment(Plan.from_json(sys.stdin.read()))['OMP_NUM_THREADS'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=plan.to_json(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"
    mine = plan.model_copy(update={"launch": plan.launch.model_copy(update={"env": {"OMP_NUM_THREADS": "7"}})})
    assert rank_environment(mine)["OMP_NUM_THREADS"] == "7"
