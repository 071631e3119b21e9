"""Tokens and masks: those of transformers, and those of prompts with completions."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _chat_case import MARKED, PLAIN, folder, pieces, talk
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from partool.plan.conversations import Completion, Conversation
from partool_runtime.chat import Encoder
from partool_runtime.errors import ConfigurationError

TALK = "s: be brief\nu: hello\na: the cat 日本\nu: what?\na: naïve  two "


def refused(code: str, call: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        call()
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.parametrize("source", [MARKED, MARKED.replace("{% generation %}", "th{% generation %}")])
def test_ids_and_masks_are_those_of_transformers(tmp_path: Path, source: str) -> None:
    """The second template's marks begin inside of the token "the", which is trained on then."""
    from transformers import PreTrainedTokenizerFast

    path = folder(tmp_path / "m", source)
    fast = PreTrainedTokenizerFast.from_pretrained(str(path))
    for text in (
        TALK,
        "u: x\na: e cat",
        "u: hello\na: <|end|> in a text",
        "u: x\na: \nu: y\na: z",
        "u: only a question",
    ):
        sample = talk(text)
        expected = fast.apply_chat_template(
            [dict(one) for one in sample.messages], return_assistant_tokens_mask=True, return_dict=True
        )
        (encoded,) = Encoder(path).encode([sample])
        assert encoded.ids.tolist() == expected["input_ids"]
        assert encoded.loss.tolist() == expected["assistant_masks"]
        assert (encoded.ids.dtype, encoded.loss.dtype) == (np.uint32, np.uint8)


def test_the_mask_ends_with_the_end_of_turn_and_bos_comes_once(tmp_path: Path) -> None:
    for name, source, end in (("marked", MARKED, "<|end|>"), ("plain", PLAIN, "<|end|>\n")):
        path = folder(tmp_path / name, source)
        fast = Tokenizer.from_file(str(path / "tokenizer.json"))
        bos = fast.token_to_id("<bos>")
        fast.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
        fast.save(str(path / "tokenizer.json"))
        encoder = Encoder(path)
        (encoded,) = encoder.encode([talk(TALK)])
        text = encoder.template.render(talk(TALK)).text
        assert pieces(text, encoded.ids, encoded.loss, path) == [f"the cat 日本{end}", f"naïve  two {end}"]
        assert encoded.ids.tolist().count(bos) == 1
        assert encoded.ids.max() < encoder.vocab == fast.get_vocab_size()
        assert encoder.notes() == ()


