"""Conversations as batches: whole, with labels for the answers alone, and equal for any number of ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _chat_case import MARKED, folder
from data_case import open_one

from partool.plan.conversations import parse
from partool.plan.token_cache import prepared
from partool.spec.data import DataSpec
from partool_runtime.chat import Encoder
from partool_runtime.data import IGNORED_LABEL
from partool_runtime.errors import ConfigurationError

LENGTH = 121


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTOOL_CACHE", str(tmp_path / "cache"))


def turns(number: int) -> list[dict[str, Any]]:
    words = ["the", "cat", "sat", "on", "the", "mat", "hello", "what", "is", "two", "plus", "two"]
    rng = np.random.default_rng(number)
    messages = []
    for turn in range(1 + number % 2):
        messages += [
            {"role": "user", "content": f"{number}.{turn} " + " ".join(rng.choice(words, 1 + number % 5))},
            {"role": "assistant", "content": " ".join(rng.choice(words, 1 + number % 9))},
        ]
    return messages


RECORDS: list[dict[str, Any]] = [
    *({"messages": turns(number)} for number in range(40)),
    {"messages": []},
    {"messages": [{"role": "user", "content": "no answer"}]},
    {"messages": [{"role": "user", "content": "long " * 80}, {"role": "assistant", "content": "cut away"}]},
]


def chats(tmp_path: Path, **fields: Any) -> DataSpec:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    tokenizer = folder(tmp_path / "tok", MARKED)
    return DataSpec(source=str(tmp_path / "a.jsonl"), records="chat", tokenizer=str(tokenizer), **fields)


def opened(data: DataSpec, **settings: Any) -> Any:
    return open_one(data, vocab=500, sequence_length=LENGTH, **settings)


def samples(batches: Any, steps: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the tokens and the trained tokens of each conversation in the rows of some steps."""
    out = []
    for step in range(steps):
        for micro in batches.step(step):
            for row in range(len(micro.tokens_BS)):
                numbers = micro.documents_BL[row].numpy()
                tokens, labels = micro.tokens_BS[row].numpy(), micro.labels_BS[row].numpy()
                for number in range(numbers.max() + 1):
                    here = numbers == number
                    trained = labels[here][labels[here] != IGNORED_LABEL]
                    out.append((tuple(tokens[here].tolist()), tuple(trained.tolist())))
    return out


def test_a_row_holds_whole_conversations_and_labels_of_answers(tmp_path: Path) -> None:
    data = chats(tmp_path, attend="document")
    encoder = Encoder(tmp_path / "tok")
    parsed = [parse(record, "chat", data, "") for record in RECORDS[:40]]
    expected = Counter()
    for sample in encoder.encode(parsed):  # type: ignore[arg-type]
        expected[tuple(sample.ids[1:][sample.loss[1:] == 1].tolist())] += 1
    with opened(data) as batches:
        rows = [batches._train.row(number) for number in range(batches.samples_per_epoch)]
        labels = Counter()
        for number, row in enumerate(rows):
            documents, loss = batches._train.documents(number), batches._train.loss(number)
            assert (loss[row == -1] == 0).all()
            for one in range(documents.max() + 1):
                here = (documents == one) & (row != -1)
                labels[tuple(row[here][1:][loss[here][1:] == 1].tolist())] += 1
        micro = batches.step(0)[0]
        number = int(batches.sample_ids(0)[0])
    assert labels == expected
    assert sum(len(row[row != -1]) for row in rows) / (len(rows) * (LENGTH + 1)) > 0.8
    row, loss, document = rows[number], batches._train.loss(number), batches._train.documents(number)
    kept = (loss[1:] == 1) & (row[1:] != -1) & (document[1:] == document[:-1])
    assert micro.labels_BS[0].tolist() == np.where(kept, row[1:], IGNORED_LABEL).tolist()


def test_ranks_share_out_the_conversations_of_one_rank(tmp_path: Path) -> None:
    data = chats(tmp_path, attend="document")
    with opened(data) as one:
        alone = samples(one, 4)
    shared = []
    for rank in range(3):
        with opened(data, dp_rank=rank, dp_size=3, micro_batch=2) as batches:
            shared += samples(batches, 4)
    assert Counter(alone) == Counter(shared)


def test_what_is_left_out_is_said_with_its_line(tmp_path: Path) -> None:
    with opened(chats(tmp_path)) as batches:
        notes = "\n".join(batches.notes)
    assert "PT693: 1 document holds no text" in notes
    assert f"the first is {tmp_path}/a.jsonl:41" in notes
    assert "PT662: 2 of 42 samples have no token to train on and are left out" in notes
    assert f"the first is {tmp_path}/a.jsonl:42" in notes
    with opened(chats(tmp_path, truncate="left")) as batches:
        assert "PT661: 1 of 42 samples are longer than a sequence and lose their beginning" in "\n".join(batches.notes)
    with opened(chats(tmp_path, truncate="drop")) as batches:
        assert "PT661: 1 of 42 samples are longer than a sequence and are left out" in "\n".join(batches.notes)


def test_unpacked_conversations_have_a_row_each(tmp_path: Path) -> None:
    with opened(chats(tmp_path, pack=False)) as batches:
        assert batches.samples_per_epoch == 40


def test_planning_counts_what_ranks_train_on(tmp_path: Path) -> None:
    from partool.planner.data_counts import count_data

    for fields in ({}, {"pack": False}, {"truncate": "left"}, {"validation": 0.2}):
        data = chats(tmp_path, **fields)
        with opened(data) as batches:
            counts = count_data(data, LENGTH, trains=True)
            assert (counts.rows, counts.tokens) == (batches.samples_per_epoch, batches.train_tokens)
            held = count_data(data, LENGTH, trains=False)
            assert held.tokens == (batches.validation_tokens or batches.train_tokens)
    assert prepared(data) is not None
    for bounds in (tmp_path / "cache").glob("*/tokens.trained.bin"):
        bounds.write_bytes(bounds.read_bytes()[:-8])
    assert prepared(data) is None, "a damaged cache is not prepared"
    (tmp_path / "a.jsonl").touch()
    assert prepared(data) is None, "a changed file is not prepared"


def test_another_mask_or_template_is_another_cache_and_another_run(tmp_path: Path) -> None:
    prints = set()
    for fields in ({}, {"loss": "all"}, {"loss": "last"}, {"truncate": "left"}, {"roles": {"user": "system"}}):
        with opened(chats(tmp_path, **fields)) as batches:
            prints.add(batches.fingerprint)
    assert len(prints) == 5


def test_a_bad_record_stops_the_run_with_its_line(tmp_path: Path) -> None:
    data = chats(tmp_path)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(ConfigurationError) as caught:
        opened(data)
    assert caught.value.code == "PT602"
    assert "a.jsonl:44, message 1 has no content" in str(caught.value)
