"""Chat templates: where they are read from, what they may do, how they fail."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from _chat_case import MARKED, PLAIN, folder, talk

from partool.plan.conversations import Conversation
from partool_runtime.chat import ChatTemplate
from partool_runtime.errors import ConfigurationError


def rendered(source: str, conversation: Conversation | None = None, **settings: Any) -> str:
    template = ChatTemplate({"default": source}, **settings)
    return template.render(conversation or talk("u: hello\na: <b> & é")).text


def refused(code: str, call: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert caught.value.code == code
    return caught.value


def test_marks_are_where_the_assistant_writes() -> None:
    template = ChatTemplate({"default": MARKED}, variables={"bos_token": "<bos>"})
    result = template.render(talk("u: hi\na: one\nu: x\na: two"))
    assert result.text.startswith("<bos><|start|>user\nhi<|end|>\n<|start|>assistant\none<|end|>\n")
    assert [result.text[start:end] for start, end in result.generation_spans] == ["one<|end|>", "two<|end|>"]
    assert template.render(talk("u: hi"), add_generation_prompt=True).text.endswith("<|start|>assistant\n")
    assert template.marked()
    assert not ChatTemplate({"default": PLAIN}).marked()
    assert template.render(talk("u: again")).generation_spans == ()


def test_settings_and_functions_are_those_that_templates_expect() -> None:
    assert rendered("  {% if true %}\nx\n  {% endif %}\ny\n") == "x\ny"
    assert (
        rendered("{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}")
        == "user"
    )
    assert rendered("{{ messages[1].content | tojson }}") == '"<b> & é"'
    assert (
        rendered("{{ {'b': [1], 'a': 'é'} | tojson(indent=1, sort_keys=true) }}")
        == '{\n "a": "é",\n "b": [\n  1\n ]\n}'
    )
    assert rendered("{% set n = namespace(self=1, x=2) %}{% set n.x = 3 %}{{ n.x }}{{ n.self }}") == "31"
    assert (
        rendered("{{ dict(a=1).a }}{{ dict.fromkeys(['k'], 2).k }}{{ tools is none }}{{ documents is none }}")
        == "12TrueTrue"
    )
    assert (
        rendered("{{ missing is defined }}{{ bos_token }}|{{ nothing }}", variables={"bos_token": "<s>"}) == "False<s>|"
    )


def test_dates_are_the_callers() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert rendered(source) == "26 Jul 2024"
    day = datetime.date(2026, 2, 1)
    assert rendered(source, date=day) == "01 Feb 2026"
    identities = {ChatTemplate({"default": source}, date=date).identity for date in (day, datetime.date(2026, 2, 2))}
    assert len(identities) == 2
    assert len({ChatTemplate({"default": PLAIN}, date=date).identity for date in (day, datetime.date(2026, 2, 2))}) == 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ strftime_now.__self__.year }}",
        "{{ raise_exception.__globals__.x }}",
        "{% set n = namespace(_x=1) %}",
        "{% set n = namespace() %}{% set n.__x = 1 %}",
    ],
)
def test_templates_stay_in_the_sandbox(source: str) -> None:
    refused("PT607", lambda: rendered(source))


def test_null_values_are_missing_and_reasoning_has_every_name() -> None:
    message = {"role": "assistant", "content": None, "thinking": "why", "tool_calls": [{"a": None}]}
    source = "{{ messages[0].content is defined }} {{ messages[0].reasoning_content }} {{ messages[0].tool_calls }}"
    assert rendered(source, Conversation((message,), (1,))) == "False why [{'a': None}]"
    strange = {"role": "user", "content": [{"image": object(), "n": (1, 2)}]}
    assert (
        rendered("{{ messages[0].content }}", Conversation((strange,), (1,))) == "[{'image': '<object>', 'n': [1, 2]}]"
    )


def test_a_template_that_raises_is_told_with_file_line_and_message() -> None:
    source = (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content + '' }}{% endfor %}"
    )
    error = refused("PT607", lambda: rendered(source, talk("u: a\na: b\na: c\nu: d")))
    assert error.message == "talks.jsonl:7, message 3 (assistant): the chat template refuses it: Roles must alternate"
    assert error.help
    broken = Conversation(({"role": "user", "content": "x"}, {"role": "assistant", "content": 3}), (1, 1), (), "f:2")
    assert "f:2, message 2 (assistant): the chat template refuses it: unsupported operand" in str(
        refused("PT607", lambda: rendered(source, broken))
    )


def test_marks_in_a_macro_are_refused() -> None:
    for source in (
        "{% macro say(t) %}x{% generation %}{{ t }}{% endgeneration %}{% endmacro %}{{ say('ab') }}",
        "a{% set t %}bc{% generation %}d{% endgeneration %}{% endset %}{{ t }}",
    ):
        assert "macro" in str(refused("PT606", lambda source=source: rendered(source)))


def test_a_template_comes_from_any_of_the_files_of_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", chat_template="config {{ eos_token }}")
    assert ChatTemplate.from_folder(path).render(talk("u: x")).text == "config <eos>"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert ChatTemplate.from_folder(path).render(talk("u: x")).text == "json"
    (path / "chat_template.jinja").write_text("jinja{{ bos_token }}")
    assert ChatTemplate.from_folder(path).render(talk("u: x")).text == "jinja<bos>"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("tools{{ tools[0].name }}")
    template = ChatTemplate.from_folder(path)
    assert template.render(talk("u: x", tools=({"name": "add"},))).text == "toolsadd"
    assert template.render(talk("u: x")).text == "jinja<bos>"
    (tmp_path / "mine.jinja").write_text("mine{{ eos_token }}")
    mine = ChatTemplate.from_folder(path, tmp_path / "mine.jinja")
    assert mine.render(talk("u: x", tools=({"name": "add"},))).text == "mine<eos>"
    assert mine.identity != template.identity


def test_named_templates_and_special_tokens(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t{{ image_token }}"}]
    eos = {"content": "<end>", "lstrip": False}
    path = folder(tmp_path / "m", chat_template=named, eos_token=eos, extra_special_tokens={"image_token": "<img>"})
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<no>", "pad_token": "<pad>"}))
    template = ChatTemplate.from_folder(path)
    assert template.render(talk("u: x", tools=({},))).text == "t<img>"
    assert template.variables == {
        "bos_token": "<bos>", "eos_token": "<end>", "pad_token": "<pad>", "image_token": "<img>"
    }  # fmt: skip
    other = folder(tmp_path / "o", chat_template=[{"name": "rag", "template": "r"}, {"name": "chat", "template": "c"}])
    error = refused("PT606", lambda: ChatTemplate.from_folder(other).render(talk("u: x")))
    assert "only chat, rag" in error.message
    single = folder(tmp_path / "s", chat_template=[{"name": "rag", "template": "r"}])
    assert ChatTemplate.from_folder(single).render(talk("u: x")).text == "r"


def test_what_cannot_be_a_template_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "m")
    assert "has no chat template" in str(refused("PT606", lambda: ChatTemplate.from_folder(path)))
    assert "no.jinja" in str(refused("PT606", lambda: ChatTemplate.from_folder(path, tmp_path / "no.jinja")))
    error = refused("PT606", lambda: ChatTemplate({"default": "a\n{% for %}"}, name="mine.jinja"))
    assert error.message.startswith("mine.jinja, line 2: ")
    (path / "tokenizer_config.json").write_text("{")
    assert "is not JSON" in str(refused("PT603", lambda: ChatTemplate.from_folder(path)))
    monkeypatch.setattr("jinja2.__version__", "3.1.5")
    assert "3.1.6 or later; it is 3.1.5" in str(refused("PT606", lambda: rendered("x")))
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert "it is not installed" in str(refused("PT606", lambda: rendered("x")))
