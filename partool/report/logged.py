"""Read the pipeline steps in a run's logs; each step has its attempt and the plan that the attempt followed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from partool.plan.event_log import event_log, read_events
from partool.plan.pipeline_log import ExecutedStep, read_pipeline
from partool.plan.record import DamagedRecordError
from partool.plan.run import PLAN_FILE
from partool.plan.schedule import schedule_of
from partool.plan.types import Plan
from partool.schedule import COMPUTE, Schedule, cell

_STAGES, _BATCHES = 10_000, 1_000_000
"""More stages, and micro-batches, than any schedule has."""
UNKNOWN = "a schedule that is not kept"
"""Name shown for a schedule if its plan is not kept, so that only the logs show the schedule."""
Ranks = Mapping[int, ExecutedStep]
"""Pipeline rank → the actions that this rank executed in one step."""


class NothingExecutedError(LookupError):
    """Raised if the run has no executed step to show; the message says why."""


@dataclass(frozen=True)
class Logged:
    """A step that all ranks of a pipeline have logged."""

    ranks: Ranks
    attempt: int
    """Number of the attempt that ran the step; 0 if the logs do not state the number."""
    plan: Plan | None
    """Plan that the attempt followed; None if the plan is not kept."""
    earlier: bool
    """True if ``plan`` is not the run's current plan."""


class _Entry(NamedTuple):
    attempt: int
    plan_hash: str
    world_size: int
    executed: ExecutedStep


def logged_steps(run_dir: Path, plan: Plan, pipeline: int = 0) -> dict[int, Logged]:
    """Return step number → the step, if all ranks of a pipeline logged it; a repeated step counts as last executed.

    ``plan`` is the run's current plan; a run that was resumed with another plan keeps earlier plans next to it.
    ``pipeline`` is the number of the data-parallel replica. Raises :class:`NothingExecutedError` if there is none, and
    :class:`partool.plan.record.DamagedRecordError`.
    """
    first = list(_entries(run_dir, 0, plan))  # rank 0 is the first rank of the first pipeline under every plan
    world_sizes = {entry.plan_hash: entry.world_size for entry in first} | {plan.hash: plan.layout.mesh.world_size}
    shapes = {plan_hash: _shape(run_dir, plan, plan_hash, world) for plan_hash, world in world_sizes.items()}
    if pipeline >= max(count for _, _, count in shapes.values()) or pipeline < 0:
        count = shapes[plan.hash][2]
        raise NothingExecutedError(f"there is no pipeline {pipeline}: the run has {count}, counted from 0")
    steps: dict[int, Logged] = {}
    for plan_hash, (its_plan, pp, count) in shapes.items():
        if pp == 1 or pipeline >= count:
            continue
        executed: dict[tuple[int, int], dict[int, ExecutedStep]] = defaultdict(dict)
        schedule = schedule_of(its_plan.layout) if its_plan is not None else None
        for rank in range(pp):
            for entry in _entries(run_dir, rank * count + pipeline, plan):
                if entry.plan_hash == plan_hash:
                    _check(event_log(run_dir, rank * count + pipeline), entry.executed, schedule)
                    executed[entry.attempt, entry.executed.step][rank] = entry.executed
        for (attempt, step), ranks in sorted(executed.items()):
            if len(ranks) == pp and (step not in steps or steps[step].attempt <= attempt):
                steps[step] = Logged(ranks, attempt, its_plan, plan_hash != plan.hash)
    return steps


def _check(log: Path, executed: ExecutedStep, schedule: Schedule | None) -> None:
    """Raise DamagedRecordError for a step with an action that its schedule, or any schedule, cannot have."""
    stages, micro_batches = (schedule.stages, schedule.micro_batches) if schedule is not None else (_STAGES, _BATCHES)
    for number, one in enumerate(executed.actions):
        # transfers of weights are numbered by the turns of a circle, of which there are more
        most = micro_batches if one.action.kind in COMPUTE else _BATCHES
        if one.action.stage >= stages or one.action.micro_batch >= most:
            limits = f"the schedule has {stages:,} stages and {micro_batches:,} micro-batches"
            place = f"{log}, step {executed.step}: `data.actions[{number}]`"
            raise DamagedRecordError(f"{place} is {cell(one.action)}, and {limits}")


