"""Plans and jobs for the tests of renderers and targets, without the planner."""

from __future__ import annotations

import sys
from pathlib import Path, PurePosixPath
from typing import Any

from layouts import new_layout

from partool.catalog.hardware import resolve_hardware
from partool.plan.layout import Mesh
from partool.plan.types import Devices, Plan, Variable
from partool.render.job import Job
from partool.spec.hardware import HardwareSpec
from partool.spec.launch import LaunchSpec

sys.path.append(str(Path(__file__).parents[1] / "launch"))
from launch_helpers import make_plan

RUN_DIR = PurePosixPath("/shared/team/.partool/runs/llama-12345678")


def launch_plan(
    nodes: int = 2,
    per_node: int = 8,
    accelerator: str = "h100-sxm",
    backend: str = "cuda",
    *,
    name: str = "llama",
    environment: tuple[Variable, ...] = (),
    **launch: Any,
) -> Plan:
    """Return a plan of ``nodes`` nodes; ``launch`` holds fields of the launch section, by default for slurm."""
    plan = make_plan(nodes * per_node)
    devices = _devices(nodes, per_node, accelerator)
    assert devices.backend == backend, f"{accelerator} is {devices.backend}"
    layout = new_layout(
        mesh=Mesh(dp_shard=nodes * per_node),
        zero=2,
        micro_batch=1,
        accumulation=1,
        recompute=("none",),
        compile="none",
        stages=((0, 1),),
    )
    return plan.model_copy(
        update={
            "name": name,
            "devices": devices,
            "layout": layout,
            "environment": environment,
            "launch": LaunchSpec(**{"target": "slurm"} | launch),
        }
    )


def launch_job(plan: Plan, **fields: Any) -> Job:
    """Return the job of a plan; ``fields`` replace run_id, run_dir, tasks, at_once, sizes."""
    run_id = fields.pop("run_id", f"{plan.name[:32].rstrip('-')}-12345678")
    return Job(plan=plan, run_id=run_id, **{"run_dir": RUN_DIR} | fields)


def _devices(nodes: int, per_node: int, accelerator: str) -> Devices:
    if accelerator == "cpu":  # this machine's own figures would differ from place to place
        return make_plan(per_node).devices.model_copy(update={"nodes": nodes, "host_cores": 16})
    spec = HardwareSpec(accelerator=accelerator, nodes=nodes, per_node=per_node)
    resolved = resolve_hardware(spec, "bf16")
    assert resolved.devices is not None, resolved
    return resolved.devices
