"""Training systems whose plans can be priced, and the constants with which they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Engine = Literal["accelerate", "deepspeed", "megatron", "torchtitan"]
"""Systems whose files are read; each has a record in :data:`ENGINES`."""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """A training system."""

    name: str
    title: str
    stack: str | None
    """Name of its constants in :data:`partool.cost.stacks.STACKS`; None for partool's runtime, whose constants depend
    on what it compiles and fuses."""
    compiled: str | None = None
    """Name of its constants where blocks are compiled, if they are others."""


ENGINES: dict[str, EngineRecord] = {
    record.name: record
    for record in (
        EngineRecord("partool", "partool's own runtime", None),
        EngineRecord("deepspeed", "DeepSpeed", "deepspeed"),
        EngineRecord("megatron", "Megatron-LM", "megatron"),
        EngineRecord("torchtitan", "torchtitan", "fsdp2", compiled="fsdp2-compiled"),
        EngineRecord("accelerate", "accelerate with FSDP or DDP", "fsdp1", compiled="fsdp2-compiled"),
    )
}
"""Engines by name."""
