"""What is measured of sequence parallelism: cases, jobs of cases, and their start as ranks in networks of their own."""

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
    """A method, and how it is laid out."""

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
        """What each layer attends to."""
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
    """Of each node's cable; 0: ranks share this machine's loopback and compute."""
    flops_per_s: tuple[float, float] = (0.0, 0.0)
    """Rates of the waits that stand for the scores and values of the forward and of the backward pass."""
    latency_s: float = 0.0
    """Of a small message from one rank to another, measured; the prediction takes it."""
    memory: bool = False
    """Whether the most that is allocated in a step is measured instead of times and results."""

    def write(self, path: Path) -> None:
        """Write it for the ranks."""
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
    """What all ranks together say about a case."""

    case: Case
    step_s: list[float] = field(default_factory=list)
    """Of each forward and backward pass: from the agreed start until the last rank was through."""
    sent_bytes: list[int] = field(default_factory=list)
    """Of each, over all cables."""
    waited_s: float = 0.0
    """The most that a rank waited in the place of computing, of one step."""
    peak_bytes: int = 0
    """The most that torch has allocated at once in a step, on the rank that needs most."""
    apart: float = 0.0
    """Largest difference of results and gradients to one process, relative to the largest number."""
    refused: str = ""
    """Why there is none, of a peer that does not take these sizes."""

    @property
    def median_s(self) -> float:
        """Median step."""
        return statistics.median(self.step_s)


def run(job: Job, timeout_s: float = 400, script: Path = RANK) -> list[Found]:
    """Run a job's ranks, over cables if it has a rate, and return what they found."""
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
        # Ranks of a node have one cable, and each has read its counter.
        found.sent_bytes.append(sum(step.get("sent_bytes", 0) for step in steps[:: job.per_node]))
    return found
