"""The sample order: permutations, shares of ranks, epochs and resuming."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from data_case import open_one
from hypothesis import given, settings
from hypothesis import strategies as st

from partool.spec.data import DataSpec
from partool_runtime.data._order import permute, samples_of
from partool_runtime.data.batches import Batches, SampleDeal


class Numbers:
    """Samples whose tokens are their own number."""

    masks = False

    def __init__(self, count: int) -> None:
        self.count = count
        self.tokens = count

    def row(self, index: int) -> np.ndarray:
        return np.array([index, index])


def batches_of(count: int, *, rank: int, size: int, micro: int, accumulation: int, seed: int = 3, held: int = 0):
    deal = SampleDeal(
        global_batch=12 * micro * accumulation,
        micro_batch=micro * 12 // size,
        dp_rank=rank,
        dp_size=size,
        sequence_length=1,
        seed=seed,
        steps=1000,
        validation_samples=17,
    )
    return Batches(Numbers(count), Numbers(held), deal, vocab=256, fingerprint="")


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**70), st.integers(0, 9))
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = permute(np.arange(size), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))


def test_order_depends_on_seed_and_epoch_and_mixes_well() -> None:
    size = 5000
    orders = [permute(np.arange(size), size, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for index, one in enumerate(orders):
        for other in orders[index + 1 :]:
            assert (one == other).mean() < 0.01
        assert abs(np.corrcoef(one, np.arange(size))[0, 1]) < 0.06
        assert (np.abs(np.diff(one)) == 1).mean() < 0.01
    assert permute(np.arange(6), 1 << 50, 0, 0).max() > 1 << 40


def test_order_is_the_same_on_every_machine_and_version() -> None:
    assert permute(np.arange(8), 8, 0, 0).tolist() == [6, 4, 0, 2, 1, 7, 3, 5]
    assert permute(np.arange(11), 11, 0, 0).tolist() == [6, 4, 8, 2, 1, 7, 10, 9, 0, 5, 3]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 500), st.integers(0, 200), st.integers(1, 90), st.integers(0, 5))
def test_places_read_in_parts_are_the_places_read_at_once(first: int, count: int, size: int, seed: int) -> None:
    whole = samples_of(0, first + count, size, seed)
    assert samples_of(first, count, size, seed).tolist() == whole[first:].tolist()
    epochs = len(whole) // size
    seen = Counter(whole[: epochs * size].tolist())
    assert all(seen[sample] == epochs for sample in range(size))


RESUMED = (
    st.integers(1, 150),
    st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=6, max_size=6),
    st.integers(0, 3),
)


@settings(max_examples=10, deadline=None)
@given(*RESUMED)
def test_any_ranks_at_any_step_see_each_sample_once_an_epoch(count: int, sizes: list[int], seed: int) -> None:
    check_resumed(count, sizes, seed)


@pytest.mark.long
@settings(max_examples=100, deadline=None)
@given(*RESUMED)
def test_more_ranks_at_any_step_see_each_sample_once_an_epoch(count: int, sizes: list[int], seed: int) -> None:
    check_resumed(count, sizes, seed)


def check_resumed(count: int, sizes: list[int], seed: int) -> None:
    """The number of ranks changes at every step, as if the run were resumed each time."""
    seen: list[int] = []
    for step, size in enumerate(sizes):
        for rank in range(size):
            with batches_of(count, rank=rank, size=size, micro=1, accumulation=2, seed=seed) as batches:
                micro_batches = batches.step(step)
                assert len(micro_batches) == 2
                seen += [number for batch in micro_batches for number in batch.tokens_BS.flatten().tolist()]
    assert seen == samples_of(0, 24 * len(sizes), count, seed).tolist()
    for epoch in range(len(seen) // count):
        assert sorted(seen[epoch * count : (epoch + 1) * count]) == list(range(count))


def test_steps_in_any_order_are_the_steps_in_order() -> None:
    with batches_of(31, rank=1, size=3, micro=1, accumulation=2) as straight:
        expected = [[b.tokens_BS.tolist() for b in straight.step(step)] for step in range(9)]
    with batches_of(31, rank=1, size=3, micro=1, accumulation=2) as jumping:
        for step in (5, 5, 6, 0, 8, 1):
            assert [b.tokens_BS.tolist() for b in jumping.step(step)] == expected[step]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("held", [0, 1, 16, 17, 40])
def test_validation_is_the_same_for_any_number_of_ranks(size: int, held: int) -> None:
    rounds, seen = set(), []
    for rank in range(size):
        with batches_of(9, rank=rank, size=size, micro=1, accumulation=1, held=held) as batches:
            mine = list(batches.validation())
        rounds.add((len(mine), *(batch.tokens_BS.shape for batch in mine)))
        labels = [label for batch in mine for label in batch.labels_BS.flatten().tolist()]
        seen += [label for label in labels if label != -100]
    assert len(rounds) == 1
    wanted = min(17, held)
    assert sorted(seen) == [place * held // wanted for place in range(wanted)]
    assert len(set(seen)) == wanted


def test_wrong_shares_are_refused() -> None:
    for change in ({"dp_rank": 3}, {"dp_size": 5}, {"micro_batch": 4}):
        deal = {"global_batch": 6, "micro_batch": 1, "dp_rank": 0, "dp_size": 3, "sequence_length": 4}
        with pytest.raises(ValueError, match=r"dp_rank|multiple"):
            SampleDeal(**{**deal, **change}, seed=0, steps=1, validation_samples=1)


def test_an_error_of_reading_ahead_is_raised_by_its_own_step() -> None:
    class Breaks(Numbers):
        def row(self, index: int) -> np.ndarray:
            if index in second:
                raise OSError("gone")
            return super().row(index)

    batches = batches_of(100, rank=0, size=1, micro=1, accumulation=1)
    second = set(batches.sample_ids(1).tolist())
    batches._train = Breaks(100)
    batches.step(0)
    with pytest.raises(OSError, match="gone"):
        batches.step(1)
    assert len(batches.step(2)) == 1
    batches.close()
    batches.close()


def test_real_text_on_two_ranks_then_three(tmp_path: Path) -> None:
    text = bytes(range(1, 256)) * 3
    (tmp_path / "a.txt").write_bytes(text)
    data = DataSpec(source=str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))
    seen: list[list[int]] = []
    prints = set()
    for steps, size in ((range(7), 2), (range(7, 13), 3), (range(13, 19), 1)):
        for step in steps:
            for rank in range(size):
                with open_one(data, dp_rank=rank, dp_size=size) as batches:
                    prints.add(batches.fingerprint)
                    for batch in batches.step(step):
                        assert batch.tokens_BS[:, 1:].tolist() == batch.labels_BS[:, :-1].tolist()
                        seen += batch.tokens_BS.tolist()
    tokens = [*text, 0]
    rows = [tokens[first : first + 7] for first in range(0, 109 * 7, 7)]
    assert len(prints) == 1
    assert len(seen) == 114
    assert sorted(seen[:109]) == sorted(rows)
    assert seen[:109] != rows


def test_sequences_have_the_same_numbers_in_every_layout() -> None:
    def numbers(size: int, micro: int) -> list[tuple[int, int]]:
        """Return the number and the token of each sequence of two steps."""
        found = []
        for rank in range(size):
            with batches_of(70, rank=rank, size=size, micro=micro, accumulation=2 // micro) as data:
                for batch in (*data.step(1), *data.step(2)):
                    found += [(batch.first + place, int(row[0])) for place, row in enumerate(batch.tokens_BS)]
        return sorted(found)

    whole = numbers(1, 2)
    assert [number for number, _ in whole] == list(range(24, 72))
    assert numbers(3, 1) == numbers(2, 2) == whole


def test_pinned_memory_is_taken_once_and_holds_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinning is emulated. The batches equal those without pinning; a step's memory serves every second step."""
    real, taken = torch.empty, []

    def empty(*shape, pin_memory: bool = False, **more):
        taken.append(pin_memory)
        return real(*shape, **more)

    monkeypatch.setattr(torch, "empty", empty)
    sizes = {"global_batch": 12, "micro_batch": 2, "dp_rank": 1, "dp_size": 2, "sequence_length": 1, "seed": 3}
    deal = SampleDeal(**sizes, steps=9, validation_samples=4)
    plain = Batches(Numbers(50), Numbers(9), deal, vocab=256, fingerprint="")
    pinned = Batches(Numbers(50), Numbers(9), replace(deal, pinned=True), vocab=256, fingerprint="")
    assert taken.count(True) == len(taken) == 2 * 3 * 2, "two steps of three micro-batches, tokens and labels"
    places = []
    with plain, pinned:
        for step in (0, 1, 2, 3, 7):
            found = pinned.step(step)
            places.append([micro.tokens_BS.data_ptr() for micro in found])
            for one, other in zip(found, plain.step(step), strict=True):
                assert torch.equal(one.tokens_BS, other.tokens_BS)
                assert torch.equal(one.labels_BS, other.labels_BS)
                assert one.first == other.first
        held = [micro.tokens_BS.data_ptr() for micro in pinned.validation()]
    assert places[0] == places[2] != places[1] == places[3] == places[4]
    assert not set(held) & {place for step in places for place in step}, (
        "validation does not overwrite a step's batches"
    )
    assert taken.count(True) == 12
