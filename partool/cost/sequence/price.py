"""Prices (seconds, elements, bytes) of sequence parallelism: find a method's module, and price columns of layouts."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, cast

import numpy as np

from partool.cost.case import SEQUENCE_METHODS, Column, Layouts
from partool.cost.kinds import Kind
from partool.cost.sequence.types import (
    AttentionBuffers,
    AttentionSizes,
    ExchangeTime,
    SentParts,
    SequencePass,
    SequenceTeams,
)
from partool.layout.sequence import Spans
from partool.work.base import Workload


class MethodPrice(Protocol):
    """Functions of a method's module, ``partool.cost.sequence.<name>``."""

    def parts(self, team: SequenceTeams, every: Sequence[Spans], heads: AttentionSizes, rank: int) -> SentParts:
        """Return how many elements a rank sends in one layer in a forward and a backward pass, counted exactly."""
        ...

    def exchange(self, one: SequencePass) -> ExchangeTime:
        """Return the seconds of the exchanges of one layer in one pass."""
        ...

    def buffers(self, one: AttentionBuffers) -> Column:
        """Return the bytes of extra buffers for the attention of one layer, per token of a rank."""
        ...


@lru_cache
def price_of(method: str) -> MethodPrice:
    """Return the module that has the price functions of ``method``."""
    return cast(MethodPrice, importlib.import_module(f"partool.cost.sequence.{method}"))


PRICED = tuple(enumerate(SEQUENCE_METHODS))
"""Index and name of each method."""


def exchange(job: Workload, layouts: Layouts, kind: Kind, *, backward: bool) -> ExchangeTime:
    """Return the seconds of one layer's exchanges among ranks that share a sequence."""
    seconds, several = ExchangeTime(), np.asarray(layouts.cp) > 1
    if not np.any(several):
        return seconds
    one, method = SequencePass(job, layouts, kind, backward), np.asarray(layouts.sequence_method)
    for index, name in PRICED:
        uses_method = several & (method == index)
        if np.any(uses_method):
            seconds.add(uses_method, price_of(name).exchange(one))
    return seconds
