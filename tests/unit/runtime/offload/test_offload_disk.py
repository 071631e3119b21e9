"""State on disks: reads return the bytes that were written, or raise an error."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partool_runtime.errors import ConfigurationError
from partool_runtime.offload.buckets import Bucket, fill_buckets
from partool_runtime.offload.disk import IO_BYTES, Calls, DiskStore
from partool_runtime.offload.disk.claims import Claim
from partool_runtime.offload.store import MemoryStore

SHARDS = [("a", 7), ("b", 3 * 2**16 + 5), ("c", 2**16), ("d", 1), ("e", 70001)]
BUCKETS = fill_buckets(SHARDS, 2**16 + 2**12)
DTYPES = (torch.float32, torch.float32, torch.bfloat16)
pytestmark = pytest.mark.timeout(120)


class Odd(Calls):
    """System calls that are randomly short or late, and record the offsets of reads and writes."""

    def __init__(self, seed: int = 0) -> None:
        self.draws, self.lock = random.Random(seed), threading.Lock()
        self.places: list[tuple[str, int]] = []

    def _some(self, buffer: memoryview) -> memoryview:
        with self.lock:
            short, late = self.draws.random() < 0.3, self.draws.random() < 0.1
        if late:
            time.sleep(1e-3)
        return buffer[: -(-len(buffer) // 2 // 4096) * 4096] if short and len(buffer) > 4096 else buffer

    def read(self, descriptor: int, buffer: memoryview, place: int) -> int:
        with self.lock:
            self.places.append(("read", place))
        return super().read(descriptor, self._some(buffer), place)

    def write(self, descriptor: int, buffer: memoryview, place: int) -> int:
        with self.lock:
            self.places.append(("write", place))
        return super().write(descriptor, self._some(buffer), place)


class Failing(Calls):
    """System calls that fail once they are told to."""

    def __init__(self, code: int, *, reads: bool = False) -> None:
        self.code, self.reads, self.on = code, reads, False

    def read(self, descriptor: int, buffer: memoryview, place: int) -> int:
        if self.on and self.reads:
            raise OSError(self.code, os.strerror(self.code))
        return super().read(descriptor, buffer, place)

    def write(self, descriptor: int, buffer: memoryview, place: int) -> int:
        if self.on and not self.reads:
            raise OSError(self.code, os.strerror(self.code))
        return super().write(descriptor, buffer, place)


@contextmanager
def opened(
    folder: Path, calls: Calls | None = None, buffers: int = 3, buckets: Sequence[Bucket] = BUCKETS
) -> Iterator[DiskStore]:
    store = DiskStore(buckets, DTYPES, folder, buffers=buffers, calls=calls, owner="rank 0 of test")
    try:
        yield store
    finally:
        store.close()


def put(store: DiskStore | MemoryStore, bucket: int, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    with store.open(bucket, write=True) as tensors:
        for tensor in tensors:
            tensor.add_(torch.randn(len(tensor), generator=draws))


def fill(store: DiskStore, buckets: Sequence[Bucket] = BUCKETS) -> None:
    """Write every bucket, so that the first ones remain on disk only."""
    for bucket in range(len(buckets)):
        put(store, bucket, bucket)
    store.flush()


def compare(store: DiskStore, memory: MemoryStore, bucket: int) -> None:
    with store.open(bucket, write=False) as mine, memory.open(bucket, write=False) as other:
        assert all(torch.equal(m, o) for m, o in zip(mine, other, strict=True)), bucket


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "read", "expect", "flush", "flat", "load"]), st.integers(0, len(BUCKETS) - 1)
    ),
    max_size=25,
)


@settings(max_examples=15, deadline=None)
@given(actions=ACTIONS, buffers=st.integers(3, 6), seed=st.integers(0, 99))
def test_any_history_leaves_what_memory_would_hold(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]], buffers: int, seed: int
) -> None:
    memory = MemoryStore(BUCKETS, DTYPES)
    with opened(tmp_path_factory.getbasetemp(), Odd(seed), buffers) as store:
        for turn, (action, bucket) in enumerate(actions):
            if action == "put":
                put(store, bucket, turn)
                put(memory, bucket, turn)
            elif action == "read":
                compare(store, memory, bucket)
            elif action == "expect":
                order = list(range(len(BUCKETS)))
                random.Random(turn).shuffle(order)
                store.expect(order)
            elif action == "flush":
                store.flush()
            elif action == "flat":
                store.flush()
                assert all(torch.equal(m, o) for m, o in zip(store.flat(), memory.flat(), strict=True))
            else:
                store.flush()
                for mine, other in zip(store.flat(), memory.flat(), strict=True):
                    other[turn::1000] = turn
                    mine.copy_(other)
                store.written()
        for bucket in range(len(BUCKETS)):
            compare(store, memory, bucket)
        assert len(store._resident) <= buffers


def test_the_next_bucket_is_read_while_one_is_used_and_one_is_written(tmp_path: Path) -> None:
    calls, buckets = Odd(), fill_buckets([("a", 20 * 2**16)], 2**16)
    with opened(tmp_path, calls, buffers=4, buckets=buckets) as store:
        fill(store, buckets)
        calls.places.clear()
        store.expect(range(len(buckets)))
        deadline = time.monotonic() + 30
        for index, bucket in enumerate(buckets[:-4]):
            following = ("read", buckets[index + 1].first * 4)
            with store.open(bucket.index, write=True):
                while following not in calls.places and time.monotonic() < deadline:
                    time.sleep(1e-3)
                assert following in calls.places
                assert ("read", buckets[index + 4].first * 4) not in calls.places, "there is no memory for it"


def test_what_a_checkpoint_sees_leaves_memory_again(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        if not store._file.direct or any("in memory" in note for note in store.notes):
            pytest.skip("the file system is in memory")
        for flat in store.flat():
            flat.fill_(1)
        store.written()
        assert _cached_pages(store) == 0


def _cached_pages(store: DiskStore) -> int:
    """Return how many pages of the state's file are in the page cache."""
    assert store._mapping is not None
    libc = ctypes.CDLL(None, use_errno=True)
    size, found = len(store._mapping), (ctypes.c_ubyte * (len(store._mapping) // 4096))()
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(store._mapping)))
    assert libc.mincore(address, ctypes.c_size_t(size), found) == 0
    return sum(page & 1 for page in found)


