"""Makes conversations, preferences and a tokenizer from the documentation strings of Python's standard library.

    python specs/finetune/make_data.py

writes ``data/chats.jsonl``, ``data/preferences.jsonl`` and ``data/tokenizer`` beside this file. Needs ``tokenizers``.
Conversations answer with the whole documentation; preferences prefer its first sentence to the whole.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent / "data"
VOCABULARY = 2048
MODULES = (
    "argparse", "ast", "asyncio", "base64", "bisect", "calendar", "codecs", "collections", "configparser",
    "contextlib", "csv", "dataclasses", "datetime", "decimal", "difflib", "email.message", "enum", "fractions",
    "functools", "gettext", "glob", "hashlib", "heapq", "html", "http.client", "inspect", "io", "ipaddress",
    "itertools", "json", "locale", "logging", "math", "multiprocessing", "operator", "os", "pathlib", "pickle",
    "platform", "random", "re", "shutil", "socket", "sqlite3", "statistics", "string", "subprocess", "tarfile",
    "tempfile", "textwrap", "threading", "time", "tokenize", "traceback", "types", "typing", "unittest",
    "urllib.parse", "urllib.request", "uuid", "xml.dom.minidom", "zipfile",
)  # fmt: skip
QUESTIONS = ("What does {} do?", "Explain {}.", "What is {} for?", "Tell me about {}.")
TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role }}|>
{% if message.role == 'assistant' -%}
{% generation %}{{ message.content }}<|end|>{% endgeneration %}
{%- else -%}
{{ message.content }}<|end|>
{%- endif %}
{% endfor -%}
{% if add_generation_prompt %}<|assistant|>
{% endif %}"""


def documented(modules: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, documentation) of what the modules define, each text once."""
    seen: set[str] = set()
    for name in modules:
        module = importlib.import_module(name)
        for attribute in sorted(vars(module)):
            text = inspect.getdoc(getattr(module, attribute)) or ""
            if not attribute.startswith("_") and 20 < len(text) < 1200 and text not in seen:
                seen.add(text)
                yield f"{name}.{attribute}", text


def first_sentence(text: str) -> str:
    """Return the first sentence of a text that goes on for a while after it; empty if there is none."""
    found = re.match(r"[A-Z][^.]{15,200}\.(?=\s)", text, re.DOTALL)
    return found.group() if found and len(text) > found.end() + 40 else ""


def write(path: Path, records: list[dict[str, object]]) -> None:
    """Write records as JSONL."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main(folder: Path = FOLDER, modules: Sequence[str] = MODULES) -> None:
    """Write the files into ``folder``, about what ``modules`` define."""
    known = list(documented(modules))
    questions = [QUESTIONS[number % len(QUESTIONS)].format(name) for number, (name, _) in enumerate(known)]
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    chats: list[dict[str, object]] = []
    preferences: list[dict[str, object]] = []
    for question, (_, text) in zip(questions, known, strict=True):
        user = {"role": "user", "content": question}
        chats.append({"messages": [user, {"role": "assistant", "content": text}]})
        if short := first_sentence(text):
            chosen, rejected = ([{"role": "assistant", "content": answer}] for answer in (short, text))
            preferences.append({"prompt": [user], "chosen": chosen, "rejected": rejected})
    write(folder / "chats.jsonl", chats)
    write(folder / "preferences.jsonl", preferences)
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    fast.train_from_iterator([*questions, *(text for _, text in known)], trainer)
    fast.save(str(tokenizer / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    print(f"{len(chats):,} conversations and {len(preferences):,} preferences in {folder}")


if __name__ == "__main__":
    main()
