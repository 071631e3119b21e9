"""Measurements of tensor parallelism: cases, jobs of cases, and merging the ranks' records."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _start import start_ranks

sys.path.append(str(Path(__file__).parents[1]))
from layouts import laid

from partool.layout.tensor import own_partition
from partool.plan.layout import Mesh
from partool.plan.types import Plan

RANK = Path(__file__).with_name("_tensor_rank.py")
ENGINES = ("partool", "hooked", "dtensor", "deepspeed")
"""Engines: the trainer, the trainer with exchanges in a group of one rank, and peers."""


@dataclass(frozen=True)
class Case:
    """An engine that makes the step, and its settings."""

    title: str
    engine: str = "partool"
    """One of :data:`ENGINES`."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the plan's layout, for partool."""
    plan: str = ""
    """Plan as JSON; empty: the job's plan with the fields of ``layout``."""


@dataclass(frozen=True)
class Job:
    """Cases that run in turn in one set of processes."""

    cases: tuple[Case, ...]
    plan: str
    """Plan of one rank as JSON: model, shapes, optimizer."""
    ranks: int = 2
    hf: str = ""
    """Folder of the Hugging Face model that DeepSpeed trains."""
    rounds: int = 1
    steps: int = 1
    """Steps of each case in each round."""
    losses: int = 0
    """Number of steps whose losses are compared; 0: measure times instead."""
    extra_path: str = ""
    """Folder with packages that only a peer needs."""

    def write(self, path: Path) -> None:
        """Write the job for the ranks."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Job:
        """Read what :meth:`write` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return Job(**(data | {"cases": tuple(Case(**case) for case in data["cases"])}))

    def case_plan(self, case: Case) -> Plan:
        """Return the plan of a case: the job's, on tensor ranks alone unless the case's layout says otherwise."""
        if case.plan:
            return Plan.from_json(case.plan)
        plan = Plan.from_json(self.plan)
        fields = dict(case.layout)
        layout = laid(plan.layout, mesh=Mesh(**fields.pop("mesh", {"tp": self.ranks})), **fields)
        partition = own_partition(plan.model, layout.mesh.tp, layout.tensor.inner, layout.tensor.sequence_norms)
        return plan.model_copy(update={"layout": layout, "partition": partition})


@dataclass
class Found:
    """Merged records of all ranks for a case."""

    case: Case
    step_s: list[float]
    """Seconds of each step until the last rank was done."""
    losses: list[float]
    """Loss of each compared step, in nats."""

    @property
    def median_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step_s)


def run(job: Job, timeout_s: float = 600) -> list[Found]:
    """Run a job's ranks; return the merged results."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job.write(folder / "job.json")
        start_ranks(RANK, folder, job.ranks, timeout_s, environment={"DS_ACCELERATOR": "cpu"})
        records = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(job.ranks)]
    return [
        Found(case, [max(each) for each in zip(*(r["step_s"][at] for r in records), strict=True)], losses)
        for at, (case, losses) in enumerate(zip(job.cases, records[0]["losses"], strict=True))
    ]


def make_plan(spec: Mapping[str, Any]) -> str:
    """Return the plan of a spec as JSON."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "spec.yaml"
        path.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-m", "partool", "plan", str(path), "--out", str(path.with_name("plan.json"))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
        return path.with_name("plan.json").read_text(encoding="utf-8")


def ratio(ours: Found, peer: Found) -> float:
    """Return the median over the ratios of neighbouring steps."""
    return statistics.median(a / b for a, b in zip(ours.step_s, peer.step_s, strict=True))


def together(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return one record per case: its median, against the first case's."""
    return [
        {
            "case": each.case.title,
            "engine": each.case.engine,
            "median_s": each.median_s,
            "of_first_median": ratio(each, found[0]),
            "steps_s": each.step_s,
        }
        for each in found
    ]
