"""The rules of torch's caching allocator, written down a second time: intervals in lists that are searched whole."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20
UNLIMITED = 1 << 60


@dataclass
class Segment:
    pool: tuple[int, bool]
    """(stream, small)"""
    base: int
    end: int
    """First offset that is not of the segment."""
    used: list[tuple[int, int]] = field(default_factory=list)
    """Allocated intervals, as offsets."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """Intervals with memory, as offsets; neighbours are merged."""


def merged(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(intervals):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        elif end > begin:
            found.append((begin, end))
    return found


def without(intervals: list[tuple[int, int]], holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found = []
    for first, end in intervals:
        begin = first
        for left, right in sorted(holes):
            if left < end and begin < right:
                found.append((begin, left))
                begin = right
        found.append((begin, end))
    return [(begin, end) for begin, end in found if begin < end]


class PlainAllocator:
    def __init__(self, *, expandable: bool, capacity: int | None = None) -> None:
        self.expandable, self.capacity = expandable, UNLIMITED if capacity is None else capacity
        self.segments: list[Segment] = []
        self.begun = 0

    @property
    def reserved(self) -> int:
        return sum(end - begin for each in self.segments for begin, end in each.memory)

    @property
    def allocated(self) -> int:
        return sum(end - begin for each in self.segments for begin, end in each.used)

    def allocate(self, request: int, stream: int) -> tuple[Segment, tuple[int, int]] | None:
        size = max(1, (request + 511) // 512) * 512
        pool = (stream, size <= MIB)
        place = self.cached(pool, size) or self.new(pool, size)
        if place is None:
            self.empty_cache()
            place = self.new(pool, size)
        if place is None:
            return None
        segment, begin, end = place
        if end - begin - size >= (512 if pool[1] or self.expandable else MIB + 512):
            end = begin + size
        segment.used.append((begin, end))
        return segment, (begin, end)

    def free(self, held: tuple[Segment, tuple[int, int]]) -> None:
        held[0].used.remove(held[1])

    def cached(self, pool: tuple[int, bool], size: int) -> tuple[Segment, int, int] | None:
        found = []
        for segment in self.segments:
            for begin, end in without(segment.memory, segment.used) if segment.pool == pool else ():
                if end - begin >= size:
                    grows = self.expandable and any(each[1] == end for each in segment.memory)
                    later = min((each[0] for each in segment.memory if each[0] > end), default=segment.end)
                    most = later - begin if grows else end - begin
                    found.append((end - begin, segment.base + begin, most, (segment, begin, end)))
        found.sort(key=lambda each: each[:2])
        while len(found) > 1 and found[1][2] < found[0][2]:
            del found[0]
        return found[0][3] if found else None

    def new(self, pool: tuple[int, bool], size: int) -> tuple[Segment, int, int] | None:
        unit = (2 if pool[1] else 20) * MIB
        if not self.expandable:
            whole = unit if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            return self.more(self.begin(pool, whole), 0, whole) if self.reserved + whole <= self.capacity else None
        for segment in [each for each in self.segments if each.pool == pool]:
            for gap, _ in without([(0, segment.end)], segment.memory):
                first = next((each[0] for each in without(segment.memory, segment.used) if each[1] == gap), gap)
                if first + size <= min((each[0] for each in segment.used if each[0] >= first), default=segment.end):
                    return self.mapped(segment, first, size, unit)
        end = -(-(self.capacity + self.capacity // 8) // unit) * unit
        return self.mapped(self.begin(pool, end), 0, size, unit)

    def mapped(self, segment: Segment, first: int, size: int, unit: int) -> tuple[Segment, int, int] | None:
        for begin, end in without([(first, first + size)], segment.memory):
            whole = -(-end // unit) * unit
            if self.reserved + whole - begin > self.capacity:
                return None
            self.more(segment, begin, whole)
        return next((segment, *each) for each in without(segment.memory, segment.used) if each[0] == first)

    def begin(self, pool: tuple[int, bool], end: int) -> Segment:
        self.begun += 1
        self.segments.append(Segment(pool, self.begun * 4 * UNLIMITED, end))
        return self.segments[-1]

    def more(self, segment: Segment, begin: int, end: int) -> tuple[Segment, int, int]:
        segment.memory = merged([*segment.memory, (begin, end)])
        return segment, begin, end

    def empty_cache(self) -> None:
        for segment in self.segments:
            unit = (2 if segment.pool[1] else 20) * MIB
            for begin, end in without(segment.memory, segment.used):
                if self.expandable:
                    whole = -(-begin // unit) * unit, end // unit * unit
                    segment.memory = without(segment.memory, [whole]) if whole[0] < whole[1] else segment.memory
                elif not segment.used:
                    segment.memory = []
        self.segments = [each for each in self.segments if each.memory]
