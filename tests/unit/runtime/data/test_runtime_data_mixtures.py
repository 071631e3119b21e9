"""Mixtures: shares of several sources, in a fixed order, for any number of ranks; and files for validation alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_case import open_one, write_tokens

from partool.plan.packing import drawn
from partool.planner.data_counts import count_data
from partool.spec.data import DataSpec, MixedSource
from partool_runtime.data._order import Mixture
from partool_runtime.errors import ConfigurationError

SIZES = (7, 40, 13)


def mixture(tmp_path: Path, *shares: dict[str, Any], **fields: Any) -> DataSpec:
    """Return a mixture of sources of 7, 40 and 13 rows of 3 tokens, whose tokens are the source's number."""
    mix = []
    for number, (rows, share) in enumerate(zip(SIZES, shares, strict=True)):
        path = tmp_path / f"{number}.bin"
        write_tokens(path, [number] * (3 * rows + 1))
        mix.append(MixedSource(source=str(path), **share))
    return DataSpec(mix=mix, **fields)


def sources_of(data: DataSpec, steps: int, ranks: int = 1, **settings: Any) -> list[list[int]]:
    """Return the sources of the rows of each step."""
    seen: list[list[int]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        with open_one(data, vocab=1000, sequence_length=3, dp_rank=rank, dp_size=ranks, **settings) as batches:
            for step in range(steps):
                seen[step] += [int(row[0]) for micro in batches.step(step) for row in micro.tokens_BS]
    return seen


def flat(steps: list[list[int]]) -> list[int]:
    return [source for step in steps for source in step]


def test_an_epoch_holds_each_source_as_often_as_it_says(tmp_path: Path) -> None:
    data = mixture(tmp_path, {"epochs": 2.0}, {"epochs": 0.5}, {})
    steps = sources_of(data, 20)
    first, second = Counter(flat(steps)[:47]), Counter(flat(steps)[47:94])
    assert first == second == Counter({0: 14, 1: 20, 2: 13})


def test_weights_are_shares_and_no_source_is_repeated(tmp_path: Path) -> None:
    weighted = [MixedSource(source="x", weight=weight) for weight in (1.0, 3.0, 1.0)]
    assert drawn(SIZES, weighted) == [7, 21, 7]
    assert drawn((1000, 1000, 10), weighted) == [10, 30, 10]
    data = mixture(tmp_path, {"weight": 1.0}, {"weight": 3.0}, {"weight": 1.0})
    assert Counter(flat(sources_of(data, 6))[:35]) == Counter({0: 7, 1: 21, 2: 7})


def test_a_source_goes_on_in_the_next_epoch_where_it_was() -> None:
    order = Mixture(SIZES, (7, 21, 7), seed=3)
    ids = order.ids(0, 40 * order.epoch)
    assert order.ids(17, 50).tolist() == ids[17:67].tolist()
    for epochs in (1, 2, 13, 40):
        seen = Counter(ids[: epochs * order.epoch].tolist())
        for source, base in enumerate((0, 7, 47)):
            times = [seen[number] for number in range(base, base + SIZES[source])]
            drawn_of_it = epochs * (7, 21, 7)[source]
            assert sum(times) == drawn_of_it
            assert {min(times), max(times)} <= {drawn_of_it // SIZES[source], -(-drawn_of_it // SIZES[source])}


def test_ranks_and_resumed_steps_see_the_same(tmp_path: Path) -> None:
    data = mixture(tmp_path, {"epochs": 2.0}, {"epochs": 0.5}, {})
    alone = sources_of(data, 9)
    assert [Counter(step) for step in sources_of(data, 9, ranks=3, micro_batch=2)] == [Counter(s) for s in alone]
    with open_one(data, vocab=1000, sequence_length=3) as batches:
        rows = [int(row[0]) for micro in batches.step(7) for row in micro.tokens_BS]
        one = batches.fingerprint
    assert rows == alone[7]
    other = mixture(tmp_path, {"epochs": 2.0}, {"epochs": 0.25}, {})
    with open_one(other, vocab=1000, sequence_length=3) as batches:
        assert batches.fingerprint != one


def test_planning_counts_the_rows_of_the_mixture(tmp_path: Path) -> None:
    data = mixture(tmp_path, {"epochs": 2.0}, {"epochs": 0.5}, {})
    with open_one(data, vocab=1000, sequence_length=3) as batches:
        assert count_data(data, 3, trains=True).rows == batches.samples_per_epoch == 47


def test_validation_files_are_for_validation_alone(tmp_path: Path) -> None:
    write_tokens(tmp_path / "v.bin", [9] * 16)
    data = mixture(tmp_path, {}, {}, {}, validation_source=str(tmp_path / "v.bin"))
    assert data.validates
    assert not mixture(tmp_path, {}, {}, {}).validates
    with open_one(data, vocab=1000, sequence_length=3) as batches:
        held = [micro.tokens_BS.tolist() for micro in batches.validation()]
        assert held == [[[9, 9, 9]]] * 5
        assert batches.samples_per_epoch == 60
    alone = DataSpec(source=str(tmp_path / "0.bin"), validation_source=str(tmp_path / "v.bin"))
    assert 9 not in flat(sources_of(alone, 4))
    assert count_data(alone, 3, trains=False).tokens == 16


def test_a_part_without_a_row_is_said(tmp_path: Path) -> None:
    write_tokens(tmp_path / "few.bin", [1, 2])
    data = DataSpec(mix=[MixedSource(source=str(tmp_path / "few.bin"))])
    with pytest.raises(ConfigurationError, match="too little data"):
        open_one(data, vocab=1000, sequence_length=3)


def test_documents_of_all_sources_have_numbers_of_their_own(tmp_path: Path) -> None:
    """What is kept of a document, such as a reference's log-probability, is kept by its number."""
    write_tokens(tmp_path / "held.bin", [9] * 31)
    data = mixture(tmp_path, {"weight": 1.0}, {"weight": 1.0}, {"weight": 2.0})
    held = data.model_copy(update={"validation_source": str(tmp_path / "held.bin")})
    with open_one(held, vocab=1000, sequence_length=3, steps=40) as batches:
        assert batches.documents == 4
        assert set(batches.read_documents.tolist()) == {0, 1, 2, 3}
        assert set(batches._validation.numbers(0).tolist()) == {3}
    with open_one(held, vocab=1000, sequence_length=3, steps=2) as batches:
        rows = [row for step in range(2) for micro in batches.step(step) for row in micro.tokens_BS[:, 0].tolist()]
        passes = [row for micro in batches.reference_pass() for row in micro.tokens_BS[:, 0].tolist()]
        assert Counter(passes) - Counter([9] * len(passes)) == Counter(rows), "only what the steps read"
