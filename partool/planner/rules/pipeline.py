"""Rules about pipelines that need the model, the devices, or the schedule's action lists."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.plan.schedule import splits_backward
from partool.planner.problem import Problem, divisors
from partool.schedule import Schedule, ScheduleTextError, cell, check, from_text, nearest, problems, rows_of
from partool.spec.parallel import ScheduleFile
from partool.spec.pipeline_checks import check_layers, chunks_of
from partool.spec.spec import Spec
from partool.strategies.schedules import SCHEDULES

_PATH = ("parallel", "pipeline")


def stages(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the spec sets more stages than the model has layers."""
    pipeline, layers = problem.spec.parallel.pipeline, problem.model.blocks
    ranks = 1 if pipeline.stages == "auto" else pipeline.stages
    chunks = _chunks(problem) or 1
    least = 2 if pipeline.stages == "auto" and chunks > 1 else ranks
    if ranks > layers:
        message = f"{layers} layers cannot fill {ranks} pipeline stages"
        yield Diagnostic("PT264", message, path=(*_PATH, "stages"), help=f"use at most {layers}")
    elif least * chunks > layers and not problem.lists:
        most, field = max(layers // least, 1), "chunks"
        message = f"{layers} layers cannot fill {chunks} chunks on each of {least} pipeline ranks"
        if pipeline.waves != "auto":
            most, field = most // 2, "waves"
            message = (
                f"{layers} layers cannot fill the {chunks} chunks of {pipeline.waves} waves on each of {least} ranks"
            )
        help = f"use at most {most}" if most else "use fewer stages, or schedule: 1f1b"
        yield Diagnostic("PT264", message, path=(*_PATH, field), help=help)


def layers(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the numbers of layers per stage do not add up to the model's number of layers."""
    pipeline, count = problem.spec.parallel.pipeline, problem.model.blocks
    given, path = pipeline.layers, (*_PATH, "layers")
    if problem.spec.model.layers is None and (findings := list(check_layers(pipeline, count))):
        yield from findings
        return
    if given != "auto" and sum(given) != count:
        message = f"the stages' layers sum up to {sum(given)}, the model has {count}"
        more = count - sum(given)
        help = f"add {more} to one of them" if more > 0 else f"take {-more} away"
        yield Diagnostic("PT431", message, path=path, help=help)
        return
    if given != "auto" and problem.lists is not None and len(given) != problem.lists.stages:
        message = f"layers has {len(given)} entries, the schedule's file {problem.lists.stages} stages"
        yield Diagnostic(
            "PT431", message, path=path, help=f"give {problem.lists.stages} numbers that sum up to {count}"
        )


def lists(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding for each setting of the spec that contradicts the schedule file that the spec names."""
    schedule, pipeline = problem.lists, problem.spec.parallel.pipeline
    if schedule is None:
        return
    named = pipeline.schedule.file if isinstance(pipeline.schedule, ScheduleFile) else ""
    if pipeline.stages not in ("auto", schedule.ranks):
        message = f"{named} has {schedule.ranks} rows, one per rank, for {pipeline.stages} pipeline stages"
        yield Diagnostic("PT437", message, path=(*_PATH, "stages"), help=f"use stages: {schedule.ranks} or auto")
    elif problem.world_size % schedule.ranks:
        message = f"{named} is for {schedule.ranks} ranks, which do not divide the {problem.world_size} devices"
        help = "use a multiple of so many devices, or a schedule by name"
        yield Diagnostic("PT437", message, path=(*_PATH, "schedule"), help=help)
    if pipeline.chunks not in ("auto", schedule.chunks):
        message = f"{named} gives a rank {schedule.chunks} chunks, not {pipeline.chunks}"
        yield Diagnostic("PT437", message, path=(*_PATH, "chunks"), help="drop chunks: the file says it")
    if schedule.moves == "weights" or schedule.trained_from:
        what = (
            "weights that travel"
            if schedule.moves == "weights"
            else f"stages below {schedule.trained_from} without backward"
        )
        message = f"{named} has {what}; a list of one's own moves activations and trains all stages"
        help = "use schedule: weipipe by name; frozen parameters are left out by the runtime"
        yield Diagnostic("PT437", message, path=(*_PATH, "schedule"), help=help)
    if schedule.stages > problem.model.blocks:
        message = f"{problem.model.blocks} layers cannot fill the {schedule.stages} stages of {named}"
        yield Diagnostic("PT437", message, path=(*_PATH, "schedule"), help="use a model with more layers")
    if problem.spec.parallel.compile == "block" and splits_backward(schedule):
        message = f"{named} halves backward passes, which compiled blocks have in one piece"
        yield Diagnostic("PT434", message, path=("parallel", "compile"), help="use compile: none or auto")


def micro_batches(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the schedule allows no number of micro-batches that is possible with the batch and the mesh.

    The finding names the nearest number that the schedule allows.
    """
    pipeline, training = problem.spec.parallel.pipeline, problem.spec.training
    ranks = problem.lists.ranks if problem.lists else pipeline.stages
    unread = problem.lists is None and not isinstance(pipeline.schedule, str)
    if unread or pipeline.schedule == "auto" or ranks in ("auto", 1):
        return
    assert isinstance(ranks, int)
    possible = sorted(set(_counts(problem, ranks)))
    if not possible or any(_takes(problem, ranks, count[0]) is None for count in possible):
        return
    count, unit = possible[-1]
    counts = sorted({each for each, _ in possible}, reverse=True)
    given = f"{', '.join(map(str, counts[:-1]))} or {counts[-1]}" if len(counts) > 1 else str(count)
    why = _takes(problem, ranks, count) or ""
    if "no multiple" in why:
        why = f"{pipeline.schedule} takes multiples of the {ranks} pipeline ranks"
    message = (
        f"global_batch: {training.global_batch} leaves {given} micro-batch{'es' * (counts != [1])} per rank and step"
    )
    wanted, size = _nearest(problem, ranks, count), _micro_batch(problem, ranks)
    help = "use another schedule"
    if wanted is not None:
        batch = f"global_batch: {wanted * unit}"
        help = f"use micro_batch: {size}, or {batch}" if size else f"the nearest number is {wanted}: use {batch}"
    message += f"; {why}"
    yield Diagnostic("PT430", message, path=("training", "global_batch"), help=help)


def _counts(problem: Problem, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (number of micro-batches, number of sequences that all ranks together process per micro-batch)."""
    parallel, batch = problem.spec.parallel, problem.spec.training.global_batch
    pinned = {**problem.pinned_degrees, "pipeline.stages": ranks}
    if problem.world_size % prod(pinned.values()):
        return
    most = problem.world_size // prod(pinned.values())
    for dp in [most] if len(pinned) == 3 or most == 1 else divisors(most):
        if batch % dp:
            continue
        for micro in divisors(batch // dp) if parallel.micro_batch == "auto" else [parallel.micro_batch]:
            if batch // dp % micro == 0:
                yield batch // dp // micro, dp * micro


def _micro_batch(problem: Problem, ranks: int) -> int | None:
    """Return the possible micro-batch size that is nearest to the micro-batch size in the spec.

    A size is possible if the schedule and the global batch allow it. Return None if no size is possible, or if the spec
    leaves the size ``auto``.
    """
    pinned, batch = problem.spec.parallel.micro_batch, problem.spec.training.global_batch
    if pinned == "auto":
        return None
    sizes = set()
    for size in divisors(batch):
        counts = _counts(problem.with_parallel(micro_batch=size), ranks)
        if any(_takes(problem, ranks, count) is None for count, _ in counts):
            sizes.add(size)
    return min(sizes, key=lambda size: (abs(size - pinned), size), default=None)


def _takes(problem: Problem, ranks: int, count: int) -> str | None:
    """Return why the spec's schedule cannot have ``count`` micro-batches; None if it can."""
    pipeline = problem.spec.parallel.pipeline
    if problem.lists is not None:
        wanted = problem.lists.micro_batches
        return None if count == wanted else f"the schedule's file has {wanted}"
    assert isinstance(pipeline.schedule, str)
    cap = 0 if pipeline.in_flight == "auto" else pipeline.in_flight
    return check(pipeline.schedule, ranks, count, _some_chunks(problem), cap)


def _nearest(problem: Problem, ranks: int, count: int) -> int | None:
    if problem.lists is not None:
        return problem.lists.micro_batches
    schedule = problem.spec.parallel.pipeline.schedule
    assert isinstance(schedule, str)
    return nearest(schedule, ranks, count, _some_chunks(problem))


def _chunks(problem: Problem) -> int | None:
    return problem.lists.chunks if problem.lists is not None else chunks_of(problem.spec.parallel.pipeline)


def _some_chunks(problem: Problem) -> int:
    """Return the number of chunks that the spec sets; if it sets none, return the schedule's minimum."""
    named = SCHEDULES.get(str(problem.spec.parallel.pipeline.schedule))
    least = 2 if named is not None and named.chooses_stages else 1
    return _chunks(problem) or least


_FILE = ("parallel", "pipeline", "schedule")
_SHOWN = 8
"""Maximum number of problems that are shown for a schedule file; further problems are only counted."""


def read_schedule(spec: Spec, base_dir: Path) -> tuple[Schedule | None, list[Diagnostic]]:
    """Return the schedule from the file that a spec names, and findings about the file; None if no file is named."""
    named = spec.parallel.pipeline.schedule
    if not isinstance(named, ScheduleFile):
        return None, []
    file = base_dir / named.file
    help = "one row per rank, one action per cell, such as 0F3; "
    help += "partool schedule 1f1b --ranks 2 --micro-batches 4 --out my.csv writes one"
    try:
        text = file.read_text(encoding="utf-8")
        schedule = from_text(text)
    except OSError as error:
        message = f"{file} cannot be read: {error.strerror}"
        help = "paths start at the spec's folder"
        return None, [Diagnostic("PT432", message, path=(*_FILE, "file"), help=help)]
    except ScheduleTextError as error:
        where = "".join(f", {name} {at}" for name, at in (("row", error.row), ("column", error.column)) if at)
        return None, [Diagnostic("PT432", f"{named.file}{where}: {error}", path=(*_FILE, "file"), help=help)]
    except ValueError as error:
        message = f"{named.file} is no text: {error}"
        return None, [Diagnostic("PT432", message, path=(*_FILE, "file"), help=help)]
    return schedule, list(_unsound(named.file, text, schedule))


def _unsound(name: str, text: str, schedule: Schedule) -> Iterator[Diagnostic]:
    faults = problems(schedule)
    rows = rows_of(text)
    for problem in faults[:_SHOWN]:
        where = ""
        if 0 <= problem.rank < len(rows):
            actions = schedule.lists[problem.rank]
            here = f" at {cell(actions[problem.at])}" if 0 <= problem.at < len(actions) else ""
            where = f", row {rows[problem.rank]}{here}"
        help = "partool schedule --check says the same without a spec"
        yield Diagnostic("PT433", f"{name}{where}: {problem.message}", path=(*_FILE, "file"), help=help)
    if len(faults) > _SHOWN:
        message = f"{name}: {len(faults) - _SHOWN} more problems"
        yield Diagnostic("PT433", message, path=(*_FILE, "file"), help="mend the first ones; others follow from them")
