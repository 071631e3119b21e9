"""Conversations rendered, tokenised and masked by ``partool_runtime.chat`` against ``datasets.map`` on 2 processes.

``python tests/bench/chat_encoding.py [PEERS]``: PEERS is a folder with ``datasets`` (``make peers``, build/peers). Both
sides encode the same 20,000 generated conversations of 2 to 6 messages with a tokenizer that is trained here, and must
agree on the number and the sum of ids and on the number of trained tokens. Runs alternate; each side is a fresh
process, and its seconds are those of the encoding alone, with the start of worker processes; CPU seconds are those of
all its processes. Templates without marks
have no other side, as transformers masks nothing then; their seconds are compared with those of the marked template.
"""

from __future__ import annotations

import json
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _record import write

ROOT = Path(__file__).parents[2]
ROUNDS = 3
CONVERSATIONS = 20_000
PROCESSES = 2
MARKED = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = re.sub(r"{% (end)?generation %}", "", MARKED)


def make(folder: Path) -> None:
    """Write a tokenizer folder, both templates and the conversations, whose words are those of the standard library."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(statistics.__file__).parent.glob("*.py"))[:120]]
    lines = [line.strip() for text in texts for line in text.splitlines() if len(line) > 30]
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    fast.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    )
    fast.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    fast.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": MARKED}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "plain.jinja").write_text(PLAIN, encoding="utf-8")
    draw = random.Random(0)
    with (folder / "chat.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(CONVERSATIONS):
            roles = ["user", "assistant"] * draw.randint(1, 3)
            contents = [" ".join(draw.choices(lines, k=draw.randint(1, 8))) for _ in roles]
            rows = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
            file.write(json.dumps({"messages": rows}) + "\n")


def ours(folder: Path, template: str) -> dict[str, Any]:
    """Encode the conversations with partool; runs in a process of its own."""
    from partool.plan.conversations import Conversation
    from partool_runtime.chat import Encoder, encode_all

    rows = [json.loads(line)["messages"] for line in (folder / "chat.jsonl").read_text("utf-8").splitlines()]
    samples = [Conversation(tuple(row), (1,) * len(row), (), f"chat.jsonl:{i}") for i, row in enumerate(rows, 1)]
    before, cpu_before = time.perf_counter(), cpu_seconds()
    encoder = Encoder(folder, folder / template if template else None)
    encoded = list(encode_all(encoder, samples, PROCESSES))
    seconds, cpu_s = time.perf_counter() - before, cpu_seconds() - cpu_before
    ids = [sum(len(one.ids) for one in encoded), sum(int(one.ids.sum(dtype="int64")) for one in encoded)]
    return {"seconds": seconds, "cpu_s": cpu_s, "sums": [*ids, sum(int(one.loss.sum()) for one in encoded)]}


def cpu_seconds() -> float:
    """Return user and system seconds of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(command: list[str], result: Path) -> dict[str, Any]:
    """Run one side and return what it wrote."""
    subprocess.run([sys.executable, *command], check=True, timeout=600)
    return dict(json.loads(result.read_text(encoding="utf-8")))


def main(peers: Path) -> None:
    """Measure and write the record."""
    sides = ("partool", "datasets_map", "partool_without_marks")
    rounds: dict[str, list[float]] = {side: [] for side in sides}
    cpu_s: dict[str, list[float]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as name:
        folder, result = Path(name), Path(name) / "result.json"
        make(folder)
        here, other = str(Path(__file__)), str(Path(__file__).parent / "_chat_map.py")
        commands = {
            "partool": [here, "--side", name, "", str(result)],
            "datasets_map": [other, str(peers), name, str(folder / "chat.jsonl"), str(PROCESSES), str(result)],
            "partool_without_marks": [here, "--side", name, "plain.jinja", str(result)],
        }
        answers: dict[str, dict[str, Any]] = {}
        for _ in range(ROUNDS):
            for side, command in commands.items():
                answers[side] = timed(command, result)
                rounds[side].append(answers[side]["seconds"])
                cpu_s[side].append(answers[side]["cpu_s"])
                assert answers[side]["sums"] == answers["partool"]["sums"], (side, answers)
    medians = {side: statistics.median(values) for side, values in rounds.items()}
    cpu_medians = {side: statistics.median(values) for side, values in cpu_s.items()}
    record = {
        "conversations": CONVERSATIONS,
        "processes": PROCESSES,
        "tokens": answers["partool"]["sums"][0],
        "trained_tokens": answers["partool"]["sums"][2],
        "seconds": {side: [round(value, 3) for value in values] for side, values in rounds.items()},
        "cpu_s": {side: [round(value, 3) for value in values] for side, values in cpu_s.items()},
        "median_cpu_s": {side: round(value, 3) for side, value in cpu_medians.items()},
        "median_s": {side: round(value, 3) for side, value in medians.items()},
        "times_as_fast_as_datasets_map": {
            side: round(medians["datasets_map"] / medians[side], 2) for side in ("partool", "partool_without_marks")
        },
        "datasets": answers["datasets_map"]["versions"]["datasets"],
    }
    write("chat_encoding", record, "tokenizers", "transformers", "jinja2")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--side"]:
        Path(sys.argv[4]).write_text(json.dumps(ours(Path(sys.argv[2]), sys.argv[3])), encoding="utf-8")
    else:
        main(Path(sys.argv[1]) if sys.argv[1:] else ROOT / "build" / "peers")
