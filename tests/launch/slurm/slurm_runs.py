"""Plans that train on the tests' cluster, and partool's commands about them, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch_helpers import trainable_plan, wait_until
from layouts import laid
from patience import PATIENCE
from slurm_cluster import Cluster

from partool.launch.store import Run
from partool.plan.layout import Mesh
from partool.plan.types import CheckpointSpec, Plan

TEXT = "the quick brown fox jumps over the lazy dog\n" * 500
PATIENCE_S = 200.0 * PATIENCE
"""The machine may be busy with other things."""


def cluster_plan(
    folder: Path, steps: int, nodes: int = 2, per_node: int = 2, slurm: dict[str, Any] | None = None, **launch: Any
) -> Plan:
    """Return a plan that trains for so many steps on parts of nodes; keywords are fields of ``launch``."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    world = nodes * per_node
    section = {"exclusive": False, "time": "10"} | (slurm or {})
    plan = trainable_plan(text, steps, target="slurm", slurm=section, **launch)
    return plan.model_copy(
        update={
            "devices": plan.devices.model_copy(update={"nodes": nodes, "per_node": per_node}),
            "layout": laid(plan.layout, mesh=Mesh(dp_shard=world)),
            "training": plan.training.model_copy(update={"global_batch": 2 * world}),
            "checkpoint": CheckpointSpec(every=0),
        }
    )


@dataclass(frozen=True)
class Login:
    """A login node: the cluster's commands, and a folder with the runs."""

    cluster: Cluster
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of partool's commands here."""
        return self.cluster.environment | {"PARTOOL_HOME": str(self.folder / "home")}

    def partool(self, *arguments: str | Path, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command in a fresh process."""
        command = [sys.executable, "-m", "partool", *map(str, arguments)]
        done = subprocess.run(
            command, env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert code is None or done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Begin a command; what it says is kept."""
        command = [sys.executable, "-m", "partool", *arguments]
        return subprocess.Popen(
            command, env=self.environment, cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def write(self, plan: Plan, name: str = "dummy") -> Path:
        """Write a plan under a name; return its file."""
        file = self.folder / f"{name}.json"
        file.write_text(plan.model_copy(update={"name": name}).to_json())
        return file

    def launch(self, plan: Plan, name: str = "dummy", *options: str) -> Run:
        """Submit a plan."""
        self.partool("launch", self.write(plan, name), *options)
        return self.newest(name)

    def newest(self, name: str) -> Run:
        """Return the newest run of a name."""
        runs = [Run(path) for path in (self.folder / "home/runs").iterdir() if Run(path).goes_by(name)]
        return max(runs, key=lambda run: run.path.stat().st_mtime)

    def status(self, run: Run) -> dict[str, Any]:
        """Return what ``partool status`` says."""
        answer: dict[str, Any] = json.loads(self.partool("status", run.id, "--output", "json").stdout)
        return answer

    def wait(self, run: Run, *states: str) -> dict[str, Any]:
        """Wait until the run is in one of these states; return the last status."""
        end = time.monotonic() + PATIENCE_S
        seen = ""
        while True:
            assert time.monotonic() < end, f"{run.id} is still {seen}\n{output(run)}"
            now = self.cluster.run("squeue", "-h", "-t", "all", "-j", self.job_id(run), "-o", "%i %T")
            if now != seen and (status := self.status(run))["state"] in states:  # a process of its own: seldom
                return status
            seen = now
            time.sleep(0.5)  # each question starts three processes, which other tests would wait for

    def job_id(self, run: Run) -> str:
        """Return the job's number."""
        submission = run.submission()
        assert submission is not None
        return submission.details["job_id"]

    def job(self, run: Run) -> dict[str, str]:
        """Return what scontrol says about the job."""
        words = self.cluster.run("scontrol", "show", "job", "-o", self.job_id(run)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)


def output(run: Run) -> str:
    """Return the end of what the job's script and the agents said."""
    files = [*run.path.glob("logs/slurm-*.out"), *run.path.glob("logs/agent*.log")]
    return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-3000:]}" for file in files)


def steps(run_dir: Path, rank: int = 0) -> list[tuple[int, float]]:
    """Return number and loss of every step that a rank has noted, in the order of its notes."""
    file = run_dir / f"events/rank-{rank}.jsonl"
    if not file.exists():
        return []
    events = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return [(event["data"]["step"], event["data"]["loss"]) for event in events if event["kind"] == "step"]


def wait_for_step(run: Run, step: int, still: Callable[[], object] = lambda: None) -> None:
    """Wait until rank 0 has trained so many steps."""

    def reached() -> bool:
        still()
        return bool(steps(run.path)) and steps(run.path)[-1][0] >= step

    wait_until(reached, f"step {step} of {run.id}", PATIENCE_S)


def processes_in(folder: Path) -> list[str]:
    """Return the processes of this machine, the nodes' included, that name the run's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name == str(os.getpid()):
            continue
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in command:
            found.append(command.replace(b"\0", b" ").decode(errors="replace"))
    return found
