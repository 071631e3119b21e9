"""Tokens of data that nobody has tokenised, estimated without a tokenizer library."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from _chat_case import MARKED, folder
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from partool.plan.conversations import parse
from partool.planner.data_counts import count_data
from partool.planner.token_estimate import estimate_tokens
from partool.spec.data import DataSpec
from partool_runtime.chat import Encoder

TEXTS = [
    (Path(sysconfig.get_path("stdlib")) / name).read_text(encoding="utf-8")
    for name in ("argparse.py", "ast.py", "calendar.py", "csv.py", "difflib.py", "inspect.py")
]


def tokenizer_of(kind: str, path: Path) -> Tokenizer:
    """Train a tokenizer, and write its folder."""
    model: Any
    if kind == "bytes":
        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer: Any = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    elif kind == "words":
        model = Tokenizer(models.BPE(unk_token="<unk>"))
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=3000, special_tokens=["<unk>"])
    else:
        model = Tokenizer(models.Unigram())
        model.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=2000, special_tokens=["<unk>"], unk_token="<unk>")
    model.train_from_iterator(TEXTS[:4], trainer)
    path.mkdir()
    model.save(str(path / "tokenizer.json"))
    return model


@pytest.mark.parametrize(("kind", "off"), [("bytes", 0.12), ("words", 0.25), ("unigram", 0.25)])
def test_texts_are_estimated(tmp_path: Path, kind: str, off: float) -> None:
    """The estimate is of the first 64 KiB of each file; ``off`` is the most that it may err by."""
    fast = tokenizer_of(kind, tmp_path / "tok")
    (tmp_path / "t").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "t" / f"{number}.txt").write_text(text, encoding="utf-8")
    tokens = sum(len(fast.encode(text).ids) for text in TEXTS)
    estimated = estimate_tokens(DataSpec(source=str(tmp_path / "t"), tokenizer=str(tmp_path / "tok")))
    assert estimated is not None
    assert abs(estimated / tokens - 1) < off


def test_conversations_are_estimated_and_the_plan_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTOOL_CACHE", str(tmp_path / "cache"))
    path = folder(tmp_path / "tok", MARKED)
    words = "the cat sat on the mat. hello what is two plus two?"
    records = [
        {"messages": [{"role": "user", "content": words[: n % 50]}, {"role": "assistant", "content": words * (n % 7)}]}
        for n in range(1, 2000)
    ]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    data = DataSpec(source=str(file), records="chat", tokenizer=str(path))
    tokens = sum(len(one.ids) for one in Encoder(path).encode([parse(record, "chat", data, "a") for record in records]))
    estimated = estimate_tokens(data)
    assert estimated is not None
    assert abs(estimated / tokens - 1) < 0.3
    unknown = count_data(data, 128, trains=True).unknown
    assert "about" in unknown
    assert "partool data prepare SPEC counts them" in unknown


def test_nothing_is_said_where_nothing_is_seen(tmp_path: Path) -> None:
    path = folder(tmp_path / "tok", MARKED)
    data = DataSpec(source=str(tmp_path / "gone.jsonl"), records="chat", tokenizer=str(path))
    assert estimate_tokens(data) is None
    (tmp_path / "a.txt").write_text("the cat")
    (path / "tokenizer.json").write_text("[]")
    assert estimate_tokens(DataSpec(source=str(tmp_path / "a.txt"), tokenizer=str(path))) is None
    assert "not tokenised yet" in count_data(data, 128, trains=True).unknown
