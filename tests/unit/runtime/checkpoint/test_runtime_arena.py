"""Copies of the training state through two blocks of host memory, whose copies in flight threads delay."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from partool_runtime.checkpoint import Arena, Checkpointer, open_arena
from partool_runtime.checkpoint._arena import BLOCK_BYTES
from partool_runtime.checkpoint._files import Files
from partool_runtime.jobs.train.trainer import _room_bytes
from partool_runtime.offload import lanes
from partool_runtime.offload.memory import HostMemory

CPU = torch.device("cpu")


def arena_of(block_bytes: int) -> Arena:
    """Return an arena whose copies arrive late."""
    blocks = [torch.empty(block_bytes, dtype=torch.uint8) for _ in range(2)]
    return Arena(CPU, blocks, lanes.ThreadLanes(random.Random(0)))


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    found = arena_of(56)
    yield found
    found.close()


shapes = st.lists(st.integers(0, 5), max_size=4)
types = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.uint8])


@settings(deadline=None)
@given(made=st.lists(st.tuples(shapes, types, st.booleans()), max_size=4))
def test_copies_equal_their_tensors_whatever_their_shape(made: list[tuple[list[int], torch.dtype, bool]]) -> None:
    """Also tensors larger than a block, and views whose elements are not in order."""
    arena = arena_of(56)
    try:
        tensors = []
        for shape, dtype, turned in made:
            whole = torch.randint(100, shape).to(dtype)
            tensors.append(whole.movedim(0, -1) if turned and whole.dim() else whole)
        copies = arena.copied(tensors)
    finally:
        arena.close()
    for tensor, copy in zip(tensors, copies, strict=True):
        torch.testing.assert_close(copy, tensor, rtol=0, atol=0)
        assert copy.dtype == tensor.dtype
        assert not tensor.numel() or copy.data_ptr() != tensor.data_ptr()


def test_a_block_is_emptied_before_it_is_filled_again(arena: Arena) -> None:
    """Forty blocks' worth of numbers, all of them different, through two blocks."""
    numbers = torch.arange(280, dtype=torch.float64).view(4, 70)
    assert arena.copied([numbers])[0].equal(numbers)


def test_a_checkpoint_through_the_arena_holds_the_state_of_the_save(arena: Arena, tmp_path: Path) -> None:
    state = {"a": torch.randn(7, 5), "b": torch.randn(3, dtype=torch.float64)}
    saved = {name: value.clone() for name, value in state.items()}
    writer = Checkpointer(tmp_path, keep=1, mode="async", rank=0, world_size=1, arena=arena)
    writer.save(3, state, {})
    for value in state.values():
        value.zero_()  # training goes on while the thread writes
    writer.wait()
    writer.load(3, state)
    assert all(value.equal(saved[name]) for name, value in state.items())


class CountedArena(Arena):
    """Remembers the copies that it made, without keeping them."""

    def __init__(self) -> None:
        blocks = [torch.empty(56, dtype=torch.uint8) for _ in range(2)]
        super().__init__(CPU, blocks, lanes.ThreadLanes(random.Random(0)))
        self.storages: list[weakref.ref[torch.UntypedStorage]] = []

    def copied(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        copies = super().copied(tensors)
        self.storages += [weakref.ref(copy.untyped_storage()) for copy in copies]
        return copies

    def alive(self) -> int:
        return sum(storage() is not None for storage in self.storages)


class CountingFiles(Files):
    """Counts the copies of blocks that exist whenever a file is written to."""

    def __init__(self, arena: CountedArena) -> None:
        self.arena, self.alive = arena, [0]

    def write(self, stream: IO[bytes], data: bytes | memoryview) -> None:
        self.alive.append(self.arena.alive())
        super().write(stream, data)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_takes_memory_for_one_block_or_for_all(mode: Literal["sync", "async"], tmp_path: Path) -> None:
    """A ``sync`` save copies block by block; an ``async`` save copies all at once, and frees what it has written."""
    arena = CountedArena()
    files = CountingFiles(arena)
    state = {f"model.{index}": torch.randn(5, 3) for index in range(9)}
    writer = Checkpointer(tmp_path, keep=1, mode=mode, rank=0, world_size=1, arena=arena, files=files)
    writer.save(3, state, {}, wait=True)
    writer.close()
    assert len(arena.storages) == 9
    assert max(files.alive) == (1 if mode == "sync" else 9)
    assert arena.alive() == 0
    if mode == "async":
        assert min(files.alive[1 + files.alive.index(9) :]) <= 1


@pytest.mark.parametrize(
    ("room_bytes", "each"),
    [(None, BLOCK_BYTES), (10 * BLOCK_BYTES, BLOCK_BYTES), (5 << 20, 5 << 19), (1 << 20, 0), (0, 0)],
)
def test_blocks_take_only_what_the_users_limit_leaves(
    room_bytes: int | None, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the only memory that checkpoints pin, and the owner of pinned memory counts them."""
    monkeypatch.setattr("partool_runtime.checkpoint._arena.open_lanes", lambda device: None)
    memory = HostMemory(pinned=False)
    found = open_arena(torch.device("cuda"), memory, room_bytes)
    assert memory.purposes == ({"checkpoints": 2 * each} if each else {})
    assert (found is None) == (each == 0)
    assert open_arena(CPU, memory) is None


def test_room_is_what_the_plan_needs_not() -> None:
    def plan(limit: int, pinned: int) -> Any:
        memory = SimpleNamespace(pinned_bytes=pinned)
        offload = SimpleNamespace(pinned_limit_bytes=limit)
        return SimpleNamespace(layout=SimpleNamespace(offload=offload), prediction=SimpleNamespace(memory=memory))

    assert [_room_bytes(plan(0, 7)), _room_bytes(plan(9, 7)), _room_bytes(plan(5, 7))] == [None, 2, 0]
