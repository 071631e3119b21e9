"""What the events of a rank's log hold, as far as it is read: the data of each kind, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationError

from partool.plan.record import Count, DamagedRecordError, Noted, Number, UnixTime, damage

Attempt = Annotated[int, Field(ge=0, le=1_000_000)]
Rank = Annotated[int, Field(ge=0, le=10_000_000)]
_Micros = Annotated[int, Field(ge=-(2**53), le=2**53)]


class _Start(Noted):
    attempt: Attempt = 0
    plan_hash: str = ""
    world_size: Annotated[int, Field(ge=1, le=10_000_000)] = 1
    resumed_from: Count | None = None


class PairFigures(Noted):
    """Means over pairs of answers; None stands for a figure that is not finite, or that the objective does not have."""

    chosen: Number | None = None
    rejected: Number | None = None
    margin: Number | None = None
    accuracy: Number | None = None
    logps_chosen: Number | None = None
    logps_rejected: Number | None = None
    kl: Number | None = None
    log_odds: Number | None = None


class _Step(Noted):
    step: Count
    loss: Number | None = None
    multi_token_loss: Number | None = None
    grad_norm: Number | None = None
    lr: Number | None = None
    tokens: Count | None = None
    tokens_per_s: Number | None = None
    step_time_s: Number | None = None
    mfu: Number | None = None
    memory_bytes: Count | None = None
    preferences: PairFigures | None = None
    kl: Number | None = None


class _SetFigures(Noted):
    loss: Number | None = None
    perplexity: Number | None = None
    weights_loss: Number | None = None
    preferences: PairFigures | None = None


class SampleText(Noted):
    """A prompt, and what the model added to it at a validation."""

    prompt: str
    text: str
    tokens: Count
    """Number of the tokens of the text."""
    ended: bool
    """Whether a token that ends a text or an answer came next."""


class _Validation(Noted):
    step: Count
    loss: Number | None = None
    weights_loss: Number | None = None
    preferences: PairFigures | None = None
    sets: Annotated[dict[str, _SetFigures], Field(max_length=10_000)] = {}
    samples: Annotated[list[SampleText], Field(max_length=10_000)] = []


class _Evaluation(Noted):
    step: Count
    tasks: dict[str, Number] = {}


class _EarlyStop(Noted):
    step: Count
    reason: str


class _Checkpoint(Noted):
    step: Count


class _Profile(Noted):
    first: Count
    last: Count


class ExpertLayer(Noted):
    """The load of a layer's experts; None stands for a figure that is not finite."""

    layer: Count
    tokens: Annotated[list[Count], Field(min_length=1, max_length=100_000)]
    imbalance: Number | None
    dropped: Number | None
    entropy: Number | None
    bias: Annotated[list[Number | None], Field(min_length=2, max_length=2)] | None


class _Experts(Noted):
    step: Count
    layers: Annotated[list[ExpertLayer], Field(max_length=100_000)]


class PipelineData(Noted):
    """The columns of an event ``pipeline`` (:mod:`partool.plan.pipeline_log`)."""

    step: Count
    steady: bool
    t: UnixTime
    actions: list[str]
    start_us: list[_Micros]
    stop_us: list[_Micros]
    waited_us: list[_Micros]


class _Nonfinite(Noted):
    step: Count


class _Warning(Noted):
    message: str = ""


class _Error(Noted):
    type: str = ""
    message: str = ""


class _End(Noted):
    step: Count | None = None
    exit_code: Annotated[int, Field(ge=-1000, le=1000)]
    reason: str


DATA: Mapping[str, type[Noted]] = {
    "start": _Start,
    "step": _Step,
    "validation": _Validation,
    "evaluation": _Evaluation,
    "early_stop": _EarlyStop,
    "profile": _Profile,
    "checkpoint": _Checkpoint,
    "experts": _Experts,
    "pipeline": PipelineData,
    "nonfinite": _Nonfinite,
    "warning": _Warning,
    "error": _Error,
    "end": _End,
}
"""Kind of event → model of its data; data of other kinds are not read by reports."""


class _Head(Noted):
    v: int
    kind: str
    t: UnixTime
    rank: Rank
    data: dict[str, Any]


def check_event(value: Mapping[str, Any]) -> None:
    """Raise :class:`DamagedRecordError` for an event whose fields are not as a rank writes them."""
    within = ""
    try:
        head = _Head.model_validate(value)
        if (model := DATA.get(head.kind)) is not None:
            within = "data"
            model.model_validate(head.data)
    except ValidationError as error:
        raise DamagedRecordError(damage(error, within)) from None
