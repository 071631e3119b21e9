"""The ``parallel`` section: as much of the layout as the user cares about; the rest is ``auto``."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from partool.spec._base import Auto, Section

Recompute = Literal["none", "selective", "full"]
Compile = Literal["none", "block"]
ZeroStage = Literal[0, 1, 2, 3]


class DataParallel(Section):
    """Data parallelism and how its ranks share the training state."""

    zero: ZeroStage | Auto = "auto"
    """ZeRO stage: 0 replicates, 1 shards optimizer states, 2 also gradients, 3 also parameters."""
    shard: PositiveInt | Auto = "auto"
    """Ranks that share one copy of the state; fewer than all data-parallel ranks is hybrid sharding (HSDP)."""


class Pipeline(Section):
    """Pipeline parallelism."""

    stages: PositiveInt = 1
    schedule: Literal["gpipe", "1f1b"] = "1f1b"


class Sequence(Section):
    """Sequence (context) parallelism."""

    method: Literal["ulysses", "ring"] = "ulysses"
    degree: PositiveInt = 1


class Offload(Section):
    """What is kept in host memory instead of device memory."""

    optimizer: Literal["none", "cpu"] = "none"


class ParallelSpec(Section):
    """The parallel layout."""

    data: DataParallel = DataParallel()
    tensor: PositiveInt = 1
    pipeline: Pipeline = Pipeline()
    sequence: Sequence = Sequence()
    expert: PositiveInt = 1
    offload: Offload = Offload()
    recompute: Recompute | Auto = "auto"
    compile: Compile | Auto = "auto"
    micro_batch: PositiveInt | Auto = "auto"
    """Sequences per rank and forward pass."""