def test_several_buckets_may_be_open_and_one_too_many_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        fill(store)
        with store.open(0, write=True) as first, store.open(1, write=False), store.open(2, write=False):
            with pytest.raises(RuntimeError, match="all 3 buckets in memory are in use"), store.open(3, write=False):
                pass
            first[0].fill_(3)
        with store.open(0, write=False) as first:
            assert bool((first[0] == 3).all())


def test_a_bucket_is_not_changed_while_it_is_written(tmp_path: Path) -> None:
    class Late(Calls):
        going, begun = threading.Event(), threading.Event()

        def write(self, descriptor: int, buffer: memoryview, place: int) -> int:
            if len(buffer) > 4096:  # the store first writes one page as a test
                self.begun.set()
                assert self.going.wait(30)
            return super().write(descriptor, buffer, place)

    calls, entered, memory = Late(), threading.Event(), MemoryStore(BUCKETS, DTYPES)
    put(memory, 0, 1)
    expected = memory.flat()[1][: BUCKETS[0].elements]

    def change() -> None:
        with store.open(0, write=True) as tensors:
            entered.set()
            tensors[0].fill_(7)

    with opened(tmp_path, calls) as store:
        put(store, 0, 1)
        assert calls.begun.wait(30)
        for bucket in range(len(BUCKETS)):
            with store.open(bucket, write=False):
                pass  # bucket 0 can be read, and other buckets use the remaining memory
        thread = threading.Thread(target=change)
        thread.start()
        early = entered.wait(0.2)
        calls.going.set()
        thread.join()
        assert entered.is_set()
        assert not early
        store.flush()
        for bucket in range(1, len(BUCKETS)):
            with store.open(bucket, write=False) as tensors:
                assert not tensors[0].any()
        with store.open(0, write=False) as (masters, moments, _):
            assert bool((masters == 7).all())
            assert torch.equal(moments, expected)


def test_a_bucket_whose_user_failed_is_as_it_was(tmp_path: Path) -> None:
    memory = MemoryStore(BUCKETS, DTYPES)
    with opened(tmp_path) as store:
        put(store, 1, 5)
        put(memory, 1, 5)
        with pytest.raises(IndexError), store.open(1, write=True) as tensors:
            tensors[0].fill_(1).index_select(0, torch.tensor([-1]))
        compare(store, memory, 1)


