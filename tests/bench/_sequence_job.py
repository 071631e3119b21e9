"""Measurements of sequence parallelism: cases, jobs of cases, and starting them as ranks in network namespaces."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _pipeline_net import Cables
from _start import start_ranks

from partool.layout.sequence import Spans, shares

RANK = Path(__file__).with_name("_sequence_rank.py")


@dataclass(frozen=True)
class Case:
    """A method and its layout."""

    title: str
    method: str
    order: str = "contiguous"
    inner: int = 1
    teams: int = 1
    inside: str = "teams"

    def shares(self, shape: Shape, ranks: int) -> tuple[Spans, ...]:
        """Return the tokens of each rank."""
        columns = shape.grid[1] if shape.grid else 0
        return shares(shape.length, ranks, self.order, inner=self.inner, columns=columns)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Shape:
    """One attention layer, or two: along the rows and along the columns of a grid."""

    batch: int
    length: int
    queries: int
    keys: int
    head_dim: int
    window: int | None = None
    grid: tuple[int, int] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Attention pattern of each layer."""
        return ("row", "column") if self.grid else ("sliding" if self.window else "full",)


@dataclass(frozen=True)
class Job:
    """Cases that run in turn in one set of processes."""

    shape: Shape
    cases: tuple[Case, ...]
    ranks: int = 4
    rounds: int = 1
    per_node: int = 1
    rate_mbit: float = 0.0
    """Rate of each node's link; 0: ranks share this machine's loopback, and really compute."""
    flops_per_s: tuple[float, float] = (0.0, 0.0)
    """Rates of the waits that replace the scores and values of the forward and of the backward pass."""
    latency_s: float = 0.0
    """Measured latency of a small message between two ranks, used by the prediction."""
    memory: bool = False
    """Whether to measure the peak allocation of a step instead of times and results."""

    def write(self, path: Path) -> None:
        """Write the job for the ranks."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Job:
        """Read what :meth:`write` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        fixed = {
            "shape": Shape(**data["shape"] | {"grid": tuple(data["shape"]["grid"] or ()) or None}),
            "cases": tuple(Case(**case) for case in data["cases"]),
            "flops_per_s": tuple(data["flops_per_s"]),
        }
        return Job(**(data | fixed))


@dataclass
class Found:
    """Merged records of all ranks for a case."""

    case: Case
    step_s: list[float] = field(default_factory=list)
    """Seconds of each forward and backward pass, from the agreed start until the last rank was done."""
    sent_bytes: list[int] = field(default_factory=list)
    """Bytes sent in each step over all links."""
    waited_s: float = 0.0
    """Largest time that a rank waited in place of computing, per step."""
    peak_bytes: int = 0
    """Peak bytes allocated by torch in a step, on the rank that needs most."""
    apart: float = 0.0
    """Largest difference of results and gradients from one process, relative to the largest value."""
    refused: str = ""
    """Reason why a peer has no result, if it does not support these sizes."""

    @property
    def median_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step_s)


def run(job: Job, timeout_s: float = 400, script: Path = RANK) -> list[Found]:
    """Run a job's ranks, over shaped links if it has a rate, and return the merged results."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job.write(folder / "job.json")
        cables = None
        if job.rate_mbit:
            cables = stack.enter_context(Cables(job.ranks, job.rate_mbit, per_node=job.per_node))
        start_ranks(
            script,
            folder,
            job.ranks,
            timeout_s,
            environment=cables.environment if cables else None,
            inside=cables.inside if cables else lambda rank: (),
        )
        records = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(job.ranks)]
    return [_together(case, at, job, records) for at, case in enumerate(job.cases)]


def _together(case: Case, at: int, job: Job, records: list[list[dict[str, Any]]]) -> Found:
    of_ranks = [record[at] for record in records]
    found = Found(case, waited_s=max(one["waited_s"] for one in of_ranks), apart=max(one["apart"] for one in of_ranks))
    found.refused = of_ranks[0].get("refused", "")
    found.peak_bytes = max(one["peak_bytes"] for one in of_ranks)
    for steps in zip(*(one["steps"] for one in of_ranks), strict=True):
        found.step_s.append(max(step["stop_s"] for step in steps) - steps[0]["start_s"])
        # Ranks of a node share one link, and each has read its counter.
        found.sent_bytes.append(sum(step.get("sent_bytes", 0) for step in steps[:: job.per_node]))
    return found
