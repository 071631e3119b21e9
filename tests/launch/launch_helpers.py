"""Plans, runs and agents for the launch tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_server import SERVER, Copy
from layouts import laid, new_layout
from patience import PATIENCE

from partool.plan.layout import Mesh
from partool.plan.run import RunStatus, read_status
from partool.plan.types import (
    Devices,
    MemoryPrediction,
    Plan,
    Prediction,
    TimePrediction,
)
from partool.spec.data import DataSpec
from partool.spec.launch import LaunchSpec
from partool.spec.model import ModelConfig, Weights
from partool.spec.training import CheckpointSpec, KernelsSpec, OptimizerSpec, TrainingSpec

HERE = Path(__file__).parent


def make_plan(ranks: int = 2, **launch: Any) -> Plan:
    """Return a plan for the given number of CPU ranks; keywords are fields of ``launch``."""
    return Plan(
        partool_version="0",
        name="dummy",
        model=ModelConfig(layers=1, hidden=8, ffn_hidden=8, heads=1, kv_heads=1, head_dim=8, vocab=8),
        model_source="fields",
        weights=Weights(),
        devices=Devices(
            accelerator="cpu",
            backend="cpu",
            nodes=1,
            per_node=ranks,
            memory_bytes=1 << 30,
            peak_flops=None,
            achievable_flops=1e9,
            memory_bytes_per_s=1e9,
            link_bytes_per_s=1e9,
            fabric_bytes_per_s=1e9,
            threads_per_rank=1,
        ),
        layout=new_layout(
            mesh=Mesh(dp_replicate=ranks),
            zero=0,
            micro_batch=1,
            accumulation=1,
            recompute=("none",),
            compile="none",
            stages=((0, 1),),
        ),
        training=TrainingSpec(global_batch=ranks),
        optimizer=OptimizerSpec(),
        data=DataSpec(source="python-stdlib"),
        kernels=KernelsSpec(),
        checkpoint=CheckpointSpec(),
        launch=LaunchSpec(**launch),
        prediction=Prediction(
            memory=MemoryPrediction(rank=0, terms_bytes={}, total_bytes=0, capacity_bytes=1, fit_probability=1.0),
            time=TimePrediction(
                terms_s={},
                step_time_s=1.0,
                tokens_per_s=1.0,
                model_flops=1.0,
                mfu=None,
                total_s=1.0,
                device_hours=1.0,
                traffic_bytes={},
            ),
            relative_error=1.0,
        ),
        runnable=True,
        spec={},
    )


def trainable_plan(text: Path, steps: int, **launch: Any) -> Plan:
    """Return a plan that the real trainer can run: two layers, two ranks with ZeRO-1, a checkpoint every tenth step."""
    plan = make_plan(2, **launch)
    layout = laid(
        plan.layout,
        mesh=Mesh(dp_shard=2),
        zero=1,
        micro_batch=2,
        recompute=("none", "none"),
        stages=((0, 2),),
    )
    return plan.model_copy(
        update={
            "model": ModelConfig(layers=2, hidden=24, ffn_hidden=40, heads=3, kv_heads=1, head_dim=8, vocab=256),
            "layout": layout,
            "training": TrainingSpec(sequence_length=24, global_batch=4, steps=steps, precision="fp32", log_every=1),
            "data": DataSpec(source=[str(text)], cache=str(text.parent / "cache")),
            "checkpoint": CheckpointSpec(every=10),
        }
    )


Agent = subprocess.Popen[str] | Copy
COPIES: list[Copy] = []
"""Agents that the present test has started as copies, of which the environment of a process tells nothing."""


def start_agent(command: list[str], environment: dict[str, str], *, fresh: bool = False) -> Agent:
    """Start an agent whose command line this is, without the interpreter; a ``fresh`` one loads torch itself."""
    if not fresh:
        COPIES.append(SERVER.start(command, environment))
        return COPIES[-1]
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


class AgentRun:
    """An agent with dummy ranks in a folder of its own."""

    def __init__(self, run_dir: Path, script: dict[str, str], plan: Plan | None = None) -> None:
        self.run_dir = run_dir
        self.script = script
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "plan.json").write_text((plan or make_plan()).to_json())
        (run_dir / "script.json").write_text(json.dumps(script))
        self.process: Agent | None = None
        self.output = ""
        self.errors = ""

    def command(self, resume: bool = False) -> list[str]:
        """Return the agent's command line, without the interpreter."""
        parts = [str(HERE / "dummy_agent.py"), str(self.run_dir / "plan.json")]
        parts += ["--run-dir", str(self.run_dir)]
        return parts + ["--resume"] * resume

    def start(self, resume: bool = False, *, fresh: bool = False, **timing: float) -> AgentRun:
        """Start the agent in a session of its own; a ``fresh`` one loads torch itself; ``timing``: see WaitTimes."""
        environment = ranks_environment(PARTOOL_TEST_TIMING=json.dumps(timing))
        self.process = start_agent(self.command(resume), environment, fresh=fresh)
        return self

    def finish(self, timeout_s: float = 45) -> int:
        """Wait for the agent and return its exit code."""
        assert self.process is not None
        try:
            self.output, self.errors = self.process.communicate(timeout=timeout_s * PATIENCE)
        finally:
            self.process.kill()
        return self.process.returncode

    def wait_for(self, *names: str) -> None:
        """Wait until these files of the run folder exist."""
        wait_until(lambda: all((self.run_dir / name).exists() for name in names), f"{names} in {self.run_dir}")

    def rank_start(self, rank: int, attempt: int = 1) -> Any:
        """Return the record that a rank wrote at its start: pid, resume, env."""
        file = self.run_dir / f"start-{rank}-{attempt}.json"
        wait_until(lambda: file.exists() and file.read_text().endswith("}"), str(file))
        return json.loads(file.read_text())

    @property
    def status(self) -> RunStatus:
        """Content of status.json."""
        return read_status(self.run_dir)

    def survivors(self) -> list[int]:
        """Return the live processes with the run's folder on their command line."""
        return processes_of(self.run_dir)


def ranks_environment(**more: str) -> dict[str, str]:
    """Return an environment in which ranks find the dummy job."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path} | more


def processes_of(run_dir: Path) -> list[int]:
    """Return the live processes with this folder on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(run_dir).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def rank_pid(run_dir: Path, rank: int) -> int:
    """Return the process of a rank, found by its environment; fails the test if there is none."""
    for pid in processes_of(run_dir):
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return pid
    raise AssertionError(f"no process of rank {rank}")


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 45) -> None:
    """Wait for a condition; fails the test if it never holds."""
    end = time.monotonic() + timeout_s * PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)