def test_nothing_is_stored_for_a_rank_without_shards(tmp_path: Path) -> None:
    store = DiskStore([], DTYPES, tmp_path)
    assert [len(flat) for flat in store.flat()] == [0, 0, 0]
    store.expect([])
    store.written()
    store.flush()
    store.close()


@pytest.mark.parametrize(
    ("code", "reads", "expected"),
    [
        (errno.ENOSPC, False, "PT670"),
        (errno.EDQUOT, False, "PT670"),
        (errno.EROFS, False, "PT670"),
        (errno.EIO, False, "PT671"),
        (errno.EIO, True, "PT671"),
    ],
)
def test_an_error_of_the_disk_ends_the_store_with_words(tmp_path: Path, code: int, reads: bool, expected: str) -> None:
    calls = Failing(code, reads=reads)
    with opened(tmp_path, calls) as store:
        fill(store)
        calls.on = True
        with pytest.raises(ConfigurationError) as caught:
            fill(store)
        assert caught.value.code == expected
        assert str(tmp_path) in caught.value.message
        assert "--resume" in caught.value.help
        calls.on = False
        with pytest.raises(ConfigurationError), store.open(0, write=False):
            pass


def test_a_transfer_that_moves_nothing_is_an_error(tmp_path: Path) -> None:
    class Stuck(Calls):
        def write(self, descriptor: int, buffer: memoryview, place: int) -> int:
            return super().write(descriptor, buffer, place) if len(buffer) == 4096 else 0

    with opened(tmp_path, Stuck()) as store, pytest.raises(ConfigurationError, match="move nothing") as caught:
        fill(store)
    assert caught.value.code == "PT671"


def _through_buckets(store: DiskStore) -> None:
    with store.open(0, write=False):
        pass


def _through_a_checkpoint(store: DiskStore) -> None:
    store.flat()
    store.flush()


@pytest.mark.parametrize("reading", [_through_buckets, _through_a_checkpoint])
def test_a_flipped_bit_is_found(tmp_path: Path, reading: Callable[[DiskStore], None]) -> None:
    with opened(tmp_path) as store:
        fill(store)
        place = BUCKETS[0].elements * 4 - 4099
        byte = os.pread(store._file._cached, 1, place)
        os.pwrite(store._file._cached, bytes([byte[0] ^ 16]), place)
        with pytest.raises(ConfigurationError, match="not what was written") as caught:
            reading(store)
    assert caught.value.code == "PT673"


def test_a_write_that_the_disk_lost_is_found(tmp_path: Path) -> None:
    class Losing(Calls):
        on = False

        def write(self, descriptor: int, buffer: memoryview, place: int) -> int:
            return len(buffer) if self.on and place == 0 else super().write(descriptor, buffer, place)

    calls = Losing()
    with opened(tmp_path, calls) as store:
        fill(store)
        calls.on = True
        fill(store)
        with pytest.raises(ConfigurationError) as caught, store.open(0, write=False):
            pass
    assert caught.value.code == "PT673"


@pytest.mark.parametrize("reading", [_through_buckets, _through_a_checkpoint])
@pytest.mark.parametrize("size_bytes", [0, 4096, 5000])
def test_a_file_that_was_cut_is_found(tmp_path: Path, reading: Callable[[DiskStore], None], size_bytes: int) -> None:
    with opened(tmp_path) as store:
        fill(store)
        os.ftruncate(store._file._cached, size_bytes)
        with pytest.raises(ConfigurationError) as caught:
            reading(store)
    assert caught.value.code == "PT672"
    assert "--resume" in caught.value.help


def test_a_folder_that_is_missing_or_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist") as caught, opened(tmp_path / "no"):
        pass
    assert caught.value.code == "PT667"
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="is not a folder"), opened(tmp_path / "file"):
        pass


def test_a_limit_on_file_sizes_shows_at_the_start(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(ConfigurationError, match="needs 3") as caught, opened(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.code == "PT669"
    assert list(tmp_path.iterdir()) == []


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True)
    if done.returncode:
        pytest.skip("mounting takes a privilege")
    try:
        yield
    finally:
        gc.collect()  # memory mappings keep the file system busy
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_is_too_small_shows_at_the_start(tmp_path: Path) -> None:
    with mounted(tmp_path, "size=1m"):
        with pytest.raises(ConfigurationError, match="bytes are free") as caught, opened(tmp_path):
            pass
        assert caught.value.code == "PT669"
        with pytest.raises(ConfigurationError, match="1,048,576 bytes are free"), opened(tmp_path):
            pass  # the first attempt freed its space


def test_a_disk_that_is_none_is_said_to_be_memory(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        before = any("in memory" in note for note in store.notes)
    with mounted(tmp_path, "size=64m"), opened(tmp_path) as store:
        assert [str(tmp_path) in note and "saves none" in note for note in store.notes] == [True]
        fill(store)
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(tmp_path)], capture_output=True, text=True, check=True).stdout
    assert before == (kind.strip() in ("tmpfs", "ramfs"))


