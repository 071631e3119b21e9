"""The model of torch's caching allocator: each rule with numbers worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from _plain_allocator import MIB

from partool_runtime.dry.allocator import CachingAllocator, DeviceFull

BOTH = pytest.mark.parametrize("expandable", [False, True])


def mib(allocator: CachingAllocator) -> tuple[float, float]:
    """Return (allocated, reserved) in MiB."""
    return allocator.allocated_bytes / MIB, allocator.reserved_bytes / MIB


@BOTH
@pytest.mark.parametrize(("request_bytes", "block_bytes"), [(0, 0), (1, 512), (512, 512), (513, 1024), (1025, 1536)])
def test_sizes_are_multiples_of_512_bytes(expandable: bool, request_bytes: int, block_bytes: int) -> None:
    allocator = CachingAllocator(expandable=expandable)
    block = allocator.allocate(request_bytes)
    assert allocator.allocated_bytes == allocator.peak_allocated_bytes == block.size_bytes == block_bytes
    assert allocator.reserved_bytes == (2 * MIB if request_bytes else 0)
    allocator.free(block)
    assert allocator.allocated_bytes == 0


@pytest.mark.parametrize(
    ("request_bytes", "segment_mib", "expanded_mib"),
    [
        (1, 2, 2),
        (MIB, 2, 2),  # the largest request of the small pool
        (MIB + 1, 20, 20),
        (10 * MIB - 512, 20, 20),  # the largest request that shares a segment of 20 MiB
        (10 * MIB - 511, 10, 20),  # rounded to 10 MiB before its segment is chosen
        (10 * MIB + 1, 12, 20),  # 10 MiB + 512 B: 6 units of 2 MiB, or 1 of 20 MiB
        (20 * MIB, 20, 20),
        (20 * MIB + 1, 22, 40),  # 11 units of 2 MiB, or 2 of 20 MiB
        (33 * MIB, 34, 40),  # 17 units of 2 MiB, or 2 of 20 MiB
    ],
)
def test_a_first_request_reserves_a_segment(request_bytes: int, segment_mib: int, expanded_mib: int) -> None:
    for expandable, expected in ((False, segment_mib), (True, expanded_mib)):
        allocator = CachingAllocator(expandable=expandable)
        allocator.allocate(request_bytes)
        assert allocator.reserved_bytes == allocator.peak_reserved_bytes == expected * MIB


@BOTH
def test_small_requests_share_2_mib(expandable: bool) -> None:
    """1 MiB and 1 MiB − 512 B leave 512 B of 2 MiB: room for one byte, not for a second."""
    allocator = CachingAllocator(expandable=expandable)
    allocator.allocate(MIB)
    allocator.allocate(MIB - 512)
    allocator.allocate(1)
    assert mib(allocator) == (2, 2)
    allocator.allocate(1)
    assert mib(allocator)[1] == 4


def test_a_rest_of_a_large_block_is_kept_up_to_1_mib_unless_it_is_expandable() -> None:
    for expandable, request, allocated in (
        (False, 19 * MIB, 20),  # 20 − 19 = 1 MiB is not more than 1 MiB: the block stays whole
        (False, 19 * MIB - 512, 19 - 512 / MIB),  # 1 MiB + 512 B is
        (True, 19 * MIB, 19),
        (True, 20 * MIB - 512, 20 - 512 / MIB),  # 512 B is the smallest block
    ):
        allocator = CachingAllocator(expandable=expandable)
        allocator.free(allocator.allocate(20 * MIB))
        allocator.allocate(request)
        assert mib(allocator) == (allocated, 20)


def test_the_smallest_free_block_that_is_large_enough_is_used() -> None:
    """Segments of 30, 14, 24 and 14 MiB are free; 13 MiB take the first of 14, whose rest of 1 MiB stays with it."""
    allocator = CachingAllocator(expandable=False)
    blocks = [allocator.allocate(size * MIB) for size in (30, 14, 24, 14)]
    addresses = [block.address for block in blocks]
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(13 * MIB).address == addresses[1]
    assert mib(allocator) == (14, 82)
    # 24 MiB are the smallest of 30, 24 and 14 that hold 15; 24 − 15 = 9 MiB are split off
    assert allocator.allocate(15 * MIB).address == addresses[2]
    assert mib(allocator) == (29, 82)


def test_a_free_block_merges_with_free_neighbours_of_its_segment() -> None:
    """20 MiB hold 6 + 6 + 6 MiB and 2 MiB that are free."""
    allocator = CachingAllocator(expandable=False)
    first, second, third = (allocator.allocate(6 * MIB) for _ in range(3))
    begin = first.address
    assert mib(allocator) == (18, 20)
    allocator.free(first)
    allocator.free(third)  # merges with the 2 MiB after it: 6 and 8 MiB are free, 12 in neither
    apart = allocator.allocate(12 * MIB)
    assert mib(allocator) == (18, 32)
    allocator.free(apart)
    allocator.free(second)  # all 20 MiB are one block again
    allocator.allocate(12 * MIB)  # the segment of 12 MiB is the smallest that is large enough
    assert allocator.allocate(20 * MIB).address == begin
    assert mib(allocator) == (32, 32)


@BOTH
def test_streams_do_not_share_blocks(expandable: bool) -> None:
    """Blocks of 20 MiB and 1 KiB that are free on stream 0 are of no use on stream 7: 22 MiB + 22 MiB."""
    allocator = CachingAllocator(expandable=expandable)
    for stream in (0, 7, 0, 7):
        held = [allocator.allocate(size, stream) for size in (20 * MIB, 1024)]
        for block in held:
            allocator.free(block)
    assert mib(allocator) == (0, 44)


def test_growing_tensors_leave_unusable_segments_unless_they_are_expandable() -> None:
    """Eight tensors of 16 MiB, later of 18 MiB.

    No segment of 16 MiB holds 18: 8 · 16 + 8 · 18 = 272 MiB. One expandable segment of 128 MiB has 7 units of 20 MiB
    and grows to 144 MiB, 8 units.
    """
    for expandable, before, after in ((False, 128, 272), (True, 140, 160)):
        allocator = CachingAllocator(expandable=expandable)
        for size, reserved in ((16, before), (18, after)):
            held = [allocator.allocate(size * MIB) for _ in range(8)]
            assert mib(allocator) == (8 * size, reserved)
            for block in held:
                allocator.free(block)
        assert allocator.peak_allocated_bytes == 144 * MIB


def test_the_end_of_an_expandable_segment_is_extended_by_what_is_missing() -> None:
    """5 of 20 MiB are used; 40 MiB need 45 in all, so 2 units of 20 MiB more, and begin where the 5 MiB end."""
    allocator = CachingAllocator(expandable=True)
    first = allocator.allocate(5 * MIB)
    second = allocator.allocate(40 * MIB)
    assert second.address == first.address + 5 * MIB
    assert mib(allocator) == (45, 60)


def test_the_end_of_an_expandable_segment_is_kept_for_larger_requests() -> None:
    """25 + 10 MiB leave 5 MiB at the end of 40; a request of 4 MiB goes to the 25 MiB, as the 5 MiB can grow."""
    allocator = CachingAllocator(expandable=True)
    first, second = allocator.allocate(25 * MIB), allocator.allocate(10 * MIB)
    begin = first.address
    allocator.free(first)
    assert allocator.allocate(4 * MIB).address == begin
    assert allocator.allocate(30 * MIB).address == second.address + 10 * MIB  # 35 + 30 = 65 MiB: 4 units
    assert mib(allocator) == (44, 80)


def test_whole_units_of_an_expandable_segment_are_released_and_filled_first() -> None:
    """30 + 30 MiB in 3 units of 20 MiB; the second unit holds 10 MiB of each."""
    allocator = CachingAllocator(expandable=True)
    first, second = allocator.allocate(30 * MIB), allocator.allocate(30 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert mib(allocator) == (30, 40)
    assert (
        allocator.allocate(25 * MIB).address == second.address - 30 * MIB
    )  # the gap of 20 MiB and the 10 MiB after it
    assert mib(allocator) == (55, 60)
    allocator.free(second)  # free: 25 to 60 MiB; the third unit is whole, the second holds 5 MiB of the new block
    allocator.empty_cache()
    assert mib(allocator) == (25, 40)


def test_only_segments_without_allocated_blocks_are_released() -> None:
    allocator = CachingAllocator(expandable=False)
    kept = allocator.allocate(4 * MIB)  # 4 of 20 MiB
    allocator.free(allocator.allocate(50 * MIB))
    allocator.empty_cache()
    assert mib(allocator) == (4, 20)
    allocator.free(kept)
    allocator.empty_cache()
    assert (mib(allocator), allocator.peak_reserved_bytes) == ((0, 0), 70 * MIB)


def test_unused_segments_are_released_when_the_device_is_full() -> None:
    """64 MiB: 40 MiB are free but too small for 50; an expandable segment grows from 40 to 60 instead."""
    for expandable, reserved in ((False, 50), (True, 60)):
        allocator = CachingAllocator(expandable=expandable, capacity_bytes=64 * MIB)
        allocator.free(allocator.allocate(40 * MIB))
        allocator.allocate(50 * MIB)
        assert mib(allocator) == (50, reserved)
        assert allocator.peak_reserved_bytes == reserved * MIB
    allocator = CachingAllocator(expandable=True, capacity_bytes=64 * MIB)
    allocator.free(allocator.allocate(40 * MIB, stream=1))
    allocator.allocate(50 * MIB)  # 40 + 60 MiB do not fit, so the other stream's 2 units are released
    assert mib(allocator) == (50, 60)


def test_a_full_device_is_an_error_with_sizes() -> None:
    """60 MiB with 4 MiB in 20: 44 MiB more need a segment of their own, but an expandable one of 48 has 3 units."""
    allocator = CachingAllocator(expandable=False, capacity_bytes=60 * MIB)
    allocator.allocate(4 * MIB)
    allocator.free(allocator.allocate(30 * MIB))
    with pytest.raises(DeviceFull, match=f"{44 * MIB - 1} bytes do not fit") as caught:
        allocator.allocate(44 * MIB - 1)
    full = caught.value
    assert (full.requested_bytes, full.allocated_bytes, full.reserved_bytes) == (44 * MIB - 1, 4 * MIB, 20 * MIB)
    assert mib(allocator) == (4, 20), "the request left nothing behind"
    allocator.allocate(40 * MIB)
    allocator = CachingAllocator(expandable=True, capacity_bytes=60 * MIB)
    allocator.allocate(4 * MIB)
    allocator.allocate(44 * MIB)
    with pytest.raises(DeviceFull):
        allocator.allocate(13 * MIB)  # 12 MiB are left at the end


def test_an_expandable_segment_has_addresses_for_one_eighth_more_than_the_device() -> None:
    """80 MiB hold 30 + 20 + 30, the outer ones are freed: 80 + 80 / 8 = 90 MiB of addresses are 5 units of 20 MiB.

    No 45 MiB are free below address 80. Released are the units from 0 to 20 and from 60 to 80; new ones are mapped
    from 60 to 100, so that the block lies from 50 to 95.
    """
    allocator = CachingAllocator(expandable=True, capacity_bytes=80 * MIB)
    first, second, third = (allocator.allocate(size * MIB) for size in (30, 20, 30))
    allocator.free(first)
    allocator.free(third)
    assert allocator.allocate(45 * MIB).address == second.address + 20 * MIB
    assert mib(allocator) == (65, 80)


@BOTH
def test_a_block_is_freed_once(expandable: bool) -> None:
    allocator = CachingAllocator(expandable=expandable)
    block = allocator.allocate(1)
    allocator.free(block)
    with pytest.raises(ValueError, match="free already"):
        allocator.free(block)


@pytest.mark.timeout(60)
def test_the_model_does_not_import_torch() -> None:
    code = "import sys, partool_runtime.dry.allocator; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=50).returncode == 0
