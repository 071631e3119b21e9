"""Code bases as rows of facts: how each keeps training state, what it fuses and what it overlaps.

The planner prices partool's own runtime. The other rows serve replays of published runs, and plans for people who
compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Stack:
    """What a code base does. Bytes are per parameter."""

    name: str
    sequence_parallel: bool = True
    """Norms, dropout and residuals are sharded over tensor ranks."""
    fused: bool = True
    """Norms, activations and rotary positions are single kernels (compiled or hand-written)."""
    attention: Literal["flash2", "flash3", "unfused"] = "flash2"
    gradient_bytes: float = 4.0
    """Accumulated gradient per parameter."""
    reduce_bytes: float = 4.0
    """On the wire, per gradient element."""
    overlap_gradients: float = 0.8
    """Share of the last micro-batch's backward pass that can hide gradient reduction."""
    overlap_gathers: float = 0.8
    overlap_tensor: float = 0.0
    """Share of tensor parallelism's collectives that compute hides."""
    contention: float = 1.1
    """Slowdown of compute under ZeRO-3's collectives beside it."""
    operators_forward: float = 14.0
    """Kernels that the host starts per layer, forward."""
    operators_backward: float = 26.0
    vocab_parallel: bool = True
    """The head is sharded over tensor ranks."""
    derate: float = 1.0
    """Slowdown of everything the device does, against well-tuned kernels."""


PARTOOL = Stack("partool")
"""This project's own runtime."""

STACKS: dict[str, Stack] = {PARTOOL.name: PARTOOL}
"""By name."""
