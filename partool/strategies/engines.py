"""Training systems whose plans can be priced, and the constants with which they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """A training system."""

    name: str
    title: str
    stack: str | None
    """Name of its constants in :data:`partool.cost.stacks.STACKS`; None for partool's runtime, whose constants depend
    on what it compiles and fuses."""


ENGINES: dict[str, EngineRecord] = {
    record.name: record
    for record in (
        EngineRecord("partool", "partool's own runtime", None),
        EngineRecord("deepspeed", "DeepSpeed", "deepspeed"),
        EngineRecord("megatron", "Megatron-LM", "megatron"),
    )
}
"""Engines by name."""
