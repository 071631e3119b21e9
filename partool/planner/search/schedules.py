"""Schedules that a pipeline of a given number of ranks may have under a spec."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from partool.cost.case import SCHEDULES
from partool.planner.problem import Problem
from partool.schedule import check
from partool.spec.pipeline_checks import chunks_of
from partool.strategies.schedules import MOVING_WEIGHTS
from partool.strategies.schedules import SCHEDULES as KNOWN

CHUNKS = (2, 4, 8)
"""Chunks of layers per rank to try with interleaved schedules, in addition to numbers up to :data:`MOST_CHUNKS` that
make all stages even."""
MOST_CHUNKS = 8
WAVES = (1, 2, 4)
"""Numbers of waves to try for Hanayo; its paper evaluates up to 4 (Liu et al., SC'23)."""
MOST_ACTIONS = 6_000
"""Maximum number of actions of schedules that are tried; longer schedules take long to generate and
are used only if the spec sets them."""


class Scheduled(NamedTuple):
    """A schedule and its sizes, without the numbers of ranks and micro-batches."""

    schedule: int
    """Index in :data:`partool.cost.case.SCHEDULES`."""
    chunks: int
    in_flight: int
    only: int = 0
    """The only number of micro-batches that the schedule supports; 0 means any number that its kind allows."""
    pinned: bool = True
    """True if the spec sets the schedule; if False, numbers of micro-batches that are not worth trying are left out."""

    def takes(self, ranks: int, micro_batches: int) -> bool:
        """Return True if the schedule is possible, and worth trying, with this number of micro-batches."""
        if self.only:
            return micro_batches == self.only
        name = SCHEDULES[self.schedule]
        if check(name, ranks, micro_batches, self.chunks, self.in_flight) is not None:
            return False
        if self.pinned or not KNOWN[name].capped:
            return True
        # Waves are for one micro-batch per rank; with more, interleaved schedules idle as little and send less.
        if KNOWN[name].waves and micro_batches > ranks:
            return False
        return (2 + KNOWN[name].split) * ranks * self.chunks * micro_batches <= MOST_ACTIONS


def schedules(problem: Problem, ranks: int) -> tuple[Scheduled, ...]:
    """Return the schedules to try for a pipeline of ``ranks`` ranks, with the sizes that the spec allows."""
    pipeline = problem.spec.parallel.pipeline
    if problem.lists is not None:
        lists = problem.lists
        one = Scheduled(SCHEDULES.index("file"), lists.chunks, 0, lists.micro_batches)
        return (one,) if lists.ranks == ranks else ()
    if ranks == 1:
        alone = pipeline.chunks in ("auto", 1) and pipeline.waves == "auto" and pipeline.in_flight == "auto"
        return (Scheduled(SCHEDULES.index("1f1b"), 1, 0),) if alone and _layers(problem, 1) else ()
    names = SCHEDULES if pipeline.schedule == "auto" else (pipeline.schedule,)
    pinned = any(value != "auto" for value in (pipeline.schedule, pipeline.waves, pipeline.in_flight))
    return tuple(
        Scheduled(SCHEDULES.index(name), chunks, cap, pinned=pinned)
        for name in names
        if isinstance(name, str) and name in KNOWN and not _excluded(problem, name)
        for chunks in _chunks(problem, name, ranks)
        if chunks * ranks <= problem.model.blocks and _layers(problem, chunks * ranks)
        for cap in _caps(problem, name)
    )


def _excluded(problem: Problem, name: str) -> bool:
    """Return True if a setting of the spec rules a schedule out."""
    parallel = problem.spec.parallel
    if parallel.compile == "block" and problem.excludes_compile(SCHEDULES.index(name)):
        return True
    if name not in MOVING_WEIGHTS:
        return False
    if problem.described is not None or problem.mlp_tile or problem.loss_tile or problem.one_bit:
        return True
    if problem.spec.training.sees_positions:
        return True
    # Of the schedules that move weights, weipipe takes as long as the other two and sends less than either.
    alike = parallel.pipeline.schedule == "auto" and name != "weipipe"
    moved = {parallel.offload.optimizer, parallel.offload.parameters, parallel.offload.activations} - {"auto", "none"}
    return alike or parallel.data.zero not in ("auto", 0) or parallel.recompute not in ("auto", "full") or bool(moved)


def _layers(problem: Problem, stages: int) -> bool:
    """Return False if the spec lists layers for another number of stages, or an engine cannot share them evenly."""
    given = problem.stage_layers
    if given is None:
        return not (problem.engine.uniform and problem.model.blocks % stages)
    return len(given) == stages


def _chunks(problem: Problem, name: str, ranks: int) -> Iterator[int]:
    """Yield the numbers of chunks per rank to try with a schedule."""
    pipeline, layers = problem.spec.parallel.pipeline, problem.model.blocks
    pinned = chunks_of(pipeline.model_copy(update={"schedule": name}))
    if pipeline.waves != "auto" and KNOWN[name].stages != "2 per wave":
        return
    given = len(problem.stage_layers) // ranks if problem.stage_layers else 0
    if KNOWN[name].stages == "2 or more":
        useful = [n for n in range(2, MOST_CHUNKS + 1) if n in CHUNKS or layers % (n * ranks) == 0]
        yield from (n for n in ([pinned] if pinned else [given] if given else useful) if n > 1)
    elif KNOWN[name].stages == "2 per wave":
        waves = [2 * n for n in WAVES]
        yield from (n for n in ([pinned] if pinned else [given] if given else waves) if n % 2 == 0)
    elif KNOWN[name].stages == "any":
        yield pinned or given or 1
    elif pinned == KNOWN[name].least_stages:
        yield pinned


def _caps(problem: Problem, name: str) -> list[int]:
    """Return the limits to try for the number of micro-batches in flight; 0 means no limit.

    The list is empty if the spec sets a limit that the schedule does not support.
    """
    pinned = problem.spec.parallel.pipeline.in_flight
    if pinned == "auto":
        return [0]
    return [pinned] if KNOWN[name].capped else []
