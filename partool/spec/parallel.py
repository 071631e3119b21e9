"""The ``parallel`` section: as much of the layout as the user cares about; the rest is ``auto``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from partool.spec._base import Auto, OneOf, Section, shorthand
from partool.spec.numbers import (
    Cores,
    Elements,
    Experts,
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
TensorOverlap = Literal["none", "backward", "symmetric"]
Style = Literal["column", "column_gathered", "row", "vocabulary", "replicated"]
"""See :mod:`partool.layout.tensor`."""


class DataParallel(Section):
    """Data parallelism and how its ranks share the training state."""

    zero: ZeroStage | Auto = "auto"
    """ZeRO stage: 0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters."""
    shard: Ranks | Auto = "auto"
    """Ranks that share one copy of the state; fewer than all data-parallel ranks is hybrid sharding (HSDP)."""
    gather: Gather | Auto = "auto"
    """coalesced: the parameters of a layer come in one message, held twice while they are sorted; sequential: one
    message per parameter, held once."""
    prefetch: Annotated[int, Field(ge=0, le=8)] | Auto = "auto"
    """With zero: 3, layers that are gathered ahead of the one that computes."""
    persistent: Elements | Auto = "auto"
    """With zero: 3, parameters of at most so many elements stay gathered from step to step; 0: none."""
    leaves: list[str] | Auto = "auto"
    """Glob patterns of modules that are gathered and reduced as one unit, although some of their parameters may get no
    gradient, such as ``*.experts``."""


class ScheduleFile(Section):
    """A schedule of the user's own."""

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
    """With ``hanayo``: how often a forward pass goes to and fro over the ranks."""
    in_flight: Sequences | Auto = "auto"
    """With ``hanayo`` and ``zb-v``: the most micro-batches whose activations a rank holds at once."""
    layers: list[Layers] | Auto = "auto"
    """Layers of each stage, in the order of the model; one entry per rank and chunk."""


class TensorPattern(Section):
    """The cut of the parameters that a pattern matches."""

    style: Style
    """column and row cut outputs and inputs, column_gathered gathers outputs again, vocabulary cuts rows of
    embeddings, replicated cuts nothing."""
    parts: list[Width] | None = None
    """Widths of matrices that are fused into one, such as [q, k, v] or [gate, up]; each is cut by itself."""
    unit: Width | None = None
    """Widths that stay together, such as the size of a head."""
    heads: Literal["query", "key"] | None = None
    """Cut by whole attention heads: with the query heads, or with those of keys and values."""


class Tensor(Section):
    """Tensor parallelism: ranks that share every matrix."""

    degree: TensorRanks | Auto = "auto"
    """Ranks that share every matrix."""
    shape: Annotated[list[TensorRanks], Field(min_length=2, max_length=2)] | Auto = "auto"
    """[d1, d2], whose product is the degree: outputs of a layer's first matrices are cut over d1 ranks and their inputs
    over d2 (ATP, arXiv 2301.08658); [degree, 1] is what Megatron-LM does."""
    sequence_norms: bool | Auto = "auto"
    """Norms and residuals work on a share of the sequence per rank (arXiv 2205.05198)."""
    overlap: TensorOverlap | Auto = "auto"
    """backward: gradients of inputs travel while those of weights are computed; symmetric: fused with the products,
    through symmetric memory of CUDA devices."""
    chunks: Pieces | Auto = "auto"
    """Pieces of a micro-batch; the sum of one travels while the next is multiplied."""
    patterns: dict[str, Style | TensorPattern] = {}
    """Glob patterns of parameters or modules, and how they are cut, before any other rule; the first match counts."""


