"""Named sets for validation: what their samples are, on any number of ranks, and that training reads none of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from data_case import open_one, write_tokens

from partool.planner.data_counts import count_data
from partool.spec.data import DataSpec, ValidationSet
from partool_runtime.data.batches import IGNORED_LABEL
from partool_runtime.errors import ConfigurationError


def with_sets(tmp_path: Path, **fields: object) -> DataSpec:
    """Return 60 tokens to train on, and sets of 8 tokens of value 7 and 25 tokens of value 8."""
    write_tokens(tmp_path / "train.bin", [1] * 61)
    sets = {}
    for name, size, token in (("small", 8, 7), ("large", 25, 8)):
        sets[name] = ValidationSet(source=str(write_tokens(tmp_path / f"{name}.bin", [token] * size)))
    return DataSpec(source=str(tmp_path / "train.bin"), validation_sets=sets, **fields)


def labels_of(data: DataSpec, name: str, ranks: int, **settings: int) -> list[int]:
    """Return the labels of a set that all ranks together see."""
    seen = []
    for rank in range(ranks):
        with open_one(data, vocab=1000, sequence_length=3, dp_rank=rank, dp_size=ranks, **settings) as batches:
            labels = [label for micro in batches.validation(name) for label in micro.labels_BS.flatten().tolist()]
        seen += [label for label in labels if label != IGNORED_LABEL]
    return sorted(seen)


def test_each_token_of_a_set_is_a_label_once_on_any_number_of_ranks(tmp_path: Path) -> None:
    data = with_sets(tmp_path)
    for ranks in (1, 2, 3):
        assert labels_of(data, "small", ranks) == [7] * 7, "the last sample is filled up, not left out"
        assert labels_of(data, "large", ranks, validation=100) == [8] * 24
        assert labels_of(data, "large", ranks, validation=5) == [8] * 15
    with open_one(data, vocab=1000, sequence_length=3) as batches:
        assert (batches.sets, list(batches.validation())) == (("large", "small"), [])
        assert {int(token) for step in range(4) for micro in batches.step(step) for token in micro.tokens_BS[0]} == {1}
        assert batches.evaluated == {"large": 8, "small": 3}
        assert batches.evaluation("small", 0)[2].tokens_BS.tolist() == [[7, 7, 0]]
    with open_one(data.model_copy(update={"validation": 0.3}), vocab=1000, sequence_length=3) as batches:
        assert list(batches.evaluated) == ["", "large", "small"]


def test_a_checkpoint_goes_on_with_other_sets_and_what_is_kept_of_documents_does_not(tmp_path: Path) -> None:
    data = with_sets(tmp_path)
    one = data.model_copy(update={"validation_sets": {"small": data.validation_sets["small"]}})
    without = data.model_copy(update={"validation_sets": {}})
    prints = []
    for each in (data, one, without):
        with open_one(each, vocab=1000, sequence_length=3) as batches:
            prints.append((batches.fingerprint, batches.full_fingerprint))
    assert len({fingerprint for fingerprint, _ in prints}) == 1
    assert len({full for _, full in prints}) == 3
    with open_one(data, vocab=1000, sequence_length=3) as batches:
        assert batches.documents == 3
        assert set(batches.read_documents.tolist()) == {0, 1, 2}
        passed = {int(token) for micro in batches.reference_pass() for token in micro.tokens_BS[:, 0]}
        assert passed == {1, 7, 8}


def test_a_set_without_a_sample_is_named(tmp_path: Path) -> None:
    data = with_sets(tmp_path)
    empty = ValidationSet(source=str(write_tokens(tmp_path / "one.bin", [5])))
    with pytest.raises(ConfigurationError, match=r"PT604.*the set none has 1 tokens"):
        open_one(data.model_copy(update={"validation_sets": {"none": empty}}), vocab=1000, sequence_length=3)


def test_a_set_has_its_own_keys_and_attends_as_its_records_do() -> None:
    chat = ValidationSet(source="c.jsonl", records="chat", attend="document", keys={"role": "who"})
    text = ValidationSet(source="t.jsonl", records="text", attend="sequence", text_field="body")
    sets = {"chat": chat, "text": text}
    of_text = DataSpec(source="a.jsonl", records="text", attend="sequence", validation=0.1, validation_sets=sets).named
    assert (of_text["chat"].pack, of_text["chat"].separates) == (False, False), "no mask: a sequence each"
    assert (of_text["chat"].keys, of_text["chat"].text_field) == ({"role": "who"}, "text")
    assert (of_text["text"].pack, of_text["text"].text_field, of_text["text"].validation) == (True, "body", 0.0)
    of_chat = DataSpec(source="a.jsonl", records="chat", attend="document", validation_sets=sets)
    assert (of_chat.named["chat"].pack, of_chat.named["chat"].separates) == (True, True)
    assert of_chat.every_source == ["a.jsonl", "c.jsonl", "t.jsonl"]
    assert (of_chat.validates, of_chat.holds_out, of_chat.validations) == (True, False, 2)


def test_texts_are_one_document_where_the_training_numbers_documents(tmp_path: Path) -> None:
    data = with_sets(tmp_path, attend="document")
    apart = data.validation_sets["small"].model_copy(update={"attend": "document"})
    mixed = data.model_copy(update={"validation_sets": {"apart": apart, "large": data.validation_sets["large"]}})
    with open_one(mixed, vocab=1000, sequence_length=3) as batches:
        for name in batches.sets:
            (documents,) = {tuple(micro.documents_BL.flatten().tolist()) for micro in batches.validation(name)}
            assert documents == (0, 0, 0)


def test_planning_counts_what_an_evaluation_reads(tmp_path: Path) -> None:
    data = with_sets(tmp_path)
    assert count_data(data, 3, trains=True).tokens == 61
    counts = count_data(data, 3, trains=False)
    assert counts.tokens == 33
    assert count_data(data.model_copy(update={"validation": 0.5}), 3, trains=False).tokens == 33 + 30
