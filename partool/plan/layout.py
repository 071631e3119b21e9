"""The layout of a plan: the ``parallel`` section of the spec with every choice made, and values that follow from it.

Sections and fields have the names that :class:`partool.spec.parallel.ParallelSpec` gives them, so that a resolved
layout reads like a spec. ``derived`` holds values that a spec cannot state.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from partool.layout.sequence import Order
from partool.plan.record import Record
from partool.spec.numbers import (
    GIB,
    MIB,
    Cores,
    Elements,
    Experts,
    Factor,
    Figure,
    Layers,
    LayersOrNone,
    Pieces,
    Ranks,
    Sequences,
    Share,
    StepsOrNone,
    TensorRanks,
    TokensOrNone,
)
from partool.spec.parallel import (
    Compile,
    ExpertExchange,
    Gather,
    Host,
    Inside,
    Recompute,
    SequenceMethod,
    Style,
    TensorOverlap,
    TensorPattern,
    Tier,
    ZeroStage,
)
from partool.spec.patterns import FilePath, Sha256
from partool.spec.training import Fused
from partool.strategies.schedules import SCHEDULES, SPLIT, WITH_WAVES
from partool.strategies.sequence import METHODS


class Mesh(NamedTuple):
    """Sizes of the axes of the dense mesh, outermost first; the product is the world size. Ranks are row-major."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self)

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks (replicas times shards)."""
        return self.dp_replicate * self.dp_shard


class DataLayout(Record):
    """How data-parallel ranks share the training state."""

    zero: ZeroStage
    shard: Ranks = 1
    """Number of ranks that share one copy of the state; always 1 with ZeRO-0."""
    gather: Gather = "coalesced"
    prefetch: LayersOrNone = 1
    """With ZeRO-3, number of layers whose parameters are gathered ahead of the layer that computes."""
    persistent: Elements = 0
    """With ZeRO-3, a parameter stays gathered if it has at most this number of elements."""
    leaves: tuple[str, ...] = ()
    """Glob patterns of modules. Each matching module is gathered as one unit; zeros fill its missing gradients."""


class PipelineLayout(Record):
    """How pipeline ranks share the layers, and the order in which the ranks compute."""

    stages: Layers = 1
    """Number of ranks of a pipeline."""
    schedule: str = "1f1b"
    """Name in :data:`partool.strategies.schedules.SCHEDULES`; ``file`` means the action lists in
    ``derived.schedule_text``."""
    chunks: Layers = 1
    """Number of chunks of layers (virtual stages) per rank; Hanayo has two chunks per wave."""
    waves: LayersOrNone = 0
    """Number of waves of ``hanayo``: ``chunks`` / 2; 0 with other schedules."""
    in_flight: StepsOrNone = 0
    """Maximum number of micro-batches in flight on a rank; 0 means that only the schedule's generator limits this
    number."""
    layers: tuple[Layers, ...]
    """Number of layers of each of the ``stages`` × ``chunks`` pipeline stages, in the order of the model."""

    @property
    def form(self) -> str:
        """Schedule in words, with its waves or chunks and the bound of micro-batches in flight."""
        text = "own lists" if self.schedule == "file" else self.schedule
        if self.waves:
            text += f", {self.waves} wave{'s' * (self.waves > 1)}"
        elif self.chunks > 1 and (self.schedule == "file" or SCHEDULES[self.schedule].stages != "2"):
            text += f" × {self.chunks} chunks"
        return text + (f", at most {self.in_flight} in flight" if self.in_flight else "")

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """For each pipeline stage, the index of its first layer and the index after its last layer."""
        return _bounds(self.layers)


@lru_cache(maxsize=4096)
def _bounds(layers: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise(accumulate(layers, initial=0)))


class TensorLayout(Record):
    """How tensor-parallel ranks share the weight matrices."""

    degree: TensorRanks = 1
    shape: tuple[TensorRanks, TensorRanks] = (1, 1)
    """d1 × d2 of two-dimensional tensor parallelism (ATP, arXiv 2301.08658): the axis ``tp`` of the mesh is ``tp0`` ×
    ``tp1`` of these sizes, ``tp1`` innermost; degree × 1 is tensor parallelism on one axis."""
    sequence_norms: bool = False
    """True if norms and residuals are sharded along the sequence over tensor ranks."""
    overlap: TensorOverlap = "none"
    chunks: Pieces = 1
    """Number of pieces of a micro-batch; results of one piece are summed over ranks while the next piece is
    multiplied."""
    patterns: dict[str, Style | TensorPattern] = {}
    """Patterns as the spec gives them; the plan's ``partition`` holds the shares that result from the patterns."""

    @property
    def inner(self) -> int:
        """Size d2 of the inner axis of two-dimensional tensor parallelism; 1 if there is only one axis."""
        return self.shape[1]


