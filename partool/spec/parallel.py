"""The ``parallel`` section: the parts of the layout that the user fixes; the rest is ``auto``."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from partool.spec._base import Auto, OneOf, Section, section_of, shorthand
from partool.spec.numbers import (
    Cores,
    Elements,
    Experts,
    Factor,
    Figure,
    Layers,
    Pieces,
    Ranks,
    Sequences,
    Share,
    TensorRanks,
    TokensOrNone,
    Width,
)
from partool.spec.patterns import FilePath
from partool.spec.runs import Runs
from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS

Recompute = Literal["none", "attention", "selective", "keep_attention", "full"]
Compile = Literal["none", "block"]
ZeroStage = Literal[0, 1, 2, 3]
Schedule = Annotated[str, OneOf(SCHEDULES)]
SequenceMethod = Annotated[str, OneOf(METHODS)]
SequenceOrder = Literal["contiguous", "zigzag"]
Inside = Literal["teams", "rings"]
Host = Literal["none", "cpu"]
Tier = Literal["none", "cpu", "nvme"]
Gather = Literal["coalesced", "sequential"]
ExpertExchange = Literal["direct", "node_first", "node_first_summed", "padded"]
TensorOverlap = Literal["none", "backward", "symmetric"]
Style = Literal["column", "column_gathered", "row", "vocabulary", "replicated"]
"""Ways to cut a parameter; see :mod:`partool.layout.tensor`."""


class DataParallel(Section):
    """Data parallelism, and how its ranks shard the training state."""

    zero: ZeroStage | Auto = "auto"
    """ZeRO stage: 0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters."""
    shard: Ranks | Auto = "auto"
    """Ranks that share one copy of the state; fewer than all data-parallel ranks is hybrid sharding (HSDP)."""
    gather: Gather | Auto = "auto"
    """coalesced: one message brings the parameters of a layer, which take twice their memory while they are reordered;
    sequential: one message per parameter, without a second copy."""
    prefetch: Annotated[int, Field(ge=0, le=8)] | Auto = "auto"
    """With zero: 3, number of layers that are gathered ahead of the layer that is computed."""
    persistent: Elements | Auto = "auto"
    """With zero: 3, parameters of at most this many elements stay gathered all the time; 0 keeps none gathered."""
    leaves: list[str] | Auto = "auto"
    """Glob patterns of modules that are gathered and reduced as one unit even if some of their parameters get no
    gradient, such as ``*.experts``."""


class ScheduleFile(Section):
    """A schedule that the user wrote."""

    file: FilePath
    """CSV with one row per rank and one action per cell, such as ``0F3``; relative to the spec."""


class Pipeline(Section):
    """Pipeline parallelism."""

    stages: Layers | Auto = "auto"
    """Ranks that the layers are split over."""
    schedule: Schedule | ScheduleFile | Auto = "auto"
    """Order of forward and backward passes, by name or in a file."""
    chunks: Layers | Auto = "auto"
    """Chunks of layers per rank; with ``interleaved`` two or more, with ``zb-v`` two, with ``hanayo`` two per wave."""
    waves: Layers | Auto = "auto"
    """With ``hanayo``: times that a forward pass goes down the ranks and back."""
    in_flight: Sequences | Auto = "auto"
    """With ``hanayo`` and ``zb-v``: maximum number of micro-batches whose activations a rank holds at once."""
    layers: Annotated[list[Layers], Runs(int, "[1-9][0-9]{0,3}")] | Auto = "auto"
    """Layers of each stage, in the order of the model; one entry per rank and chunk. ``4 × 20`` is 20 entries."""


class TensorPattern(Section):
    """Cut of the parameters that a pattern matches."""

    style: Style
    """column and row cut outputs and inputs, column_gathered gathers outputs again, vocabulary cuts rows of
    embeddings, replicated cuts nothing."""
    parts: list[Width] | None = None
    """Widths of matrices that are fused into one, such as [q, k, v] or [gate, up]; each is cut by itself."""
    unit: Width | None = None
    """Number of columns or rows that stay together, such as the size of a head."""
    heads: Literal["query", "key"] | None = None
    """Cut by whole attention heads: like the query heads, or like the heads of keys and values."""


class Tensor(Section):
    """Tensor parallelism: ranks that share every matrix."""

    degree: TensorRanks | Auto = "auto"
    """Ranks that share every matrix."""
    shape: Annotated[list[TensorRanks], Field(min_length=2, max_length=2)] | Auto = "auto"
    """[d1, d2], whose product is the degree: outputs of a layer's first matrices are cut over d1 ranks and their inputs
    over d2 (ATP, arXiv 2301.08658); [degree, 1] is the way of Megatron-LM."""
    sequence_norms: bool | Auto = "auto"
    """Norms and residuals work on a share of the sequence per rank (arXiv 2205.05198)."""
    overlap: TensorOverlap | Auto = "auto"
    """backward: gradients of inputs are exchanged while gradients of weights are computed; symmetric: collectives are
    fused with matrix products, through symmetric memory of CUDA devices."""
    chunks: Pieces | Auto = "auto"
    """Pieces of a micro-batch; one is summed over the ranks while the next is multiplied."""
    patterns: dict[str, Style | TensorPattern] = {}
    """Glob patterns of parameters or modules, and how they are cut, before any other rule; the first match counts."""


class Sequence(Section):
    """Sequence (context) parallelism."""

    method: SequenceMethod | Auto = "auto"
    """ulysses: ranks exchange tokens for heads around attention; ring: keys and values pass from rank to rank; usp:
    ulysses within groups that form a ring; startrail: several rings, each with a part of the keys; all_gather: every
    rank gathers all keys and values; dsp: the axis that is cut changes with the axis that a layer attends along."""
    degree: Ranks | Auto = "auto"
    """Ranks that share one sequence; ``auto`` means at least two if a method is named and there are enough ranks."""
    ulysses: Ranks | Auto = "auto"
    """With ``usp``: ranks of a group that exchange tokens for heads; the groups form the ring."""
    teams: Ranks | Auto = "auto"
    """With ``startrail``: ranks of a team (C), whose square divides the degree."""
    inside: Inside | Auto = "auto"
    """With ``startrail``: neighbouring ranks, which have the faster links, form teams or rings."""
    order: SequenceOrder | Auto = "auto"
    """contiguous: a rank holds one part of the sequence; zigzag: one part from the front and one from the back."""


class Tiles(Section):
    """Tiles of tokens in which a micro-batch passes parts of the model that need much memory per token."""

    mlp: TokensOrNone | Auto = "auto"
    """Tokens per tile of a feed-forward network; the backward pass recomputes tile by tile. 0 passes all
    tokens at once and keeps their activations."""
    loss: TokensOrNone | Auto = "auto"
    """Tokens whose logits exist at once; 0 means as many as keep the logits under 2**26 elements."""


class Offload(Section):
    """State that is kept in host memory or on the host's disks instead of device memory."""

    optimizer: Tier | Auto = "auto"
    """Place of moments and master weights; off the device, the host's CPU does the update. nvme: in files between
    updates."""
    gpu_fraction: Share | Auto = "auto"
    """Share of the optimizer state that stays on the device if ``optimizer`` is cpu or nvme: the state of the layers
    whose gradients come last."""
    parameters: Tier | Auto = "auto"
    """Place of the parameter shards of zero: 3."""
    activations: Host | Auto = "auto"
    """Place of tensors saved for the backward pass."""
    speculate: bool | Literal["undo"] | Auto = "auto"
    """Update before the norm of the gradients is known, with exact results (SuperOffload, arXiv 2509.21271): true
    changes masters and moments only once it is known; ``undo`` changes them at once, with copies in ``undo_gib``."""
    undo_gib: Figure | Auto = "auto"
    """With ``speculate: undo``: host memory of a rank for copies; buckets that do not fit wait for the norm."""
    gradients: Literal["bf16", "fp32"] | Auto = "auto"
    """Type in which gradients go to the host. auto: bf16 if that loses nothing, as on one data-parallel rank."""
    moments: Literal["fp32", "bf16"] | Auto = "auto"
    """Type of the moments on the host; auto: fp32."""
    bucket_mib: Annotated[float, Field(ge=0.125, le=4096)] | Auto = "auto"
    """MiB of gradients, in their type, that are sent together."""
    threads: Cores | Auto = "auto"
    """Cores of a rank for the update; training has the others."""
    dir: FilePath | None = None
    """Folder on each machine for state on disks; nvme needs it."""
    buffers: Annotated[int, Field(ge=3, le=64)] | Auto = "auto"
    """With nvme: buckets of the optimizer state that are in host memory at once."""
    pinned_gib: Figure | Auto = "auto"
    """Maximum pinned host memory of a rank."""


