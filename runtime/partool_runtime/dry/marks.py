"""Marks in the records of a dry run: where the work for each micro-batch begins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from partool.plan.rank_trace import COMPUTE
from partool_runtime.data.batches import MicroBatch
from partool_runtime.dry.memory import MemoryRecord
from partool_runtime.dry.record import CollectiveRecord

MARK = -2
"""Entry of the order of collectives at each mark; operators before and after it are entries of their own."""
LAYER = -3
"""Entry of the order of collectives where a layer's pass begins or ends, if layers are repeated."""


class TraceMark(NamedTuple):
    """A place in the records."""

    kind: str
    """``item``: a loop takes the next micro-batch; ``pass``: a forward or backward pass begins; ``step``."""
    number: int
    """Number of the micro-batch in its loop; 0 for others."""
    step: int
    """Number of the step, from 0; -1 before the first."""
    logged: int
    """Entries of the memory record's log before the mark."""
    operators: int
    """Operators of the step before the mark."""


class Marks:
    """Marks of a run, in order."""

    def __init__(self, passes: frozenset[str], memory: MemoryRecord, record: CollectiveRecord) -> None:
        """Mark the records; ``passes`` are the timer's terms that begin a pass."""
        self._passes, self.memory, self.record = passes, memory, record
        self.marks = [TraceMark("step", 0, -1, 0, 0)]
        self._step = -1

    def plain(self) -> tuple[list[int], int]:
        """Return the order of collectives without marks, and the number of operators."""
        return without_marks(self.record.order), self.record.operators

    def step(self) -> None:
        """Mark the begin of a step."""
        self._step += 1
        self._mark("step", 0)

    def term(self, term: str) -> None:
        """Mark that a term of the timer begins, if it is a pass."""
        if term in self._passes:
            self._mark("pass", 0)

    def item(self, number: int) -> None:
        """Mark that a loop takes a micro-batch."""
        self._mark("item", number)

    def _mark(self, kind: str, number: int) -> None:
        self.record.order.append(MARK)
        self.marks.append(TraceMark(kind, number, self._step, len(self.memory.log), self.record.operators))


def without_marks(order: Iterable[int]) -> list[int]:
    """Return an order of collectives without its marks: operators before and after a mark are one entry."""
    entries: list[int] = []
    for entry in order:
        if entry not in (MARK, LAYER) and not (entry == COMPUTE and entries and entries[-1] == COMPUTE):
            entries.append(entry)
    return entries


class MarkedBatch(list[MicroBatch]):
    """Micro-batches of a step; loops over them are marked."""

    def __init__(self, batch: list[MicroBatch], marks: Marks) -> None:
        super().__init__(batch)
        self._marks = marks

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches, each after a mark."""
        for number in range(len(self)):
            self._marks.item(number)
            yield self[number]
