"""Composes the records of a run from the records of a run with fewer micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from partool_runtime.dry.layer_log import Unequal
from partool_runtime.dry.marks import without_marks
from partool_runtime.dry.memory import Holding, MemoryRecord


class Place(NamedTuple):
    """What a segment of a run does."""

    section: tuple[int, int]
    """Step, and number of the section in it: a loop over micro-batches, passes, or what is between them."""
    kind: str
    """Kind of action and stage of a pass; empty in other sections."""
    micro_batch: int
    """-1 where a segment belongs to none."""


class Segment(NamedTuple):
    """A part of a run between two marks."""

    place: Place
    logged: tuple[int, int]
    """First entry of the memory log, and the one after the last."""
    operators: tuple[int, int]
    """Operators that the step has run at the begin and at the end."""
    order: tuple[int, ...]
    """Entries of the order of collectives; empty before the last step."""


class Copy(NamedTuple):
    """A segment of the composed run."""

    place: Place
    template: int
    """Index of the segment that stands for it."""


class Composition:
    """Writes the memory log of a run whose segments are copies of another run's.

    A tensor that a segment frees was made for the same micro-batch, or for one at the same distance; tensors that are
    not made for a micro-batch are the same ones in all copies.
    """

    def __init__(self, segments: Sequence[Segment], copies: Sequence[Copy], memory: MemoryRecord) -> None:
        self._segments, self._copies, self._memory = segments, copies, memory
        self._of: dict[int, tuple[int, int]] = {}
        """Segment and ordinal of each allocation, by its place in the list of holdings."""
        for index, segment in enumerate(segments):
            made = [entry for entry in memory.log[slice(*segment.logged)] if entry >= 0]
            self._of |= {entry: (index, ordinal) for ordinal, entry in enumerate(made)}
        self._entries = {made: entry for entry, made in self._of.items()}
        self._by_place = {copy.place: at for at, copy in enumerate(copies)}
        self._by_template: defaultdict[int, list[int]] = defaultdict(list)
        for at, copy in enumerate(copies):
            self._by_template[copy.template].append(at)
        self._live: dict[tuple[int, int], int] = {}
        """Places in the composed list of holdings, by index of the copy and ordinal."""
        self._made: list[Holding] = []
        self._log: list[int] = []
        self._moments: list[int] = []

    def check(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Compare pairs of segments that repeat each other; raises :class:`Unequal`."""
        for one, other in pairs:
            if self._content(one) != self._content(other):
                raise Unequal(f"{self._segments[one].place} and {self._segments[other].place}")

    def _content(self, index: int) -> list[object]:
        segment = self._segments[index]
        first = segment.operators[0]
        content: list[object] = [without_marks(segment.order), segment.operators[1] - first]
        for at in range(*segment.logged):
            entry = self._memory.log[at]
            made = self._memory.made[entry if entry >= 0 else ~entry]
            what = made.size_bytes, made.term, made.operator, made.stream
            whose = None if entry >= 0 else self._relative(~entry, segment.place)
            content.append((self._memory.moments[at] - first, what, whose))
        return content

    def _relative(self, entry: int, place: Place) -> object:
        """Describe an allocation as a segment at ``place`` sees it.

        Its number in its own segment may differ, as a step's first micro-batch allocates more than others.
        """
        index, ordinal = self._of[entry]
        other = self._segments[index].place
        if other.micro_batch < 0 or place.micro_batch < 0 or other.section[0] != place.section[0]:
            return other, ordinal
        return other.section, other.kind, other.micro_batch - place.micro_batch

    def write(self) -> int:
        """Write the composed run into the record of memory; return the operators of its last step."""
        operators, begin, step = 0, 0, -2
        for at, copy in enumerate(self._copies):
            segment = self._segments[copy.template]
            if copy.place.section[0] != step:
                step, operators, begin = copy.place.section[0], 0, len(self._log)
            self._copy(at, segment, operators - segment.operators[0])
            operators += segment.operators[1] - segment.operators[0]
        self._compare_ends()
        self._memory.replace(self._made, self._log, self._moments, begin)
        return operators

    def _copy(self, at: int, segment: Segment, later: int) -> None:
        ordinal = 0
        freed = {self._of[~entry] for entry in self._memory.log[slice(*segment.logged)] if entry < 0}
        for place in range(*segment.logged):
            entry, moment = self._memory.log[place], self._memory.moments[place] + later
            if entry >= 0:
                self._live[at, ordinal] = len(self._made)
                ordinal += 1
                self._log.append(len(self._made))
                self._moments.append(moment)
                self._made.append(self._memory.made[entry])
                continue
            for gone in self._freed(at, self._of[~entry], freed):
                self._log.append(~self._live.pop(gone))
                self._moments.append(moment)

    def _freed(self, at: int, made: tuple[int, int], together: set[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return which allocations copy ``at`` frees where its template frees ``made``, with ``together``."""
        index, ordinal = made
        copies = self._by_template[index]
        here, freeing_place = self._copies[at], self._segments[index].place
        if index == here.template:
            return self._checked_live([(at, ordinal)])
        if len(copies) == 1 and (freeing_place.micro_batch < 0 or self._template_place(at).micro_batch < 0):
            return self._checked_live([(copies[0], ordinal)])
        beside = self._before(index)
        if len(self._by_template[here.template]) == 1 and (beside, ordinal) in together:
            # The segment frees those of all micro-batches.
            return self._checked_live([(copy, ordinal) for copy in copies])
        wanted: list[tuple[int, int]] = []
        if (
            freeing_place.section[0] == here.place.section[0]
            and min(freeing_place.micro_batch, here.place.micro_batch) >= 0
        ):
            distance = freeing_place.micro_batch - self._template_place(at).micro_batch
            near = self._by_place.get(freeing_place._replace(micro_batch=here.place.micro_batch + distance))
            wanted += [] if near is None else [(near, ordinal)]
        wanted += [(copy, ordinal) for copy in reversed(copies)]
        live_copy = next((each for each in wanted if self._fits(each, made)), None)
        return self._checked_live([live_copy or (-1, ordinal)])

    def _checked_live(self, wanted: list[tuple[int, int]]) -> list[tuple[int, int]]:
        if missing := [each for each in wanted if each not in self._live]:
            raise Unequal(f"{missing[0]} is not held")
        return wanted

    def _fits(self, copy: tuple[int, int], made: tuple[int, int]) -> bool:
        if copy not in self._live:
            return False
        return self._made[self._live[copy]].size_bytes == self._memory.made[self._entries[made]].size_bytes

    def _template_place(self, at: int) -> Place:
        return self._segments[self._copies[at].template].place

    def _before(self, index: int) -> int:
        """Return the segment that does the same for the micro-batch before; -1 if there is none."""
        place = self._segments[index].place
        wanted = place._replace(micro_batch=place.micro_batch - 1)
        return next((at for at, segment in enumerate(self._segments) if segment.place == wanted), -1)

    def _compare_ends(self) -> None:
        """Raise :class:`Unequal` unless the end holds what the shorter run holds, once or for each copy."""
        gone = {~entry for entry in self._memory.log if entry < 0}
        at_end = {self._of[entry] for entry in self._memory.log if entry >= 0 and entry not in gone}
        kept: defaultdict[tuple[int, int], int] = defaultdict(int)
        for at, ordinal in self._live:
            kept[self._copies[at].template, ordinal] += 1
        for made, count in kept.items():
            if made not in at_end or count not in (1, len(self._by_template[made[0]])):
                raise Unequal(f"{count} of {made} are held")
        if missing := at_end - kept.keys():
            raise Unequal(f"{missing} are not held")


def composed_order(segments: Sequence[Segment], copies: Sequence[Copy]) -> list[int]:
    """Return the order of collectives of the composed run's last step."""
    return without_marks(entry for copy in copies for entry in segments[copy.template].order)