class Sequence(Section):
    """Sequence (context) parallelism."""

    method: SequenceMethod | Auto = "auto"
    """ulysses: ranks trade sequence for heads around attention; ring: keys and values travel; usp: ulysses within
    groups that form a ring; startrail: several rings, each of which meets a part of the keys; all_gather: keys and
    values of all ranks come to each; dsp: the axis that is cut changes with the axis that a layer attends along."""
    degree: Ranks | Auto = "auto"
    """Ranks that share one sequence; ``auto`` is two or more where a method is named, and there are as many."""
    ulysses: Ranks | Auto = "auto"
    """With ``usp``: ranks that trade sequence for heads; the others form the ring."""
    teams: Ranks | Auto = "auto"
    """With ``startrail``: ranks of a team (C), whose square divides the degree."""
    inside: Inside | Auto = "auto"
    """With ``startrail``: which of both neighbouring ranks form, and so the faster links carry."""
    order: SequenceOrder | Auto = "auto"
    """contiguous: a rank holds one stretch of the sequence; zigzag: one from the front and one from the back."""


class Tiles(Section):
    """Pieces in which a micro-batch passes what needs much memory per token."""

    mlp: TokensOrNone | Auto = "auto"
    """Tokens of a sequence that pass a feed-forward network at once and are computed again one after the other in the
    backward pass; 0: all, kept."""
    loss: TokensOrNone | Auto = "auto"
    """Tokens whose logits exist at once; 0: as many as keep them under 2**26 numbers."""


class Offload(Section):
    """State that is kept in host memory or on the host's disks instead of device memory."""

    optimizer: Tier | Auto = "auto"
    """Moments and master weights; the host's processors then do the update. nvme: between updates they are in files."""
    gpu_fraction: Share | Auto = "auto"
    """Share of the optimizer state that stays on the device while ``optimizer`` is cpu or nvme: that of the layers
    whose gradients come last."""
    parameters: Tier | Auto = "auto"
    """Shards of the parameters, with zero: 3."""
    activations: Host | Auto = "auto"
    """Tensors saved for the backward pass."""
    speculate: bool | Literal["undo"] | Auto = "auto"
    """Update while the norm of the gradients is not known yet (SuperOffload, arXiv 2509.21271), and exactly: true puts
    the change of masters and moments off until it is; ``undo`` keeps copies of them in ``undo_gib``."""
    undo_gib: Figure | Auto = "auto"
    """With ``speculate: undo``: host memory of a rank for copies; what does not fit waits for the norm."""
    gradients: Literal["bf16", "fp32"] | Auto = "auto"
    """Type in which gradients go to the host. auto: bf16 where that loses nothing, as on one data-parallel rank."""
    moments: Literal["fp32", "bf16"] | Auto = "auto"
    """Type of the moments on the host; auto: fp32."""
    bucket_mib: Annotated[float, Field(ge=0.125, le=4096)] | Auto = "auto"
    """Gradients that travel together, in MiB of their type."""
    threads: Cores | Auto = "auto"
    """Cores of a rank that update; training has the others."""
    dir: FilePath | None = None
    """Folder for what goes to disks, one on each machine; needed by nvme."""
    buffers: Annotated[int, Field(ge=3, le=64)] | Auto = "auto"
    """With nvme: buckets of the optimizer state that are in host memory at once."""
    pinned_gib: Figure | Auto = "auto"
    """Most pinned host memory of a rank."""


class ParallelSpec(Section):
    """The parallel layout."""

    data: DataParallel = DataParallel()
    tensor: Annotated[Tensor, BeforeValidator(shorthand("degree", int, str))] = Tensor()
    pipeline: Annotated[Pipeline, BeforeValidator(shorthand("stages", int, str))] = Pipeline()
    sequence: Annotated[Sequence, BeforeValidator(shorthand("degree", int, str))] = Sequence()
    tiles: Tiles = Tiles()
    expert: Experts | Auto = "auto"
    """Ranks that share the experts of a layer."""
    offload: Annotated[Offload, BeforeValidator(shorthand("optimizer", none=("parameters", "activations")))] = Offload()
    """Or in one word: none, nothing leaves the device; cpu or nvme, the optimizer does; auto."""
    recompute: Recompute | Auto | list[Recompute] = "auto"
    """Activations that the backward pass computes again, for all layers or as a list with one policy per layer."""
    compile: Compile | Auto = "auto"
    """block: torch.compile on every transformer block; none: no compilation."""
    micro_batch: Sequences | Auto = "auto"
    """Sequences per rank and forward pass."""
