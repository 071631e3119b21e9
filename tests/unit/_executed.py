"""A pipeline's logs as its ranks would have written them, made from a simulation."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from partool.plan.event_log import event_log
from partool.plan.pipeline_log import Executed, pipeline_data
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.schedule import StageTimes, peer, simulate

BEGAN = 1.7e9
"""Unix time of the first step."""


def scaled(times: StageTimes, by: float) -> StageTimes:
    """Return times multiplied by one factor."""
    weight, gradient_s = times.weight_s, times.gradient_send_s
    assert isinstance(times.send_s, float)
    assert gradient_s is None or isinstance(gradient_s, float)
    return dataclasses.replace(
        times,
        forward_s=[by * value for value in times.forward_s],
        backward_s=[by * value for value in times.backward_s],
        weight_s=None if weight is None else [by * value for value in weight],
        send_s=by * times.send_s,
        gradient_send_s=None if gradient_s is None else by * gradient_s,
    )


def executed(plan: Plan, times: StageTimes, gap_s: float = 0.0) -> dict[int, list[Executed]]:
    """Return the actions of each pipeline rank, simulated with these times and ``gap_s`` between actions."""
    schedule = schedule_of(plan.layout)
    longer = [[value + gap_s for value in each] for each in (times.forward_s, times.backward_s)]
    found = simulate(schedule, dataclasses.replace(times, forward_s=longer[0], backward_s=longer[1]))
    done: defaultdict[int, list[Executed]] = defaultdict(list)
    free = [0.0] * schedule.ranks
    for event in found.events:
        start_s = event.start_s + gap_s
        done[event.rank].append(Executed(event.action, start_s, event.stop_s, event.start_s - free[event.rank]))
        free[event.rank] = event.stop_s
    for event in found.transfers:
        to, action = peer(schedule, event.rank, event.action)
        done[event.rank].append(Executed(event.action, event.start_s, event.start_s, 0.0))
        done[to].append(Executed(action, max(event.start_s - 1e-4, 0.0), event.stop_s, 0.0))
    return done


def write_run(
    run_dir: Path,
    plan: Plan,
    times: Callable[[int], StageTimes],
    *,
    steps: range = range(1, 6),
    gap_s: float = 0.0,
    ahead_s: Mapping[int, float] | None = None,
    pipelines: int = 1,
) -> None:
    """Write logs of some steps, step ``n`` with ``times(n)``; ``ahead_s`` maps pipeline ranks to their clock errors."""
    count = plan.layout.mesh.world_size // plan.layout.mesh.pp
    for pipeline in range(pipelines):
        for step in steps:
            for rank, done in executed(plan, times(step), gap_s).items():
                unix_s = BEGAN + 10 * step + (ahead_s or {}).get(rank, 0.0)
                write_event(run_dir, rank * count + pipeline, pipeline_data(step, step > 2, unix_s, done))


def write_event(run_dir: Path, rank: int, data: dict[str, Any]) -> None:
    """Append an event of kind ``pipeline``."""
    path = event_log(run_dir, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    event = {"v": 1, "kind": "pipeline", "t": data["t"] + 1.0, "rank": rank, "data": data}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")


def jittered(times: StageTimes, seed: int) -> StageTimes:
    """Return times that are randomly off by -10 % to +20 %."""
    chance = random.Random(seed)
    return dataclasses.replace(
        times,
        forward_s=[value * chance.uniform(0.9, 1.2) for value in times.forward_s],
        backward_s=[value * chance.uniform(0.9, 1.2) for value in times.backward_s],
    )