def test_what_is_trained_on(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", PLAIN)
    text = Encoder(path).template.render(talk(TALK)).text
    (last,) = Encoder(path, loss="last").encode([talk(TALK)])
    assert pieces(text, last.ids, last.loss, path) == ["naïve  two <|end|>\n"]
    (every,) = Encoder(path, loss="all").encode([talk(TALK)])
    assert every.loss.all()
    (some,) = Encoder(path, loss="all").encode([talk(TALK, weights=(1, 1, 0, 1, 1))])
    assert "the cat" not in "".join(pieces(text, some.ids, some.loss, path))
    assert len({Encoder(path, loss=loss).identity for loss in ("all", "last", "assistant")}) == 3


def test_samples_without_a_token_to_train_on_are_told(tmp_path: Path) -> None:
    source = "{% for m in messages %}[{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    path = folder(tmp_path / "m", source + "{% else %}{{ m.content }}{% endif %}{% endfor %}")
    samples = [
        talk("u: x\na: \nu: y\na: z"), Conversation((), ()), talk("u: x"), talk("u: x\na: y", weights=(1, 0)),
        talk("u: x\na: y"),
    ]  # fmt: skip
    encoded = Encoder(path).encode(samples)
    assert [one.untrained for one in encoded] == [(1,), (), (), (), ()]
    assert [one.fault for one in encoded] == ["", "no messages or text", *["no token to train on"] * 2, ""]


def test_each_token_has_its_message(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", PLAIN)
    encoder = Encoder(path)
    (encoded,) = encoder.encode([talk(TALK)], messages=True)
    assert encoded.messages is not None
    assert pieces("", encoded.ids, encoded.messages == 2, path) == ["<|start|>assistant\nthe cat 日本<|end|>\n"]
    assert pieces("", encoded.ids, encoded.messages == 0, path) == ["<bos><|start|>system\nbe brief<|end|>\n"]
    (without,) = encoder.encode([talk(TALK)])
    assert without.messages is None
    thinking = "{% if loop.last %}<think>{% endif %}{% if m.role == 'assistant' %}{% generation %}"
    changing = folder(tmp_path / "c", MARKED.replace("{% if m.role == 'assistant' %}{% generation %}", thinking))
    (encoded,) = Encoder(changing).encode([talk(TALK)], messages=True)
    assert encoded.messages is not None
    assert pieces("", encoded.ids, encoded.messages == 2, changing) == ["the cat 日本<|end|>"]
    assert pieces("", encoded.ids, encoded.messages == 4, changing) == ["naïve  two <|end|>"]
    assert set(encoded.messages) == {-1, 2, 4}


def test_completions_follow_their_prompts_exactly(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    encoder = Encoder(path)
    cases = [
        ("hello ", "the cat"),
        ("hel", "lo"),
        ("", "the"),
        ("what?\n", "\ntwo"),
        ("the cat", ""),
        ("日", "本<eos>"),
    ]
    for (prompt, text), one in zip(cases, encoder.encode([Completion(*case) for case in cases]), strict=True):
        answer = text.removesuffix("<eos>") + "<eos>"
        assert pieces(prompt + answer, one.ids, one.loss, path) == [answer]
        alone = Tokenizer.from_file(str(path / "tokenizer.json")).encode(prompt, add_special_tokens=False).ids
        assert one.ids[one.loss == 0].tolist() == alone, "the prompt has the tokens that it has when the model answers"
    (every,) = Encoder(path, loss="all").encode([Completion("hello ", "the cat")])
    assert every.loss.all()


def test_completions_begin_as_the_tokenizer_begins_a_text(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    fast = Tokenizer.from_file(str(path / "tokenizer.json"))
    bos = fast.token_to_id("<bos>")
    fast.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    fast.save(str(path / "tokenizer.json"))
    one, two = Encoder(path).encode([Completion("hello", " cat"), Completion("<bos>hello", " cat")])
    assert one.ids.tolist() == two.ids.tolist()
    assert one.ids[:2].tolist().count(bos) == 1
    assert not one.loss[0]


def test_a_tokenizer_that_begins_texts_with_a_space_puts_none_into_the_middle(tmp_path: Path) -> None:
    """As SentencePiece does: "hel" + "lo" must not become "hel lo"."""
    words = ["<bos>", "<eos>", "<unk>", "▁", "▁hel", "lo", "▁lo", "▁hello", "\n", "h", "e", "l", "o"]
    fast = Tokenizer(models.Unigram([(word, -1.0 - (len(word) < 2)) for word in words], unk_id=2))
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.Metaspace()
    path = folder(tmp_path / "m")
    fast.save(str(path / "tokenizer.json"))
    cases = {
        ("hel", "lo"): ["▁hel", "lo", "<eos>"],  # "hello" is one token, which would cross the border
        ("hel", " lo"): ["▁hel", "▁lo", "<eos>"],
        ("hel ", "lo"): ["▁hel", "▁", "lo", "<eos>"],
    }
    for (prompt, text), tokens in cases.items():
        (encoded,) = Encoder(path).encode([Completion(prompt, text)])
        assert [fast.id_to_token(token) for token in encoded.ids] == tokens
        assert encoded.loss.tolist() == [0] * (len(tokens) - 2) + [1, 1]


def test_samples_keep_their_order(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", PLAIN)
    samples = [
        Completion("hello", " cat"),
        talk(TALK),
        Conversation((), ()),
        Completion("two", " the"),
        talk("u: x\na: y"),
    ]
    encoder = Encoder(path)
    for together, sample in zip(encoder.encode(samples * 200)[-5:], samples, strict=True):
        (alone,) = encoder.encode([sample])
        assert (together.ids.tolist(), together.loss.tolist()) == (alone.ids.tolist(), alone.loss.tolist())


def test_the_identity_is_of_all_that_changes_tokens(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", PLAIN)
    other = tmp_path / "other.jinja"
    other.write_text(PLAIN + " ")
    identities = [
        Encoder(path).identity, Encoder(path, other).identity,
        Encoder(folder(tmp_path / "b", PLAIN, bos_token="<eos>")).identity,
        Encoder(folder(tmp_path / "c", MARKED)).identity, Encoder(folder(tmp_path / "d", PLAIN + "<|x|>")).identity,
    ]  # fmt: skip
    assert len(set(identities)) == len(identities)
    assert Encoder(folder(tmp_path / "e", PLAIN)).identity == identities[0]


def test_what_cannot_encode_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path / "m", eos_token=None)
    encoder = Encoder(path)
    assert "has no chat template" in refused("PT606", lambda: encoder.encode([talk("u: x\na: y")]))
    assert "never learn to stop" in refused("PT603", lambda: encoder.encode([Completion("a", "b")]))
    unknown = Encoder(folder(tmp_path / "u", eos_token="<what>"))
    assert "'<what>', which tokenizer.json lacks" in refused("PT603", lambda: unknown.encode([Completion("a", "b")]))
    assert "no tokenizer.json" in refused("PT603", lambda: Encoder(tmp_path))
    assert "no.jinja" in refused("PT606", lambda: Encoder(path, tmp_path / "no.jinja"))
    (path / "tokenizer.json").write_text("{}")
    assert "cannot be read" in refused("PT603", lambda: Encoder(path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "needs the package tokenizers" in refused("PT603", lambda: Encoder(path))


def test_conversations_that_cannot_be_used_are_named_together(tmp_path: Path) -> None:
    source = MARKED.replace(
        "{{ bos_token }}", "{% if messages[0].role != 'user' %}{{ raise_exception('no') }}{% endif %}"
    )
    encoder = Encoder(folder(tmp_path / "m", source))
    good, bad = talk("u: hello\na: the cat"), talk("s: be brief\nu: hello\na: the cat")
    samples = [replace(bad if n % 3 else good, origin=f"/data/a.jsonl:{n}") for n in range(1, 20)]
    said = refused("PT607", lambda: encoder.encode(samples))
    assert "a.jsonl:1" in said
    assert "nor can 12 of the next samples be used: a.jsonl:2, a.jsonl:4, a.jsonl:5" in said
    assert "…" in said
    assert "nor can" not in refused("PT607", lambda: encoder.encode(samples[2:4]))
