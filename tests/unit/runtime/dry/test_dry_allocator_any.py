"""The model of torch's caching allocator on random steps: against the rules written down twice, and for stacks."""

from __future__ import annotations

from itertools import pairwise

from _plain_allocator import MIB, PlainAllocator, Segment
from hypothesis import example, given, settings
from hypothesis import strategies as st

from partool_runtime.dry.allocator import CachingAllocator, DeviceFull
from partool_runtime.dry.memory_blocks import MemoryBlock

SIZES = st.one_of(
    st.integers(1, 3 * MIB),
    st.integers(1, 90).map(lambda size: size * MIB),
    st.sampled_from([512, MIB, MIB + 1, 9 * MIB, 19 * MIB, 20 * MIB - 512, 20 * MIB]),
)
STEPS = st.lists(st.tuples(st.sampled_from("aaaafffffe"), SIZES, st.integers(0, 1)), max_size=60)
"""Steps: (allocate, free or empty the cache; size or place of a block; stream)."""


@given(st.booleans(), st.sampled_from([None, 70 * MIB, 200 * MIB, 1000 * MIB]), STEPS)
@settings(max_examples=300, deadline=None)
def test_any_steps_reserve_what_the_rules_say(
    expandable: bool, capacity: int | None, steps: list[tuple[str, int, int]]
) -> None:
    allocator = CachingAllocator(expandable=expandable, capacity_bytes=capacity)
    plain = PlainAllocator(expandable=expandable, capacity=capacity)
    held: list[tuple[MemoryBlock, tuple[Segment, tuple[int, int]] | None]] = []
    peak = 0
    for step, size, stream in steps:
        if step == "a":
            again = plain.allocate(size, stream)
            try:
                held.append((allocator.allocate(size, stream), again))
            except DeviceFull:
                assert again is None
        elif step == "f" and held:
            block, again = held.pop(size % len(held))
            allocator.free(block)
            plain.free(again)
        elif step == "e":
            allocator.empty_cache()
            plain.empty_cache()
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (plain.allocated, plain.reserved)
        assert allocator.allocated_bytes <= allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert peak <= allocator.peak_reserved_bytes, "a peak does not shrink"
        peak = allocator.peak_reserved_bytes
        ranges = sorted((block.address, block.address + block.size_bytes) for block, _ in held)
        assert all(end <= begin for (_, end), (begin, _) in pairwise(ranges))
    for block, _ in held:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@given(st.lists(st.one_of(st.none(), SIZES), max_size=80))
@example([20 * MIB, 1, None, MIB, 30 * MIB, None, 5 * MIB])
@settings(max_examples=150, deadline=None)
def test_a_stack_of_tensors_wastes_less_than_a_unit_in_an_expandable_segment(steps: list[int | None]) -> None:
    """None frees the tensor that was allocated last; each pool reserves the whole units of its peak."""
    allocator = CachingAllocator(expandable=True)
    held: list[MemoryBlock] = []
    now, peak = {True: 0, False: 0}, {True: 0, False: 0}
    for size in steps:
        if size is not None:
            held.append(allocator.allocate(size))
            now[size <= MIB] += -(-size // 512) * 512
        elif held:
            block = held.pop()
            now[block.size_bytes <= MIB] -= block.size_bytes
            allocator.free(block)
        peak = {small: max(peak[small], now[small]) for small in peak}
    units = {True: 2 * MIB, False: 20 * MIB}
    assert allocator.reserved_bytes == sum(-(-peak[small] // unit) * unit for small, unit in units.items())