def test_a_disk_that_is_read_only(tmp_path: Path) -> None:
    with mounted(tmp_path, "ro"), pytest.raises(ConfigurationError, match="Read-only") as caught, opened(tmp_path):
        pass
    assert caught.value.code == "PT668"


def test_memory_that_is_not_there(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
    resource.setrlimit(resource.RLIMIT_AS, (held + 2**26, limits[1]))
    try:
        with pytest.raises(ConfigurationError) as caught:
            DiskStore(fill_buckets([("a", 2**24)], 2**24), DTYPES, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert caught.value.code == "PT674"
    assert list(tmp_path.iterdir()) == []


def test_without_direct_transfers_it_works_and_says_so(tmp_path: Path) -> None:
    class Indirect(Calls):
        first = True

        def write(self, descriptor: int, buffer: memoryview, place: int) -> int:
            if self.first:
                self.first = False
                raise OSError(errno.EINVAL, "no")
            return super().write(descriptor, buffer, place)

    with opened(tmp_path, Indirect()) as store:
        assert any("O_DIRECT" in note or "in memory" in note for note in store.notes)
        fill(store)
        memory = MemoryStore(BUCKETS, DTYPES)
        for bucket in range(len(BUCKETS)):
            put(memory, bucket, bucket)
            compare(store, memory, bucket)


def test_ranks_share_a_folder(tmp_path: Path) -> None:
    with opened(tmp_path) as one, opened(tmp_path) as other:
        put(one, 0, 1)
        put(other, 0, 2)
        assert not any("killed" in note for note in (*one.notes, *other.notes))
        one.flush()
        with one.open(0, write=False) as mine, other.open(0, write=False) as others:
            assert not torch.equal(mine[0], others[0])
        assert len(list(tmp_path.iterdir())) == 2
    assert list(tmp_path.iterdir()) == []


KILLED = """
import sys
from partool_runtime.offload.disk import DiskStore
from partool_runtime.offload.buckets import Bucket, fill_buckets
import torch
buckets = fill_buckets([("a", 2**20)], 2**18)
store = DiskStore(buckets, (torch.float32,) * 3, sys.argv[1], owner="rank 3 of before")
store.flat()
while True:
    store.expect(range(len(buckets)))
    for bucket in buckets:
        with store.open(bucket.index, write=True) as tensors:
            tensors[0].add_(1)
    print("round", flush=True)
"""


def test_a_killed_run_leaves_no_state_and_the_next_one_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline() == "round\n"
        with opened(tmp_path) as beside:
            assert not any("killed" in note for note in beside.notes)  # the process is alive
        process.send_signal(signal.SIGKILL)
    left = list(tmp_path.iterdir())
    assert [path.suffix for path in left] == [".claim"]
    assert json.loads(left[0].read_text())["bytes"] == 12 * 2**20
    with opened(tmp_path) as store:
        assert ["rank 3 of before" in note for note in store.notes if "last checkpoint" in note] == [True]
        assert all(not flat.any() for flat in store.flat())
    assert list(tmp_path.iterdir()) == []


def test_a_claim_that_cannot_be_read_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "partool-offload-x.claim").write_text("{")
    claim = Claim(tmp_path, "rank 0", 5)
    assert claim.dead == ["a rank"]
    claim.drop()
    claim.drop()


def test_blocks_are_large_and_whole_pages(tmp_path: Path) -> None:
    buckets = fill_buckets([("a", 5 * 2**20 + 3), ("b", 70000)], 2**22)
    with_blocks = DiskStore(buckets, DTYPES, tmp_path)
    blocks = [s.block for stretches in with_blocks._stretches for s in stretches]
    with_blocks.close()
    assert {b.length % 4096 for b in blocks} == {b.place % 4096 for b in blocks} == {0}
    assert [b.length for b in blocks].count(IO_BYTES) >= len(blocks) // 2
    ends = sorted((b.place, b.place + b.length) for b in blocks)
    assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(ends)), "no gaps, no overlap"
