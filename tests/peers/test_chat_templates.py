"""Masks of chat templates that TRL has adapted to training, by transformers and here; and without TRL's marks.

TRL keeps, beside each model's template, one with ``{% generation %}`` marks. Its files are read where TRL is installed.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from _chat_case import folder
from _peers import FOLDER, needed
from often import often
from tokenizers import Tokenizer

from partool.plan.conversations import Conversation
from partool_runtime.chat import Encoder
from partool_runtime.errors import ConfigurationError

TEMPLATES = FOLDER / "trl" / "chat_templates"
PARTS = {"idefics3", "llava_next", "smolvlm"}
"""Templates that take contents in parts only."""
OUTCOMES = {
    "cohere2": "equal equal equal PT607",
    "cohere": "equal equal equal PT607",
    "deepseek_r1_distill": "PT608 PT608 PT608 PT608",
    "deepseekv3": "PT608 PT608 PT608 PT607",
    "diffusion_gemma": "equal equal equal PT608",
    "gemma3": "equal equal equal PT607",
    "gemma": "equal equal PT607 PT607",
    "glm4moe": "text text text text",
    "gptoss": "prompt PT608 prompt PT608",
    "idefics3": "equal equal equal equal",
    "lfm2": "equal equal equal equal",
    "lfm2_v2": "equal equal equal equal",
    "llama3": "equal equal equal equal",
    "llava_next": "equal equal equal PT607",
    "muse_glimmer": "prompt prompt prompt prompt",
    "nemotron_3_5_lightning": "PT608 PT608 PT608 PT608",
    "nemotron_3_nano": "PT608 PT608 PT608 PT608",
    "nemotron_3_super": "PT608 PT608 PT608 PT608",
    "nemotron_3_ultra": "PT608 PT608 PT608 PT608",
    "phi3_5": "equal equal equal equal",
    "phi3": "equal equal equal equal",
    "qwen2_5": "prompt prompt prompt prompt",
    "qwen2_5_vl": "equal equal equal equal",
    "qwen3_5_nothink": "prompt PT608 prompt PT608",
    "qwen3_5_think": "prompt PT608 prompt PT608",
    "qwen3_6": "prompt PT608 prompt PT608",
    "qwen3_8": "prompt prompt prompt prompt",
    "qwen3_instruct_2507": "equal equal equal equal",
    "qwen3": "equal PT608 equal PT608",
    "qwen3_vl": "equal equal equal equal",
    "smolvlm": "equal equal equal equal",
}
"""What the model's own template, without marks, gives for each of the conversations: the mask of TRL's template
(equal); that without tokens of the generation prompt, which the model never writes (prompt); another text than TRL's
(text); or an error."""
KEPT = (
    "cohere", "deepseekv3", "gemma3", "lfm2_v2", "llama3", "llava_next", "nemotron_3_nano", "phi3", "qwen2_5",
    "qwen3", "qwen3_vl",
)  # fmt: skip
"""Families that run each time where TRL is installed; the others run with the longer suites."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}},
    },
}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [message("user", "hello"), message("assistant", "the cat ")],
    "turns": [
        message("user", "hello"), message("assistant", "the cat"),
        message("user", "what?"), message("assistant", "two"),
    ],
    "system": [message("system", "be brief"), message("user", "hello"), message("assistant", "the cat")],
    "tools": [
        message("user", "what is two plus two?"), message("assistant", "", tool_calls=[CALL]),
        message("tool", "4", name="add"), message("assistant", "two"),
        message("user", "hello"), message("assistant", "the"),
    ],
}  # fmt: skip


def conversation(name: str, family: str) -> Conversation:
    messages = CONVERSATIONS[name]
    if family in PARTS:
        messages = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    return Conversation(tuple(messages), (1,) * len(messages), (TOOL,) if name == "tools" else (), "a.jsonl:3")


def by_transformers(path: Path, template: Path, sample: Conversation) -> Mapping[str, Any] | str:
    """Return ids and mask, or the error of the template."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast.from_pretrained(str(path))
    messages, tools = [dict(one) for one in sample.messages], [dict(one) for one in sample.tools] or None
    try:
        return dict(
            fast.apply_chat_template(
                messages, tools=tools, chat_template=template.read_text(encoding="utf-8"),
                return_assistant_tokens_mask=True, return_dict=True,
            )
        )  # fmt: skip
    except Exception as error:
        return str(error)


def files(family: str) -> tuple[Path, Path]:
    needed("trl")
    marked, plain = TEMPLATES / f"{family}_training.jinja", TEMPLATES / f"{family}.jinja"
    if not marked.exists():
        pytest.skip(f"TRL in {FOLDER} has no {marked.name}")
    return marked, plain


@pytest.mark.parametrize("family", often(OUTCOMES, KEPT))
def test_ids_and_masks_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    marked, _ = files(family)
    path = folder(tmp_path / "m", marked.read_text(encoding="utf-8"))
    encoder = Encoder(path, marked, date=datetime.datetime.now().date())
    for name in CONVERSATIONS:
        sample = conversation(name, family)
        expected = by_transformers(path, marked, sample)
        if isinstance(expected, str):
            with pytest.raises(ConfigurationError) as caught:
                encoder.encode([sample])
            assert (caught.value.code, expected in str(caught.value)) == ("PT607", True)
            continue
        (encoded,) = encoder.encode([sample])
        assert encoded.ids.tolist() == expected["input_ids"]
        assert encoded.loss.tolist() == expected["assistant_masks"]
        assert encoded.untrained == ()


@pytest.mark.parametrize("family", often(OUTCOMES, KEPT))
def test_spans_without_marks_are_those_of_the_marks_or_an_error(tmp_path: Path, family: str) -> None:
    marked, plain = files(family)
    path = folder(tmp_path / "m", marked.read_text(encoding="utf-8"))
    outcomes = " ".join(outcome(path, marked, plain, conversation(name, family)) for name in CONVERSATIONS)
    assert outcomes == OUTCOMES[family]


def outcome(path: Path, marked: Path, plain: Path, sample: Conversation) -> str:
    encoder = Encoder(path, plain, date=datetime.datetime.now().date())
    try:
        (encoded,) = encoder.encode([sample])
    except ConfigurationError as error:
        return error.code if "a.jsonl:3, message" in str(error) else f"{error.code} without its place"
    (adapted,) = Encoder(path, marked, date=datetime.datetime.now().date()).encode([sample])
    if encoded.ids.tolist() != adapted.ids.tolist():
        expected = by_transformers(path, plain, sample)
        assert not isinstance(expected, str)
        assert encoded.ids.tolist() == expected["input_ids"]
        return "text"
    if encoded.loss.tolist() == adapted.loss.tolist():
        return "equal"
    assert (encoded.loss <= adapted.loss).all()
    prompts = generation_prompts(encoder, sample)
    text = encoder.template.render(sample).text
    offsets = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text, add_special_tokens=False).offsets
    fewer = [offset for offset, one, other in zip(offsets, encoded.loss, adapted.loss, strict=True) if one < other]
    assert all(any(first <= start and end <= last for first, last in prompts) for start, end in fewer)
    return "prompt"


def generation_prompts(encoder: Encoder, sample: Conversation) -> list[tuple[int, int]]:
    """Return where the generation prompt of each message of the assistant begins and ends."""
    spans = []
    for i, one in enumerate(sample.messages):
        if one["role"] == "assistant":
            before = replace(sample, messages=sample.messages[:i], weights=(1,) * i)
            prompted = encoder.template.render(before, add_generation_prompt=True).text
            spans.append((len(encoder.template.render(before).text), len(prompted)))
    return spans
