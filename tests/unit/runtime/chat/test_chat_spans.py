"""Which characters are trained on, for templates with marks and without."""

from __future__ import annotations

from typing import Any

import pytest
from _chat_case import HEAD, MARKED, PLAIN, PROMPT, SPECIAL, talk

from partool.plan.conversations import Conversation
from partool_runtime.chat._checks import template_notes
from partool_runtime.chat.spans import message_ends, trained_text
from partool_runtime.chat.template import ChatTemplate
from partool_runtime.errors import ConfigurationError

STOPS = ("<|end|>", "<|start|>", "<eos>")
TALK = "s: be brief\nu: hi\na: one\nu: x\na: two"


def spans(source: str, conversation: Conversation, loss: Any = "assistant") -> list[str]:
    template = ChatTemplate({"default": source}, variables=SPECIAL)
    result = trained_text(template, conversation, loss, STOPS)
    assert list(result.spans) == sorted(result.spans)
    return [result.text[start:end] for start, end in result.spans]


def refused(source: str, conversation: Conversation, loss: Any = "assistant") -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        spans(source, conversation, loss)
    return caught.value


@pytest.mark.parametrize(("source", "end"), [(MARKED, "<|end|>"), (PLAIN, "<|end|>\n")])
def test_the_assistants_messages_with_their_ends_of_turn(source: str, end: str) -> None:
    assert spans(source, talk(TALK)) == [f"one{end}", f"two{end}"]
    assert spans(source, talk(TALK), "last") == [f"two{end}"]
    assert spans(source, talk(TALK, weights=(1, 1, 0, 1, 1))) == [f"two{end}"]
    assert spans(source, talk(TALK, weights=(0, 0, 1, 0, 0))) == [f"one{end}"]
    assert spans(source, talk(TALK, weights=(1, 1, 1, 1, 0)), "last") == []
    assert spans(source, talk("u: hi")) == []
    assert spans(source, talk("a: hello\nu: hi\na: yes")) == [f"hello{end}", f"yes{end}"]


def test_every_token_but_those_of_messages_of_weight_0() -> None:
    template = ChatTemplate({"default": PLAIN}, variables=SPECIAL)
    text = template.render(talk(TALK)).text
    assert spans(PLAIN, talk(TALK), "all") == [text]
    parts = spans(PLAIN, talk(TALK, weights=(1, 0, 1, 1, 0)), "all")
    assert parts == [
        "<bos><|start|>system\nbe brief<|end|>\n",
        "<|start|>assistant\none<|end|>\n",
        "<|start|>user\nx<|end|>\n",
    ]


def test_spaces_behind_the_end_of_turn_are_the_next_messages() -> None:
    source = PLAIN.replace("{{ '\n' }}", "{{ ' ' }}")
    assert spans(source, talk(TALK)) == ["one<|end|>", "two<|end|>"]
    assert spans(source.replace("<|end|>", "<other>"), talk("u: x\na: y ")) == ["y <other> "]


def test_a_token_that_closes_the_conversation_is_trained_on_at_its_end() -> None:
    source = PLAIN.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}")
    assert spans(source, talk(TALK)) == ["one<|end|>\n", "two<|end|>\n<eos>"]
    marked = (
        MARKED
        + "{% if messages[-1].role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
    )
    assert spans(marked, talk(TALK)) == ["one<|end|>", "two<|end|>", "<eos>"]
    assert spans(marked, talk(TALK), "last") == ["two<|end|>", "<eos>"]
    assert spans(marked, talk(TALK, weights=(1, 1, 1, 1, 0))) == ["one<|end|>"]


