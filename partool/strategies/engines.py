"""Training systems whose plans can be priced and written, their constants, and what each of them cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from partool.strategies.schedules import SCHEDULES
from partool.strategies.sequence import METHODS

_OWN = (
    "tensor in two dimensions", "tensor with fused collectives", "tiles of networks", "tiles of the loss",
    "schedule file", "sequential gathers", "other prefetch", "persistent parameters", "leaves",
    "offload of activations", "node-first exchange of experts",
)  # fmt: skip
"""Aspects of layouts that only partool's runtime has."""
_HOST = ("offload", "offload of parameters", "offload to disks", "offload of parameters to disks")

Engine = Literal["accelerate", "deepspeed", "megatron", "torchtitan"]
"""Systems whose files are read; each has a record in :data:`ENGINES`."""


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """A training system."""

    name: str
    title: str
    stack: str | None
    """Name of its constants in :data:`partool.work.stacks.STACKS`; None for partool's runtime, whose constants depend
    on what it compiles and fuses."""
    settled: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``parallel``, by their path, that have one value in every plan for the system."""
    preferred: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``parallel``, by their path, that have this value unless the spec says otherwise."""
    lacks: frozenset[str] = frozenset()
    """Aspects of layouts (:mod:`partool.layout.capabilities`) that the system does not have."""
    uniform: bool = False
    """True if stages have equally many layers, all layers are recomputed alike, and the optimizer's state is in host
    memory whole or not at all, unless the spec says otherwise: not all settings of the system can say more."""
    offloads_from: int = 0
    """Lowest ZeRO stage with which the optimizer's state may be in host memory."""
    compiled: str | None = None
    """Name of its constants where blocks are compiled, if they are others."""

    @property
    def code_bases(self) -> tuple[str, ...]:
        """Names of all code bases whose constants its plans may have."""
        return tuple(name for name in (self.stack or "partool", self.compiled) if name)

    def code_base(self, compile: str) -> str:
        """Return the name of the code base whose scalars a calibration holds; ``auto`` compiles where it can."""
        return self.code_bases[0 if compile == "none" else -1]


def _but(kind: str, names: Mapping[str, Any], kept: tuple[str, ...]) -> tuple[str, ...]:
    """Return the aspects ``kind name`` of all ``names`` but those that are ``kept``."""
    return tuple(f"{kind} {name}" for name in names if name not in kept)


_OF_DEEPSPEED = frozenset(
    (
        *(aspect for aspect in _OWN if aspect != "persistent parameters"), *_but("schedule", SCHEDULES, ()),
        *_but("sequence", METHODS, ("ulysses",)),
        *(f"recompute {policy}" for policy in ("attention", "selective", "keep_attention")),
        "hybrid sharding", "norms on shares of the sequence", "expert", "parts of experts",
        "zero 3 on tensor ranks", "tensor ranks that share sequences",
    )
)  # fmt: skip
_OF_MEGATRON = frozenset(
    (
        *_OWN, *_HOST[1:], *_but("schedule", SCHEDULES, ("1f1b", "interleaved")),
        *_but("sequence", METHODS, ("ring", "ulysses", "all_gather")),
        "recompute selective", "recompute keep_attention", "hybrid sharding", "zero 2 or 3 in a pipeline",
    )
)  # fmt: skip
_OF_TORCHTITAN = frozenset(
    (
        *(aspect for aspect in _OWN if aspect != "tensor with fused collectives"), *_HOST[2:],
        *_but("schedule", SCHEDULES, ("gpipe", "1f1b", "interleaved", "zb-v")),
        *_but("sequence", METHODS, ("ring", "all_gather")), "recompute attention", "recompute keep_attention",
        "zero 1", "zero 0 on sequence ranks", "offload of the optimizer alone",
    )
)  # fmt: skip
_OF_ACCELERATE = frozenset(
    (
        *_OWN, *_HOST[2:], *_but("schedule", SCHEDULES, ()), *_but("sequence", METHODS, ("ring", "all_gather")),
        *(f"recompute {policy}" for policy in ("attention", "selective", "keep_attention")),
        "norms on shares of the sequence", "expert", "parts of experts", "zero 1",
        "zero 0 on sequence ranks", "zero 0 beside tensor ranks", "offload of the optimizer alone",
    )
)  # fmt: skip
_TILES = {"tiles.mlp": 0, "tiles.loss": 0, "tensor.chunks": 1}
_PLAIN = {**_TILES, "tensor.overlap": "none"}
_SHARED = {"tensor.sequence_norms": True}

ENGINES: dict[str, EngineRecord] = {
    record.name: record
    for record in (
        EngineRecord("partool", "partool's own runtime", None),
        EngineRecord(
            "deepspeed", "DeepSpeed", "deepspeed", {**_PLAIN, "compile": "none"}, lacks=_OF_DEEPSPEED, uniform=True,
            offloads_from=1,
        ),
        EngineRecord(
            "megatron", "Megatron-LM", "megatron", {**_PLAIN, "compile": "block"}, lacks=_OF_MEGATRON, uniform=True,
            offloads_from=1, preferred=_SHARED,
        ),
        EngineRecord(
            "torchtitan", "torchtitan", "fsdp2", _TILES, lacks=_OF_TORCHTITAN, uniform=True, compiled="fsdp2-compiled",
            preferred=_SHARED,
        ),
        EngineRecord(
            "accelerate", "accelerate with FSDP or DDP", "fsdp1", _PLAIN, lacks=_OF_ACCELERATE, uniform=True,
            compiled="fsdp2-compiled",
        ),
    )
}  # fmt: skip
"""Engines by name."""
