"""Kernels and collectives that ``partool calibrate`` timed on the user's machine, as plans hold them."""

from __future__ import annotations

from partool.spec._base import Section
from partool.spec.numbers import Bytes, Ranks, Rate, Tokens, Width


class ProductRow(Section):
    """One matrix product [m, k] × [k, n]."""

    wide: bool = False
    """True for a product in 16 bits that prices the wide products of a plan in fp8."""
    m: Tokens
    n: Tokens
    k: Tokens
    seconds: Rate


class AttentionRow(Section):
    """Causal attention in both passes together."""

    length: Tokens
    heads: Tokens
    """Heads of all sequences together."""
    width: Width
    """Elements of a head."""
    seconds: Rate


class CollectiveRow(Section):
    """One collective within a node."""

    operation: str
    ranks: Ranks
    whole_bytes: Bytes
    """Bytes of the whole tensor."""
    seconds: Rate


class MeasuredRows(Section):
    """What was timed on this machine, at the clocks of a short measurement; sizes that were timed twice have a median.

    A kind with fewer than two rows is empty: one row scales a table, as the machine's rates do already.
    """

    date: str
    """Day of the measurement."""
    products: tuple[ProductRow, ...] = ()
    attention: tuple[AttentionRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
