"""Copies parts of the records of a dry run: a layer's forward or backward pass is recorded once and played again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from partool_runtime.dry.marks import LAYER
from partool_runtime.dry.memory import Holding, MemoryRecord, alike
from partool_runtime.dry.record import CollectiveRecord


class Unequal(Exception):  # noqa: N818 - the caller runs everything instead
    """Passes that should repeat each other are not equal."""


class UnequalLayers(Unequal):
    """Layers that should repeat each other do not do the same."""


class Made(NamedTuple):
    """An allocation."""

    size_bytes: int
    term: str
    operator: str
    stream: int
    module: str
    """Name of the module, as it is for all layers."""


class Freed(NamedTuple):
    """The end of an allocation."""

    of: str
    """The pass that made it: ``own``, ``forward``; or ``given``, ``gradient`` for the tensors that a pass is given."""
    ordinal: int
    """Number of the allocation in its pass, or of the argument; 0 for the gradient."""


@dataclass(frozen=True)
class Recorded:
    """What a pass of a layer did."""

    entries: tuple[tuple[int, Made | Freed], ...]
    """Allocations and their ends, each with the number of operators that had run in the pass; 0 before the first
    operator that allocates."""
    order: tuple[int, ...]
    """Entries of the order of collectives."""
    operators: int

    def frees(self, of: str) -> set[int]:
        """Return the ordinals of the allocations of ``of`` that the pass frees."""
        return {entry.ordinal for _, entry in self.entries if isinstance(entry, Freed) and entry.of == of}

    @property
    def made(self) -> int:
        """Number of allocations."""
        return sum(isinstance(entry, Made) for _, entry in self.entries)


class Begin(NamedTuple):
    """Where a pass begins in the records."""

    logged: int
    ordered: int
    operators: int


class LayerLog:
    """Reads parts of the records of memory and of collectives, and appends copies of them."""

    def __init__(self, memory: MemoryRecord, record: CollectiveRecord) -> None:
        self.memory, self.record = memory, record
        self.active = True
        """Whether layers are repeated."""
        self.repeated: set[int] = set()
        """Layers of which no pass was executed while layers were repeated, by ``id``."""
        self.step = -1
        """Number of the step, from 0."""
        self.passes = self.of_passes = 0
        """Forward passes of layers in the step that ran, and all of them; of layers that are not in ``repeated``."""
        self.checks: list[Callable[[], None]] = []
        """Called after each step; they raise :class:`UnequalLayers`."""

    def begin_step(self) -> None:
        """Begin a step: what was recorded names exchanges by numbers, which begin anew."""
        self.step += 1
        self.passes = self.of_passes = 0

    def end_step(self) -> None:
        """Raise :class:`UnequalLayers` if passes of the step were repeated that were compared with no other."""
        for check in self.checks:
            check()

    def begin(self) -> Begin:
        """Return the place at which a pass begins. Operators after it are an entry of their own in the order."""
        self.record.order.append(LAYER)
        return Begin(len(self.memory.log), len(self.record.order), self.record.operators)

    def recorded(self, begin: Begin, given: Mapping[int, Freed]) -> tuple[Recorded, list[int]]:
        """Return what was done since ``begin``, and the places of its allocations.

        ``given`` names earlier allocations by their places. Raises :class:`UnequalLayers` if another one was freed.
        """
        places: list[int] = []
        freed_names = dict(given)
        entries: list[tuple[int, Made | Freed]] = []
        for at in range(begin.logged, len(self.memory.log)):
            entry = self.memory.log[at]
            moment = max(0, self.memory.moments[at] - begin.operators)
            if entry >= 0:
                freed_names[entry] = Freed("own", len(places))
                places.append(entry)
                made = self.memory.made[entry]
                name = alike(made.module)
                entries.append((moment, Made(made.size_bytes, made.term, made.operator, made.stream, name)))
            elif ~entry in freed_names:
                entries.append((moment, freed_names[~entry]))
            else:
                raise UnequalLayers(
                    f"a layer frees a tensor of {self.memory.made[~entry].operator} that is not its own"
                )
        order = tuple(self.record.order[begin.ordered :])
        self.record.order.append(LAYER)
        return Recorded(tuple(entries), order, self.record.operators - begin.operators), places

    def play(self, recorded: Recorded, given: Mapping[Freed, int]) -> list[int]:
        """Append a pass that was recorded; return the places of its allocations.

        ``given`` has the places of earlier allocations that the pass frees.
        """
        memory, begin = self.memory, self.record.operators
        places: list[int] = []
        for moment, entry in recorded.entries:
            memory.operators = begin + moment if moment else memory.operators
            if isinstance(entry, Made):
                passing = memory.passing()
                repeated = Holding(
                    entry.size_bytes, entry.term, entry.operator, entry.stream, passing, module=entry.module
                )
                places.append(memory.made_again(repeated))
            else:
                memory.gone_again(places[entry.ordinal] if entry.of == "own" else given[entry])
        self.record.order += [LAYER, *recorded.order, LAYER]
        self.record.operators += recorded.operators
        return places

    def place(self, tensor: torch.Tensor) -> int:
        """Return the place of a tensor's allocation; raises :class:`UnequalLayers` if none is recorded."""
        allocation = self.memory.place(tensor)
        if allocation is None:
            raise UnequalLayers("a layer's tensor lies in memory that is not recorded")
        return allocation