class SequenceLayout(Record):
    """How sequence-parallel ranks share one sequence."""

    method: SequenceMethod = "ulysses"
    degree: Ranks = 1
    ulysses: Ranks = 1
    """With ``usp``, number of neighbouring ranks in a group that exchanges tokens for heads."""
    teams: Ranks = 1
    """With ``startrail``: number of ranks in a team (C)."""
    inside: Inside = "teams"
    """With ``startrail``, says whether neighbouring ranks form teams or rings."""
    order: Order = "contiguous"
    """Order of tokens by rank (:func:`partool.layout.sequence.shares`); ``grid`` follows from ``dsp``."""

    @property
    def form(self) -> str:
        """Method in words, with the sizes of the groups if the method has several groups."""
        record = METHODS[self.method]
        if record.heads == "groups":
            return f"{self.method}, {self.ulysses} ulysses × {self.degree // self.ulysses} ring"
        if record.keys == "teams":
            return f"{self.method}, teams of {self.teams}, rings of {self.degree // self.teams**2}"
        return self.method


class TilesLayout(Record):
    """Sizes of the pieces in which a micro-batch goes through parts of the model that need much memory per token."""

    mlp: TokensOrNone = 0
    """Number of tokens of a sequence that go through a feed-forward network at once; 0 means all tokens."""
    loss: TokensOrNone = 0
    """Number of tokens whose logits exist at once; 0 means as many as the runtime's limit allows."""


class OffloadLayout(Record):
    """Which state is kept in host memory or on the host's disks, and settings of the work that the host does.

    Where nothing is offloaded, the fields after ``activations`` have no meaning.
    """

    optimizer: Tier = "none"
    gpu_fraction: Share = 1.0
    """Share of the optimizer state that stays on the device; 1 where ``optimizer`` is none."""
    parameters: Tier = "none"
    activations: Host = "none"
    speculate: bool | Literal["undo"] = False
    undo_gib: Annotated[float, Field(ge=0.0, le=1e6)] = 0.0
    """Host memory of one rank in GiB for copies of the state that a speculative step may have to restore."""
    gradients: Literal["bf16", "fp32"] = "bf16"
    """Type in which gradients are sent to the host: the compute type, or the type of the master weights."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Type of the optimizer's moments on the host: the type of the master weights, or bf16."""
    bucket_mib: Annotated[float, Field(gt=0.0, le=4096)] = 64.0
    """Size in MiB of a bucket of gradients, in the type in which gradients are sent."""
    threads: Cores = 1
    """Number of threads that update one rank's parameters on the host."""
    dir: FilePath | None = None
    """Absolute path of the folder for state on disks; None if no state is on disks."""
    buffers: Pieces = 4
    """Number of buckets of on-disk state that are in host memory at once."""
    pinned_gib: Figure | None = None
    """Maximum pinned memory of a rank in GiB; None means no limit."""

    @property
    def active(self) -> bool:
        """True if any state is in host memory or on its disks."""
        return {self.optimizer, self.parameters, self.activations} != {"none"}

    @property
    def bucket_bytes(self) -> int:
        """Number of bytes of a bucket of gradients."""
        return int(self.bucket_mib * MIB)

    @property
    def undo_bytes(self) -> int:
        """Bytes of host memory of one rank for copies of the state that a speculative step may restore."""
        return int(self.undo_gib * GIB)

    @property
    def pinned_limit_bytes(self) -> int:
        """Maximum number of bytes of pinned memory of a rank; 0 means no limit."""
        return 0 if self.pinned_gib is None else int(self.pinned_gib * GIB)


class Derived(Record):
    """Values that follow from the layout and its machines, and that a spec cannot state."""

    replicas: Ranks = 1
    """Number of copies of the sharded state (``dp_replicate`` of the mesh)."""
    accumulation: Sequences
    """Number of micro-batches per rank and optimizer step."""
    schedule_text: str = ""
    """With the schedule ``file``, the user's action lists in full (:func:`partool.schedule.from_text`)."""
    schedule_hash: Sha256 = ""
    """SHA-256 of the schedule's text, for pipelines of more than one rank, so that the planned schedule is the one that
    runs. Empty for lists of more than 50,000 passes."""
    fused: tuple[Fused, ...] = ()
    """Parts of the model that partool's kernels compute, see ``kernels.fused`` of the spec."""


