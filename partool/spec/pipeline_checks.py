"""Rules of the ``parallel.pipeline`` section that need neither the model nor the machines."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.spec.parallel import Pipeline, ScheduleFile
from partool.spec.spec import Spec
from partool.strategies.schedules import CAPPED, MOVING_WEIGHTS, SCHEDULES, SEVERAL_STAGES, SPLIT, Stages

_PATH = ("parallel", "pipeline")


def check_pipeline(spec: Spec) -> Iterator[Diagnostic]:
    """Yield the findings about the pipeline of a spec."""
    pipeline = spec.parallel.pipeline
    yield from _chunks(pipeline)
    yield from _waves(pipeline)
    yield from _in_flight(pipeline)
    if spec.model.layers is not None:
        yield from check_layers(pipeline, spec.model.layers)
    yield from _halves(spec)
    yield from _weights_that_travel(spec)


def chunks_of(pipeline: Pipeline) -> int | None:
    """Return the number of chunks per rank that follows from a spec's chunks, waves or schedule; None if none follows.

    With a schedule file the result is None, as the file decides the number of chunks.
    """
    if pipeline.waves != "auto":
        return 2 * pipeline.waves
    if pipeline.chunks != "auto":
        return pipeline.chunks
    return {"1": 1, "2": 2}.get(_stages(pipeline))


def _stages(pipeline: Pipeline) -> Stages:
    """Return the rule for the number of stages per rank of the schedule; ``any`` for ``auto`` or a schedule file."""
    if isinstance(pipeline.schedule, ScheduleFile) or pipeline.schedule == "auto":
        return "any"
    return SCHEDULES[pipeline.schedule].stages


def _chunks(pipeline: Pipeline) -> Iterator[Diagnostic]:
    chunks, schedule, stages = pipeline.chunks, pipeline.schedule, _stages(pipeline)
    path = (*_PATH, "chunks")
    if chunks == "auto":
        return
    if chunks > 1 and pipeline.stages == 1:
        message = f"chunks: {chunks} needs more than one pipeline stage"
        yield Diagnostic("PT223", message, path=path, help="use stages: 2 or more, or drop chunks")
    elif stages == "2 or more":
        if chunks == 1:
            message = f"schedule: {schedule} needs more than one chunk of layers per rank"
            yield Diagnostic("PT223", message, path=path, help="use chunks: 2 or more, or schedule: 1f1b")
    elif stages == "2":
        if chunks != 2:
            message = f"schedule: {schedule} has two chunks of layers per rank, not {chunks}"
            yield Diagnostic("PT223", message, path=path, help="use chunks: 2, or drop it")
    elif stages == "2 per wave":
        if chunks % 2:
            message = f"schedule: {schedule} has two chunks of layers per rank and wave, not {chunks} chunks"
            yield Diagnostic("PT223", message, path=path, help=f"use chunks: {chunks + 1}, or waves instead of chunks")
    elif chunks > 1 and stages == "1":
        *several, last = SEVERAL_STAGES
        message = f"chunks: {chunks} belongs to {', '.join(several)} and {last}, not to {schedule}"
        yield Diagnostic("PT223", message, path=path, help="set schedule: interleaved, or drop chunks")


def _waves(pipeline: Pipeline) -> Iterator[Diagnostic]:
    waves, chunks = pipeline.waves, pipeline.chunks
    path = (*_PATH, "waves")
    if waves == "auto":
        return
    if pipeline.schedule != "auto" and _stages(pipeline) != "2 per wave":
        message = f"waves: {waves} belongs to the schedule hanayo, not to {_name(pipeline)}"
        yield Diagnostic("PT436", message, path=path, help="set schedule: hanayo, or drop waves")
    elif pipeline.stages == 1:
        message = f"waves: {waves} needs more than one pipeline stage"
        yield Diagnostic("PT436", message, path=path, help="use stages: 2 or more, or drop waves")
    elif chunks not in ("auto", 2 * waves):
        message = f"waves: {waves} means chunks: {2 * waves}, not {chunks}"
        yield Diagnostic("PT436", message, path=path, help="give one of the two")


def _in_flight(pipeline: Pipeline) -> Iterator[Diagnostic]:
    bound, path = pipeline.in_flight, (*_PATH, "in_flight")
    if bound == "auto":
        return
    if pipeline.schedule not in ("auto", *CAPPED):
        message = f"in_flight: {bound} does not apply to {_name(pipeline)}, whose number in flight is fixed"
        yield Diagnostic("PT436", message, path=path, help=f"use schedule: {' or '.join(CAPPED)}, or drop in_flight")
    elif pipeline.stages == 1:
        message = f"in_flight: {bound} needs more than one pipeline stage"
        yield Diagnostic("PT436", message, path=path, help="use stages: 2 or more, or drop in_flight")


def check_layers(pipeline: Pipeline, model_layers: int) -> Iterator[Diagnostic]:
    """Yield an error if ``pipeline.layers`` has the wrong number of entries; schedule files are not checked here."""
    layers, chunks = pipeline.layers, chunks_of(pipeline)
    if layers == "auto" or pipeline.stages == "auto" or isinstance(pipeline.schedule, ScheduleFile):
        return
    count, stages = len(layers), pipeline.stages
    chunks = 1 if stages == 1 else chunks
    least = 1 if _stages(pipeline) == "any" else 2
    if chunks is None and count % stages == 0 and count >= least * stages:
        return
    if chunks is None or count != stages * chunks:
        each = "1 chunk" if chunks == 1 else "several chunks" if chunks is None else f"{chunks} chunks"
        message = f"layers has {count} entries for {stages} pipeline ranks with {each} each"
        help = f"give {stages * (chunks or least)} numbers that sum up to the model's {model_layers} layers"
        yield Diagnostic("PT431", message, path=(*_PATH, "layers"), help=help)


def _halves(spec: Spec) -> Iterator[Diagnostic]:
    schedule = spec.parallel.pipeline.schedule
    if schedule in SPLIT and spec.parallel.compile == "block":
        message = f"schedule: {schedule} splits backward passes, which compiled blocks cannot do"
        help = "use compile: none or auto, or a schedule with whole backward passes: 1f1b, interleaved, hanayo"
        yield Diagnostic("PT434", message, path=("parallel", "compile"), help=help)


def _weights_that_travel(spec: Spec) -> Iterator[Diagnostic]:
    """Yield errors for settings that WeiPipe cannot use.

    WeiPipe sends weights around a ring of ranks, and each weight is owned whole by one rank.
    """
    parallel = spec.parallel
    schedule, recompute = parallel.pipeline.schedule, parallel.recompute
    if schedule not in MOVING_WEIGHTS:
        return
    if parallel.data.zero not in ("auto", 0):
        message = f"schedule: {schedule} already spreads the state over the pipeline ranks; zero: {parallel.data.zero}"
        message += " would shard each owner's part again"
        yield Diagnostic("PT435", message, path=("parallel", "data", "zero"), help="use zero: 0 or auto")
    if recompute != "auto" and (isinstance(recompute, list) or recompute != "full"):
        message = f"schedule: {schedule} keeps the inputs of stages only and computes the rest again"
        help = "use recompute: full or auto"
        yield Diagnostic("PT435", message, path=("parallel", "recompute"), help=help)
    if parallel.compile == "block" and schedule not in SPLIT:
        message = f"schedule: {schedule} exchanges the weights of blocks, which compiled blocks do not allow"
        yield Diagnostic("PT435", message, path=("parallel", "compile"), help="use compile: none or auto")


def _name(pipeline: Pipeline) -> str:
    return pipeline.schedule if isinstance(pipeline.schedule, str) else f"the schedule in {pipeline.schedule.file}"
