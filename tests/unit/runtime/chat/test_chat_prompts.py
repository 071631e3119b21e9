"""Prompts that validations continue, as tokens: messages by the template, texts as the data begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from _chat_case import MARKED, folder
from tokenizers import Tokenizer, processors

from partool.spec.data import DataSpec
from partool.spec.training import PromptMessage
from partool_runtime.errors import ConfigurationError
from partool_runtime.tokens.prompts import PromptTokens, prompt_text, prompt_tokens

MESSAGES = [PromptMessage(role="system", content="hello"), PromptMessage(role="user", content="what is two?")]


def of_folder(path: Path, **fields: Any) -> tuple[PromptTokens, Any]:
    made = folder(path, MARKED)
    return PromptTokens(DataSpec(source="a", tokenizer=str(made), **fields)), Tokenizer.from_file(
        str(made / "tokenizer.json")
    )


def test_messages_end_where_the_assistant_begins(tmp_path: Path) -> None:
    prompts, fast = of_folder(tmp_path / "t", records="chat", attend="document")
    text = "<bos><|start|>system\nhello<|end|>\n<|start|>user\nwhat is two?<|end|>\n<|start|>assistant\n"
    assert prompts.encode(MESSAGES) == fast.encode(text, add_special_tokens=False).ids
    assert prompts.ends == {fast.token_to_id("<|end|>"), fast.token_to_id("<eos>")}
    assert prompts.decode(fast.encode("two plus", add_special_tokens=False).ids) == "two plus"
    assert prompt_text(MESSAGES) == "system: hello\nuser: what is two?"


def test_a_text_begins_as_the_data_do(tmp_path: Path) -> None:
    made = folder(tmp_path / "bos", MARKED)
    fast = Tokenizer.from_file(str(made / "tokenizer.json"))
    bos = fast.token_to_id("<bos>")
    fast.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    fast.save(str(made / "tokenizer.json"))
    plain = fast.encode("the cat", add_special_tokens=False).ids
    for records, ids in (("text", plain), ("instruct", [bos, *plain])):
        data = DataSpec(source="a", tokenizer=str(made), records=records)  # type: ignore[arg-type]
        assert PromptTokens(data).encode("the cat") == ids
        assert PromptTokens(data).encode("<bos>the cat") == [bos, *plain]


def test_bytes_are_tokens_and_a_prompt_leaves_room() -> None:
    data = DataSpec(source="a")
    prompts, encoded = prompt_tokens(["é", "abc"], data, length=4, vocab=256)
    assert encoded == [[195, 169], [97, 98, 99]]
    assert (prompts.decode([97, 195]), prompts.decode([300, 98]), prompts.ends) == ("a\ufffd", "b", {0})
    for texts, length, vocab, error in (
        (["abc"], 3, 256, "PT637.*prompt 1 has 3 tokens, a sequence 3"),
        (["a", "é"], 4, 100, "PT605.*prompt 2 has the token 195"),
        ([MESSAGES], 9, 256, "PT606"),
    ):
        with pytest.raises(ConfigurationError, match=error):
            prompt_tokens(texts, data, length=length, vocab=vocab)  # type: ignore[arg-type]