class Layout(Record):
    """How the training work is split over ranks and over time."""

    data: DataLayout
    tensor: TensorLayout = TensorLayout()
    pipeline: PipelineLayout
    sequence: SequenceLayout = SequenceLayout()
    tiles: TilesLayout = TilesLayout()
    expert: Experts = 1
    """Number of ranks among which the experts of a layer are divided."""
    expert_tensor: TensorRanks = 1
    """Number of neighbouring ranks that hold parts of the inner widths of the same experts; 1 where ``expert`` is 1, as
    tensor ranks then cut experts like dense networks."""
    expert_exchange: ExpertExchange = "direct"
    """How tokens travel to the ranks of their experts; ``direct`` where ``expert`` is 1."""
    expert_rank_capacity: Factor | None = None
    """With ``padded``: rows from each rank to each as a multiple of an even share, at most the number of ranks; None
    with other exchanges."""
    offload: OffloadLayout = OffloadLayout()
    recompute: tuple[Recompute, ...]
    """Recomputation policy of each layer."""
    compile: Compile
    micro_batch: Sequences
    """Number of sequences per rank and forward pass."""
    derived: Derived

    @property
    def mesh(self) -> Mesh:
        """Sizes of the axes of the dense mesh, computed from the degrees in all sections."""
        data, derived = self.data, self.derived
        return Mesh(self.pipeline.stages, derived.replicas, data.shard, self.sequence.degree, self.tensor.degree)

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that together hold the experts of a layer, and exchange their tokens; 1 without a group."""
        return self.expert * self.expert_tensor

    @property
    def contradiction(self) -> str:
        """The first contradiction of an edited layout, in words; empty where there is none."""
        pipeline, tensor, sequence = self.pipeline, self.tensor, self.sequence
        if prod(tensor.shape) != tensor.degree:
            return f"layout.tensor.shape makes {prod(tensor.shape)} ranks, degree is {tensor.degree}"
        groups = (("ulysses", sequence.ulysses), ("teams", sequence.teams**2))
        for name, size in groups:
            if sequence.degree % size:
                return f"layout.sequence.{name} makes groups of {size} ranks among {sequence.degree}"
        if len(pipeline.layers) != pipeline.stages * pipeline.chunks:
            named, stages = len(pipeline.layers), pipeline.stages * pipeline.chunks
            return f"layout.pipeline.layers names {named} stages, stages × chunks are {stages}"
        if pipeline.schedule not in (*SCHEDULES, "file"):
            return f"layout.pipeline.schedule is {pipeline.schedule}, an unknown schedule"
        waves = pipeline.schedule in WITH_WAVES
        if 2 * pipeline.waves != (pipeline.chunks if waves else 0):
            right = "half of chunks" if waves else f"0 with schedule: {pipeline.schedule}"
            return f"layout.pipeline.waves is {pipeline.waves}, and must be {right}"
        offload = self.offload
        if (offload.optimizer == "none") != (offload.gpu_fraction == 1.0):
            return f"layout.offload.gpu_fraction is {offload.gpu_fraction:g} with optimizer: {offload.optimizer}"
        if "nvme" in (offload.optimizer, offload.parameters) and not offload.dir:
            return "layout.offload names no dir for files"
        if offload.parameters != "none" and self.data.zero != 3:
            return f"layout.offload.parameters is {offload.parameters} with zero: {self.data.zero}, and needs zero: 3"
        if self.data.zero == 0 and self.data.shard != 1:
            return f"layout.data.shard is {self.data.shard} with zero: 0, which shares no state"
        if self.compile == "block" and pipeline.schedule in SPLIT:
            return f"layout.compile is block, and {pipeline.schedule} splits backward passes"
        if len(self.recompute) != sum(pipeline.layers):
            return f"layout.recompute names {len(self.recompute)} layers, layout.pipeline.layers {sum(pipeline.layers)}"
        return ""

    def changed(self, changes: Mapping[str, Any]) -> Layout:
        """Return the layout with ``changes``, which maps dotted names such as ``tensor.shape`` to unchecked values.

        Raises ``AttributeError`` for a name that is not a field's.
        """
        update: dict[str, Any] = {}
        for name, value in changes.items():
            section, _, field = name.partition(".")
            part: BaseModel | None = update.get(section, getattr(self, section, None))
            fields = type(part).model_fields if isinstance(part, BaseModel) else {}
            if section not in Layout.model_fields or (field and field not in fields):
                raise AttributeError(f"a layout has no {name}")
            update[section] = part.model_copy(update={field: value}) if field and part is not None else value
        return self.model_copy(update=update)
