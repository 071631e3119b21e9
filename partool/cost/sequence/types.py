"""What one attention layer sends between the ranks that share its sequence, counted exactly."""

from __future__ import annotations

from typing import NamedTuple


class AttentionSizes(NamedTuple):
    """The attention of one layer, of one micro-batch, on one tensor rank."""

    batch: int
    queries: int
    keys: int
    """Heads of keys, and as many of values; fewer than ``queries`` where several of these read the same."""
    key_dim: int
    """Width of a head of queries or keys."""
    value_dim: int
    """Width of a head of values, and of the result."""
    window: int | None = None
    """Tokens that a token sees, itself included."""


class Sent(NamedTuple):
    """Elements that one rank sends to others."""

    forward: int
    backward: int
    forward_wide: int = 0
    """In float32 or wider, whatever the type of computation."""
    backward_wide: int = 0

    def bytes(self, compute_bytes: int) -> tuple[int, int]:
        """Return the bytes of both passes, of elements of a width; wide ones have 4 bytes or more."""
        wide = max(compute_bytes, 4)
        return (
            self.forward * compute_bytes + self.forward_wide * wide,
            self.backward * compute_bytes + self.backward_wide * wide,
        )