def any_logged(run_dir: Path, plan: Plan) -> bool:
    """Return True if a rank has logged a step under the current plan."""
    ranks = range(plan.layout.mesh.world_size)
    return any(entry.plan_hash == plan.hash for rank in ranks for entry in _entries(run_dir, rank, plan))


def told_schedule(ranks: Ranks) -> Schedule:
    """Return a step's schedule from the logs alone; each action list has the order in which the actions began."""
    lists = tuple(tuple(one.action for one in ranks[rank].actions) for rank in sorted(ranks))
    computed = [(action, rank) for rank, row in enumerate(lists) for action in row if action.kind in COMPUTE]
    weights = any(action.kind == "RECV_FW" for row in lists for action in row)
    arrived = {(action.stage, rank) for rank, row in enumerate(lists) for action in row if action.kind == "RECV_FW"}
    placement = dict.fromkeys(range(max((action.stage for action, _ in computed), default=-1) + 1), 0)
    for action, rank in computed:
        if not weights or (action.stage, rank) not in arrived:  # an owner never receives its weights
            placement[action.stage] = rank
    return Schedule(
        name=UNKNOWN,
        ranks=len(lists),
        micro_batches=max((action.micro_batch for action, _ in computed), default=-1) + 1,
        chunks=max(1, len(placement) // len(lists)),
        placement=tuple(placement.values()),
        lists=lists,
        moves="weights" if weights else "activations",
    )


def _entries(run_dir: Path, rank: int, plan: Plan) -> Iterator[_Entry]:
    """Yield each step that a rank has logged; steps before the first start event belong to the current plan."""
    attempt, plan_hash, world_size = 0, plan.hash, plan.layout.mesh.world_size
    for event in read_events(event_log(run_dir, rank)):
        data = event["data"]
        if event["kind"] == "start":
            attempt, plan_hash = int(data.get("attempt", 0)), str(data.get("plan_hash", plan.hash))
            world_size = int(data.get("world_size", world_size))
        elif event["kind"] == "pipeline":
            try:
                yield _Entry(attempt, plan_hash, world_size, read_pipeline(data))
            except ValueError:  # written by another version
                continue


def _shape(run_dir: Path, plan: Plan, plan_hash: str, world_size: int) -> tuple[Plan | None, int, int]:
    """Return the plan with this hash (None if it is not kept), its number of pipeline ranks and number of pipelines."""
    its_plan = plan if plan_hash == plan.hash else _kept(run_dir, plan_hash)
    if its_plan is not None:
        pp = its_plan.layout.mesh.pp
        return its_plan, pp, its_plan.layout.mesh.world_size // pp
    if not all(event_log(run_dir, rank).is_file() for rank in (0, world_size - 1)):
        return None, 1, 1  # logs are missing, so no step is known whole
    # Ranks that do the same work are the same pipeline rank of different replicas.
    work = [_work(run_dir, plan, plan_hash, rank) for rank in range(world_size)]
    count = work.count(work[0])
    return None, world_size // count, count


def _work(run_dir: Path, plan: Plan, plan_hash: str, rank: int) -> frozenset[tuple[int, int]]:
    """Return (stage, micro-batch) of each forward pass in the first step that a rank logged under a plan."""
    executed = next((entry.executed for entry in _entries(run_dir, rank, plan) if entry.plan_hash == plan_hash), None)
    actions = [one.action for one in executed.actions] if executed else []
    return frozenset((action.stage, action.micro_batch) for action in actions if action.kind == "F")


def _kept(run_dir: Path, plan_hash: str) -> Plan | None:
    """Return the earlier plan with this hash from the numbered files beside the current plan; None if there is none."""
    stem, suffix = PLAN_FILE.rsplit(".", 1)
    for file in sorted(run_dir.glob(f"{stem}-*.{suffix}")):
        try:
            plan = Plan.from_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # of another version, or no plan
            continue
        if plan.hash == plan_hash:
            return plan
    return None
