"""Hugging Face tokenizer folders, made here with the ``tokenizers`` library."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from data_case import open_one, stream

from partool.spec.data import DataSpec
from partool_runtime.errors import ConfigurationError

tokenizers = pytest.importorskip("tokenizers")

WORDS = ["[UNK]", "<eos>", "one", "two", "three", "four", "é"]


def folder(tmp_path: Path, *, words: list[str] = WORDS, eos: object = "<eos>", name: str = "tok") -> Path:
    vocabulary = {word: index for index, word in enumerate(words)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast.add_special_tokens(["<eos>"])
    fast.post_processor = tokenizers.processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    fast.enable_truncation(2)
    fast.enable_padding(length=9)
    path = tmp_path / name
    path.mkdir()
    fast.save(str(path / "tokenizer.json"))
    if eos is not None:
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return path


def source(tmp_path: Path, tokenizer: Path, *texts: str) -> DataSpec:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return DataSpec(source=f"{tmp_path}/a.jsonl", tokenizer=str(tokenizer), cache=f"{tmp_path}/cache")


def refused(data: DataSpec, code: str = "PT603", vocab: int = 256) -> str:
    with pytest.raises(ConfigurationError) as caught:
        open_one(data, vocab=vocab)
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.parametrize("eos", ["<eos>", {"content": "<eos>", "lstrip": False}])
def test_documents_end_with_eos_and_nothing_else_is_added(tmp_path: Path, eos: object) -> None:
    data = source(tmp_path, folder(tmp_path, eos=eos), "one two three four", "  ", "é five")
    with open_one(data, vocab=7, sequence_length=1) as batches:
        assert stream(batches) == [2, 3, 4, 5, 1, 6, 0, 1]
        assert batches.vocab == 7


def test_without_eos_documents_touch(tmp_path: Path) -> None:
    data = source(tmp_path, folder(tmp_path, eos=None), "one two", "three")
    with open_one(data, sequence_length=1) as batches:
        assert stream(batches) == [2, 3, 4]
    with open_one(data.model_copy(update={"pack": False}), sequence_length=3) as batches:
        assert batches.samples_per_epoch == 1  # one token alone predicts nothing


def test_many_batches_and_pieces_give_the_same_tokens(tmp_path: Path, monkeypatch) -> None:
    text = "\n".join("one two three four é"[: 3 + i % 17].strip() for i in range(500))
    (tmp_path / "a.txt").write_text(text)
    tokenizer = folder(tmp_path)
    data = DataSpec(source=f"{tmp_path}/a.txt", tokenizer=str(tokenizer), cache=f"{tmp_path}/one")
    with open_one(data, sequence_length=1) as batches:
        whole = stream(batches)
    monkeypatch.setattr("partool_runtime.tokens.documents.PIECE_BYTES", 64)
    monkeypatch.setattr("partool_runtime.tokens.tokenizers._BATCH_BYTES", 200)
    with open_one(data.model_copy(update={"cache": f"{tmp_path}/two"}), sequence_length=1) as batches:
        assert stream(batches) == whole
    expected = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    expected.no_truncation()
    expected.no_padding()
    assert whole == [*expected.encode(text, add_special_tokens=False).ids, 1]


def test_large_vocabularies_need_32_bits(tmp_path: Path) -> None:
    words = ["[UNK]", *(f"w{number}" for number in range(70_000))]
    data = source(tmp_path, folder(tmp_path, words=words, eos=None), "w69999 w3 w65536")
    with open_one(data, vocab=70_002, sequence_length=1) as batches:
        assert stream(batches) == [70_000, 4, 65_537]
        assert batches._train._corpus.shards[0].tokens.dtype == np.uint32


def test_another_tokenizer_is_another_cache(tmp_path: Path) -> None:
    first, second = folder(tmp_path), folder(tmp_path, words=["[UNK]", "<eos>", "two", "one"], name="other")
    for tokenizer, expected in ((first, [2, 1]), (second, [3, 1])):
        with open_one(source(tmp_path, tokenizer, "one"), sequence_length=1) as batches:
            assert stream(batches) == expected


def test_unusable_folders_are_refused(tmp_path: Path, monkeypatch) -> None:
    assert "no folder" in refused(source(tmp_path, tmp_path / "nowhere", "one"))
    (tmp_path / "empty").mkdir()
    assert "no tokenizer.json" in refused(source(tmp_path, tmp_path / "empty", "one"))
    for content in (b"", b"{}", b"\xff\xfe"):
        (tmp_path / "empty" / "tokenizer.json").write_bytes(content)
        assert "cannot be read" in refused(source(tmp_path, tmp_path / "empty", "one"))
    good = folder(tmp_path, eos="</s>")
    assert "does not know" in refused(source(tmp_path, good, "one"))
    (good / "tokenizer_config.json").write_text("{")
    assert "cannot be read" in refused(source(tmp_path, good, "one"))
    (good / "tokenizer_config.json").unlink()
    assert "7 tokens" in refused(source(tmp_path, good, "one"), "PT605", vocab=6)
    (tmp_path / "latin.txt").write_bytes("one\ncaf\xe9\n".encode("latin-1"))
    data = source(tmp_path, good, "one").model_copy(update={"source": f"{tmp_path}/latin.txt"})
    message = refused(data, "PT602")
    assert "latin.txt is not UTF-8" in message
    assert "0xe9" in message
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "partool[hf]" in refused(source(tmp_path, good, "one"))
