"""Tokens that are added to a tokenizer, and the rows of the embedding that they need."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from _chat_case import MARKED, folder, talk
from tokenizers import Tokenizer

from partool.plan.token_cache import cache_of
from partool.plan.tokenizer_folder import vocab_of
from partool.spec.data import DataSpec
from partool.spec.model import ModelConfig, Weights
from partool_runtime.chat import Encoder
from partool_runtime.chat._frames import settings_from_json, settings_to_json
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf import open_folder, write_folder
from partool_runtime.hf.grown import GrownVocabulary
from partool_runtime.model import Decoder
from partool_runtime.tokens.exporting import write_tokenizer
from partool_runtime.tokens.tokenizers import FolderTokenizer
from partool_runtime.weights import build, fill, materialise

NEW = ["<|open|>", "<|close|>"]
TEMPLATE = MARKED.replace("<|start|>", NEW[0]).replace("<|end|>", NEW[1])
SIZES: dict[str, Any] = {
    "layers": 1, "hidden": 12, "ffn_hidden": 20, "heads": 3, "kv_heads": 3, "head_dim": 4, "max_position": 32,
}  # fmt: skip


def test_added_tokens_are_one_id_each_in_every_reader(tmp_path: Path) -> None:
    path = folder(tmp_path / "tok", MARKED)
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    before = vocab_of(path, [])
    tokens = [*NEW, "<eos>"]  # the last one is in the tokenizer
    assert vocab_of(path, tokens) == before + 2
    data = DataSpec(
        source="a", records="chat", tokenizer=str(path), template=str(tmp_path / "t.jinja"), special_tokens=tokens
    )
    encoder = Encoder.of_data(data)
    (encoded,) = encoder.encode([talk("u: hello\na: the cat")])
    assert encoder.vocab == FolderTokenizer(path, tokens).vocab == before + 2
    assert list(encoded.ids).count(before) == list(encoded.ids).count(before + 1) == 2, "open and close, per message"
    assert encoder.turn_end() == before + 1
    assert encoded.loss[list(encoded.ids).index(before + 1, encoded.ids.tolist().index(before + 1) + 1)] == 1
    assert Encoder(path, tmp_path / "t.jinja").identity != encoder.identity
    assert FolderTokenizer(path).identity != FolderTokenizer(path, tokens).identity
    processes = Encoder.of_settings(settings_from_json(settings_to_json(encoder.settings)))
    assert processes.identity == encoder.identity


def test_a_cache_is_of_its_tokens_and_of_all_templates(tmp_path: Path) -> None:
    path = folder(tmp_path / "tok", MARKED)
    data = DataSpec(source="a", records="chat", tokenizer=str(path), cache=str(tmp_path))
    first = cache_of([], data)
    assert cache_of([], data.model_copy(update={"special_tokens": NEW})) != first
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(MARKED)
    assert cache_of([], data) != first


def test_an_export_has_the_tokens_and_the_template(tmp_path: Path) -> None:
    path, out = folder(tmp_path / "tok", MARKED), tmp_path / "out"
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    (path / "chat_template.json").write_text("{}")
    out.mkdir()
    data = DataSpec(source="a", tokenizer=str(path), template=str(tmp_path / "t.jinja"), special_tokens=NEW)
    said = write_tokenizer(data, out)
    assert "with the special tokens <|open|> <|close|>" in said
    fast = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert [fast.token_to_id(token) for token in NEW] == [vocab_of(path, []), vocab_of(path, []) + 1]
    assert not (out / "chat_template.json").exists()
    shutil.rmtree(path)
    assert Encoder(out).encode([talk("u: hello\na: the cat")])[0].ids.tolist()[-2] == vocab_of(out, []) - 1


@pytest.mark.parametrize("tied", [False, True])
def test_further_rows_are_the_mean_of_the_stored_ones(tmp_path: Path, tied: bool) -> None:
    small = ModelConfig(**SIZES, vocab=29, tied_embeddings=tied)
    base = Decoder(small)
    write_folder({name: p.detach().clone() for name, p in base.named_parameters()}, small, tmp_path)
    model = build(small.model_copy(update={"vocab": 37}))
    materialise(model, torch.device("cpu"))
    fill(model, Weights(source="hf", path=str(tmp_path)), seed=0)
    stored, grown = dict(base.named_parameters()), dict(model.named_parameters())
    for name in ["embed.weight"] if tied else ["embed.weight", "head.weight"]:
        torch.testing.assert_close(grown[name][:29], stored[name], rtol=0, atol=0)
        torch.testing.assert_close(grown[name][29:], stored[name].mean(0).expand(8, -1), rtol=1e-6, atol=1e-7)
    assert all(torch.equal(grown[name], p) for name, p in stored.items() if "embed" not in name and "head" not in name)


def test_any_block_of_a_grown_matrix_is_the_same_rows(tmp_path: Path) -> None:
    """Tensor ranks cut rows or columns, data-parallel ranks rows, at any place."""
    small = ModelConfig(**SIZES, vocab=29, tied_embeddings=False)
    write_folder({name: p.detach().clone() for name, p in Decoder(small).named_parameters()}, small, tmp_path)
    with open_folder(tmp_path, small) as files:
        grown = GrownVocabulary(files)
        all_VH = grown.block("embed.weight", (37, 12), (0, 0), (37, 12)).double()
        for offsets, sizes in (((0, 5), (29, 7)), ((27, 0), (5, 12)), ((29, 3), (8, 4)), ((35, 0), (2, 12))):
            block = grown.block("embed.weight", (37, 12), offsets, sizes).double()
            cut = tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))
            torch.testing.assert_close(block, all_VH[cut], rtol=1e-6, atol=1e-7)
        with pytest.raises(ConfigurationError, match="has shape") as caught:
            grown.check({"embed.weight": (23, 12)})
        assert caught.value.code == "PT621", "fewer tokens than the folder's would be lost"
