"""Pipeline measurements: cases, jobs of cases, starting them as ranks, and merging the ranks' records."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _pipeline_model import Shape, Waits
from _pipeline_net import Cables
from _start import start_ranks

from partool.schedule import COMPUTE, Schedule, StageTimes, generate, simulate

RANK = Path(__file__).with_name("_pipeline_rank.py")


@dataclass(frozen=True)
class Case:
    """A schedule and the engine that executes it."""

    engine: str
    """Either ``partool`` or ``torch``."""
    name: str
    micro_batches: int
    chunks: int = 1
    waits: tuple[Waits, ...] = ()
    """Simulated durations per stage; empty if layers really compute."""
    elements: int = 1
    """Number of weights of a stage that waits."""
    label: str = ""

    def schedule(self, ranks: int) -> Schedule:
        """Return the schedule's lists."""
        return generate(self.name, ranks, self.micro_batches, self.chunks)

    @property
    def title(self) -> str:
        """Title of the schedule in tables."""
        if self.label:
            return self.label
        if self.name == "hanayo":
            return f"hanayo W={self.chunks // 2}"
        return f"{self.name} v={self.chunks}" if self.chunks > 1 else self.name

    @property
    def same_stages(self) -> tuple[bool, int, int]:
        """Key that is equal for cases that put the same layers on the same ranks."""
        return self.name in ("hanayo", "zb-v"), self.chunks, self.micro_batches


@dataclass(frozen=True)
class Job:
    """Cases that run in turn in one set of processes."""

    shape: Shape
    cases: tuple[Case, ...]
    rounds: int = 1
    steps: int = 1
    """Steps of each case in each round."""
    real: bool = False
    """Whether layers compute; otherwise stages wait."""
    double: bool = False
    """Whether real layers compute in float64."""
    compare: bool = False
    """Whether to run each case once and compare gradients instead of times."""
    shaped: bool = False
    """Whether each rank has a network namespace of its own."""

    def write(self, path: Path) -> None:
        """Write the job for the ranks."""
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Job:
        """Read what :meth:`write` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        cases = tuple(
            Case(**(case | {"waits": tuple(Waits(**waits) for waits in case["waits"])})) for case in data["cases"]
        )
        return Job(**(data | {"shape": Shape(**data["shape"]), "cases": cases}))


@dataclass
class Found:
    """Merged records of all ranks for a case."""

    case: Case
    step_s: list[float] = field(default_factory=list)
    """Seconds of each step, from the agreed start until the last rank was done."""
    sent_bytes: list[int] = field(default_factory=list)
    """Bytes sent per step over all ranks, if each rank has its own network link."""
    action_s: dict[tuple[str, int], float] = field(default_factory=dict)
    """Median seconds of each kind of compute action of each stage, if the executor reports them."""
    one_way_s: float = 0.0
    """Seconds of one message of an activation's size between two otherwise idle ranks."""

    @property
    def median_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.step_s)

    def simulated_s(self, ranks: int, measured: bool = False, send_s: float | None = None) -> float:
        """Return the simulator's step, from the times of actions as ``measured`` in this run or as set.

        ``send_s`` is the time of a message on a link shared with others; None: the time measured on an idle link.
        """
        schedule = self.case.schedule(ranks)
        split = any(action.kind == "I" for actions in schedule.lists for action in actions)
        stages = range(schedule.stages)
        if measured:
            forward = [self.action_s["F", stage] for stage in stages]
            weight = [self.action_s["W", stage] if split else 0.0 for stage in stages]
            inputs = [self.action_s["I" if split else "B", stage] for stage in stages]
        else:
            forward = [waits.forward_s for waits in self.case.waits]
            weight = [waits.weight_s for waits in self.case.waits]
            inputs = [waits.input_s for waits in self.case.waits]
        whole = [a + b for a, b in zip(inputs, weight, strict=True)]
        one_s = self.one_way_s if send_s is None else send_s
        shared = send_s is not None
        times = StageTimes(forward, whole, weight_s=weight, send_s=one_s, input_s=inputs, shared_links=shared)
        return simulate(schedule, times).makespan_s


def run(job: Job, ranks: int, rate_mbit: float = 0, timeout_s: float = 300) -> tuple[list[Found], list[dict[str, Any]]]:
    """Run a job's ranks, over links of a given rate if any; return the merged results and the raw records."""
    job = dataclasses.replace(job, shaped=rate_mbit > 0)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job.write(folder / "job.json")
        cables = stack.enter_context(Cables(ranks, rate_mbit)) if rate_mbit else None
        start_ranks(
            RANK,
            folder,
            ranks,
            timeout_s,
            environment=cables.environment if cables else None,
            inside=cables.inside if cables else lambda rank: (),
        )
        records = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]
    return [_together(case, at, records) for at, case in enumerate(job.cases)], records


def _together(case: Case, at: int, records: list[dict[str, Any]]) -> Found:
    found = Found(case, one_way_s=max(record["one_way_s"] for record in records[:2]))
    times = defaultdict(list)
    for steps in zip(*(record["steps"][at] for record in records), strict=True):
        found.step_s.append(max(step["stop_s"] for step in steps) - steps[0]["start_s"])
        if "sent_bytes" in steps[0]:
            found.sent_bytes.append(sum(step["sent_bytes"] for step in steps))
        for step in steps:
            for kind, stage, _, start, stop in step.get("done", ()):
                if kind in COMPUTE:
                    times[kind, stage].append(stop - start)
    found.action_s = {key: statistics.median(values) for key, values in times.items()}
    return found
