"""Elements and seconds of Ulysses in a captured graph: as Ulysses, but nothing is computed while heads are sent."""

from __future__ import annotations

from dataclasses import replace

from partool.cost.sequence import ulysses
from partool.cost.sequence.types import ExchangeTime, SequencePass
from partool.cost.sequence.ulysses import buffers as buffers  # noqa: PLC0414 - the same buffers
from partool.cost.sequence.ulysses import parts as parts  # noqa: PLC0414 - the same elements


def exchange(one: SequencePass) -> ExchangeTime:
    """Return the seconds of exchanging heads for tokens; queries, keys and values are sent at once."""
    return replace(ulysses.exchange(one), hidden=0.0)