class ParallelSpec(Section):
    """The parallel layout."""

    data: DataParallel = DataParallel()
    tensor: Annotated[Tensor, BeforeValidator(shorthand("degree", int, str))] = Tensor()
    pipeline: Annotated[Pipeline, BeforeValidator(shorthand("stages", int, str))] = Pipeline()
    sequence: Annotated[Sequence, BeforeValidator(shorthand("degree", int, str))] = Sequence()
    tiles: Tiles = Tiles()
    expert: Annotated[Experts | Auto, BeforeValidator(section_of("degree"))] = "auto"
    """Ranks among which the experts of a layer are divided; ``expert: {degree: 4}`` says the same as ``expert: 4``."""
    expert_tensor: TensorRanks | Auto = "auto"
    """Neighbouring ranks that hold parts of the inner width of the same experts, so that ``expert`` × ``expert_tensor``
    ranks share a layer's experts. With ``expert: 1`` they are the tensor ranks."""
    expert_exchange: ExpertExchange | Auto = "auto"
    """direct: a token travels once to each of its experts; node_first: once to each node with some of them, where it
    spreads over the faster links, and their results return one by one; node_first_summed: each node sums them before
    they return; padded: a fixed number of rows goes to each rank, so that the host waits for no numbers and
    layers of experts are compiled."""
    expert_rank_capacity: Factor | Auto = "auto"
    """With ``expert_exchange: padded``: rows from each rank to each, as a multiple of an even share of the choices;
    choices beyond are dropped. auto: as many as there can be, the number of ranks, so that none is dropped."""
    offload: Annotated[Offload, BeforeValidator(shorthand("optimizer", none=("parameters", "activations")))] = Offload()
    """Section, or one word: none (nothing leaves the device), cpu or nvme (the optimizer does), or auto."""
    recompute: Recompute | Auto | Annotated[list[Recompute], Runs(str, "|".join(get_args(Recompute)))] = "auto"
    """Activations that the backward pass recomputes, for all layers or as a list with one policy per layer;
    ``full × 40`` is 40 entries."""
    compile: Compile | Auto = "auto"
    """block: torch.compile on every transformer block; none: no compilation."""
    micro_batch: Sequences | Auto = "auto"
    """Sequences per rank and forward pass."""

    @property
    def rank_capacity(self) -> float | None:
        """Rows of padded exchanges that the spec sets, relative to an even share; None: as many as there can be."""
        return None if self.expert_rank_capacity == "auto" else self.expert_rank_capacity
