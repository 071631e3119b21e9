"""Records for fine-tuning are recognised by their keys, and what is wrong with one is said with line and key."""

from __future__ import annotations

from typing import Any

import pytest

from partool.plan.conversations import Completion, Conversation, Preference, parse, recognise
from partool.plan.records import DataError
from partool.spec.data import DataSpec

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
OTHER = {"role": "assistant", "content": "Go away"}


def spec(**fields: Any) -> DataSpec:
    return DataSpec(source="a.jsonl", **fields)


def read(record: dict[str, Any], **fields: Any) -> Any:
    data = spec(**fields)
    return parse(record, recognise(record, data, "a.jsonl:7"), data, "a.jsonl:7")


def test_records_are_recognised_by_their_keys() -> None:
    kinds = {
        "text": {"text": "Once"},
        "chat": {"messages": [USER, ANSWER]},
        "instruct": {"prompt": "1 + 1", "completion": " = 2", "text": "both"},
        "preference": {"prompt": "p", "chosen": "a", "rejected": "b"},
    }
    assert {recognise(record, spec(), "") for record in kinds.values()} == set(kinds)
    assert all(recognise(record, spec(), "") == kind for kind, record in kinds.items())
    renamed = {"dialogue": [], "title": "t"}
    assert recognise(renamed, spec(keys={"messages": "dialogue"}), "") == "chat"
    with pytest.raises(DataError, match=r"a.jsonl:7 has no key 'text' \(its keys: dialogue, title\)") as caught:
        recognise(renamed, spec(), "a.jsonl:7")
    assert "data.keys: {messages: dialogue}" in caught.value.help


def test_sharegpt_is_read_without_renaming_and_others_with() -> None:
    plain = read({"messages": [USER, ANSWER]})
    assert plain == Conversation((USER, ANSWER), (1, 1), (), "a.jsonl:7")
    share = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    assert read(share) == plain
    other = {"dialogue": [{"speaker": "me", "said": "Hi"}, {"speaker": "bot", "said": "Hello"}]}
    keys = {"messages": "dialogue", "role": "speaker", "content": "said"}
    assert read(other, keys=keys, roles={"me": "user", "bot": "assistant"}) == plain


def test_what_templates_read_is_kept_and_what_is_null_is_not() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}], "name": None}
    tools = [{"name": "add"}]
    parsed = read({"messages": [USER, {**call}, {"role": "tool", "content": "2"}], "tools": tools})
    assert parsed.messages[1] == {"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}
    assert parsed.tools == ({"name": "add"},)
    parts = [{"type": "text", "text": "Hi", "image": None}]
    assert read({"messages": [{**USER, "content": parts}]}).messages[0]["content"] == [{"type": "text", "text": "Hi"}]


def test_weights_are_of_messages_and_answers_alone_are_trained_on() -> None:
    weights = [{**USER}, {**ANSWER, "weight": 0}, {**USER}, {**ANSWER, "weight": 1}]
    assert read({"messages": weights}).weights == (1, 0, 1, 1)
    assert "weight" not in read({"messages": weights}).messages[1]
    assert read({"prompt": "1 + 1", "completion": " = 2"}) == Completion("1 + 1", " = 2", "a.jsonl:7")
    assert read({"prompt": [USER], "completion": [ANSWER]}).weights == (0, 1)


def test_a_pair_begins_with_its_prompt() -> None:
    said = read({"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]})
    shared = read({"chosen": [USER, ANSWER], "rejected": [USER, OTHER]})
    assert said == shared
    assert isinstance(said, Preference)
    assert (said.chosen, said.rejected) == (
        Conversation((USER, ANSWER), (0, 1), (), "a.jsonl:7"),
        Conversation((USER, OTHER), (0, 1), (), "a.jsonl:7"),
    )
    texts = read({"prompt": "p", "chosen": "a", "rejected": "b"})
    assert texts.rejected == Completion("p", "b", "a.jsonl:7")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "Hi"}, "a.jsonl:7: 'messages' is a str, not a list of messages"),
        ({"messages": None, "prompt": 1}, "a.jsonl:7 has no key 'messages'"),
        ({"messages": [USER, "Hello"]}, "a.jsonl:7, message 2 is a str"),
        ({"messages": [{"content": "Hi"}]}, "a.jsonl:7, message 1 has no role"),
        ({"messages": [{"role": "user"}]}, "a.jsonl:7, message 1 has no content"),
        ({"messages": [{**USER, "role": "speaker"}]}, "message 1: the role 'speaker' is none of system, developer"),
        ({"messages": [{**USER, "content": 5}]}, "message 1: its content is a int"),
        ({"messages": [{**USER, "content": [{"type": "image"}]}]}, "message 1 holds a part of type image"),
        ({"messages": [{**USER, "weight": 0.5}]}, "message 1: its weight is 0.5"),
        ({"messages": [USER], "tools": "add"}, "'tools' is no list of objects"),
        ({"prompt": "Hi", "completion": [ANSWER]}, "prompt and completion are a str and a list"),
        ({"prompt": "Hi", "completion": None}, "a.jsonl:7 has no key 'completion'"),
        ({"chosen": "a", "rejected": "b"}, "a.jsonl:7 has no prompt, and its answers are texts"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "chosen and rejected do not part"),
        ({"chosen": [USER], "rejected": [USER, ANSWER]}, "chosen and rejected do not part"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_with_its_key(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as caught:
        read(record)
    assert message in str(caught.value)