def test_marks_belong_to_the_message_that_has_them() -> None:
    """Two spans of the first answer and none of the second are as many as there are answers."""
    source = (
        "{% for m in messages %}{% if m.twice %}{% generation %}{{ m.content }}{% endgeneration %}-"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    one, two = ({"role": "assistant", "content": "A", "twice": True}, {"role": "assistant", "content": "B"})
    user = {"role": "user", "content": "u"}
    for weights, expected in (((1, 1, 1, 0), ["A", "A"]), ((1, 0, 1, 1), [])):
        assert spans(source, Conversation((user, one, user, two), weights)) == expected
    assert spans(source, Conversation((user, one, user, two), (1, 1, 1, 1)), "last") == []


def test_a_template_that_rewrites_earlier_messages_is_refused_where_texts_part() -> None:
    thinking = "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
    error = refused(HEAD + thinking + "{{ m.content + '<|end|>\n' }}" + PROMPT, talk(TALK))
    assert error.code == "PT608"
    assert (
        "talks.jsonl:7, message 3: the chat template writes it differently in the longer conversation" in error.message
    )
    assert "'<think></think>one<|end|>\\n', in the conversation with 'one<|end|>" in error.message
    prompted = PLAIN.replace("'<|start|>assistant\n'", "'<|start|>assistant\n<think>\n'")
    error = refused(prompted, talk(TALK))
    assert (error.code, "up to its generation prompt" in error.message) == ("PT608", True)
    assert "{% generation %}" in error.help
    last = talk(TALK, weights=(1, 1, 0, 1, 1))
    assert spans(HEAD + thinking + "{{ m.content + '<|end|>\n' }}" + PROMPT, last) == ["<think></think>two<|end|>\n"]


def test_a_header_that_is_no_generation_prompt_is_not_trained_on() -> None:
    """Where the generation prompt is missing, the header would be in the mask: prompts masked by too little."""
    error = refused(HEAD + "{{ m.content + '<|end|>\n' }}{% endfor %}", talk(TALK))
    assert error.code == "PT608"
    assert "message 3: the chat template has no generation prompt for it" in error.message
    assert "'<|start|>assistant\\n'" in error.message
    instruct = "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else "
    instruct += "' ' + m.content + '<eos>' }}{% endfor %}"
    assert spans(instruct, talk("u: hi\na: one\nu: x\na: two")) == [" one<eos>", " two<eos>"]


def test_a_conversation_that_the_assistant_begins() -> None:
    source = "{{ messages[0].role + '' }}" + PLAIN
    error = refused(source, talk("a: hello\nu: hi\na: yes"))
    assert (error.code, "message 1 has no message before it" in error.message) == ("PT607", True)
    assert spans(source, talk("a: hello\nu: hi\na: yes", weights=(0, 1, 1))) == ["yes<|end|>\n"]


def test_marks_that_later_messages_take_away_are_refused() -> None:
    mark = "{% generation %}x{% endgeneration %}"
    early = "{% if messages | length < 4 %}" + mark + "{% endif %}"
    last = "{% if loop.last %}" + mark + "{% endif %}"
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}" + early + "{% else %}" + last + "{% endif %}{% endfor %}"
    )
    error = refused(source, talk("u: a\na: b\nu: c\na: d"), "last")
    assert (error.code, "fewer spans" in error.message) == ("PT608", True)


def test_ends_of_messages() -> None:
    template = ChatTemplate({"default": PLAIN}, variables=SPECIAL)
    text = template.render(talk(TALK)).text
    starts = [
        text.index(f"<|start|>{role}\n{word}") for role, word in [("user", "hi"), ("assistant", "one"), ("user", "x")]
    ]
    assert message_ends(template, talk(TALK)) == [*starts, text.rindex("<|start|>"), len(text)]
    merging = ChatTemplate({"default": "{{ messages[1].role + '' }}" + PLAIN}, variables=SPECIAL)
    assert message_ends(merging, talk("s: a\nu: b"))[0] == 0


@pytest.mark.parametrize(
    ("source", "note"),
    [
        (MARKED, ""),
        (PLAIN, ""),
        (MARKED.replace(" + '<|end|>' }}{% endgeneration %}", " }}{% endgeneration %}<|end|>"), "leaves '<|end|>' out"),
        (PLAIN.replace("<|end|>", ""), "writes no special token behind"),
        (MARKED.replace("== 'assistant'", "== 'model'"), "marks nothing"),
        ("{{ messages[0].content[0].text + '' }}" + MARKED.replace("m.content", "m.content[0].text"), ""),
        ("{{ raise_exception('no') }}", ""),
    ],
)  # fmt: skip
def test_an_end_of_turn_outside_of_the_mask_is_noted(source: str, note: str) -> None:
    notes = template_notes(ChatTemplate({"default": source}, variables=SPECIAL), STOPS)
    assert [note in one for one in notes] == ([True] if note else [])
