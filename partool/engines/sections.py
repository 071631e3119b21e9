"""The sections of a spec as readers fill them: fields that a file does not say are missing."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class DataDict(TypedDict):
    """The section ``parallel.data``."""

    zero: int
    shard: NotRequired[int]
    persistent: NotRequired[int]


class TensorDict(TypedDict):
    """The section ``parallel.tensor``."""

    degree: int
    shape: NotRequired[list[int]]
    sequence_norms: NotRequired[bool]
    overlap: NotRequired[str]


class PipelineDict(TypedDict):
    """The section ``parallel.pipeline``."""

    stages: int
    schedule: NotRequired[str]
    chunks: NotRequired[int]
    layers: NotRequired[list[int]]


class SequenceDict(TypedDict):
    """The section ``parallel.sequence``."""

    degree: int
    method: NotRequired[str]
    ulysses: NotRequired[int]
    order: NotRequired[str]


class OffloadDict(TypedDict):
    """The section ``parallel.offload``."""

    optimizer: str
    gpu_fraction: NotRequired[float]
    parameters: str
    activations: str
    dir: NotRequired[str]


class ParallelDict(TypedDict, total=False):
    """The section ``parallel``."""

    data: DataDict
    tensor: TensorDict
    pipeline: PipelineDict
    sequence: SequenceDict
    tiles: dict[str, int]
    expert: int
    expert_tensor: int
    offload: OffloadDict
    recompute: str | list[str]
    compile: str
    micro_batch: int


class TrainingDict(TypedDict, total=False):
    """The section ``training``."""

    sequence_length: int
    global_batch: int
    steps: int
    precision: str
    deterministic: bool
    validation: dict[str, int]


class ScheduleDict(TypedDict, total=False):
    """The section ``optimizer.schedule``."""

    kind: str
    min_ratio: float
    warmup_steps: int
    decay_steps: int


class OptimizerDict(TypedDict, total=False):
    """The section ``optimizer``."""

    name: str
    lr: float
    betas: list[float]
    eps: float
    momentum: float
    weight_decay: float
    clip: float
    schedule: ScheduleDict


class SpecDict(TypedDict, total=False):
    """A spec as far as the files of a run say it."""

    engine: str
    hardware: dict[str, int]
    model: dict[str, object]
    training: TrainingDict
    parallel: ParallelDict
    optimizer: OptimizerDict


def tensor_section(degree: int, *, sequence_norms: bool = False) -> TensorDict:
    """Return ``parallel.tensor`` of a system without two-dimensional shards whose collectives do not overlap."""
    if degree <= 1:
        return {"degree": degree}
    return {"degree": degree, "shape": [degree, 1], "sequence_norms": sequence_norms, "overlap": "none"}
