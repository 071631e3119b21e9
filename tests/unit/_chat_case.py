"""A tokenizer folder that is trained in a moment, templates of our own, and conversations."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from partool.plan.conversations import Conversation

TAGS = r"<[|｜][^<>{}'\"]{1,40}?[|｜]>|</?[a-z_]+>|\[/?[A-Z_]+\]"
"""What stands for special tokens in templates: <|im_end|>, <｜User｜>, </s>, [INST]."""
HEAD = "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
MARKED = (
    HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}" + PROMPT
)
PLAIN = HEAD + "{{ m.content + '<|end|>' }}{{ '\n' }}" + PROMPT
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}


@lru_cache(maxsize=1)
def _trained() -> str:
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    texts = ["the cat sat on the mat. hello what is two plus two? naïve 日本\n\n" * 4] * 20
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return str(fast.to_str())


def folder(path: Path, template: str = "", **config: Any) -> Path:
    """Write a tokenizer with the special tokens of a template, and return its folder."""
    path.mkdir(exist_ok=True)
    fast = Tokenizer.from_str(_trained())
    tags = {*re.findall(TAGS, template), *SPECIAL.values()}
    fast.add_special_tokens(sorted(tags))
    fast.save(str(path / "tokenizer.json"))
    content = {**SPECIAL, "tokenizer_class": "PreTrainedTokenizerFast", **config}
    if template:
        content["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return path


def talk(text: str, **fields: Any) -> Conversation:
    """Return a conversation from lines such as ``u: hello``, where the first letter is that of the role."""
    lines = [line.split(": ", 1) for line in text.split("\n")]
    messages = tuple({"role": ROLES[letter], "content": content} for letter, content in lines)
    return Conversation(messages, **{"weights": (1,) * len(messages), "origin": "talks.jsonl:7", **fields})


def pieces(text: str, ids: Any, chosen: Any, path: Path) -> list[str]:
    """Return the runs of tokens that are chosen, as text; checks that the ids are those of ``text`` if it is given."""
    fast = Tokenizer.from_file(str(path / "tokenizer.json"))
    assert not text or fast.decode(list(ids), skip_special_tokens=False) == text
    runs: list[list[int]] = []
    for i, (token, flag) in enumerate(zip(ids, chosen, strict=True)):
        if flag and (not i or not chosen[i - 1]):
            runs.append([])
        if flag:
            runs[-1].append(int(token))
    return [fast.decode(run, skip_special_tokens=False) for run in runs]
