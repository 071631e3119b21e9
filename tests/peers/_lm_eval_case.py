"""A small model of transformers with a tokenizer, and two tasks with local data."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from _chat_case import folder
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 48
WORDS = ["the", "cat", "sat", "on", "mat", "hello", "what", "is", "two", "plus", "naïve", "日本", "dog", "ran", "over"]
CHOICE = """\
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} "
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
ROLLING = """\
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rolling.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
  - {{metric: bits_per_byte}}
"""
GENERATES = """\
task: generates
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rolling.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: ""
metric_list: [{{metric: exact_match}}]
"""


def write_model(path: Path) -> Path:
    """Write a Llama in float64 with a tokenizer; return its folder."""
    folder(path)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=405, hidden_size=20, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, max_position_embeddings=LENGTH, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, initializer_range=0.4,
    )  # fmt: skip
    LlamaForCausalLM(config).double().save_pretrained(path)
    return path


def write_tasks(path: Path) -> list[str]:
    """Write the tasks choice and rolling with their data, and one that generates; return the files of the first two."""
    path.mkdir(exist_ok=True)
    draw = random.Random(0)

    def said(least: int, most: int) -> str:
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))

    questions = [
        {"question": said(2, 60), "choices": [said(1, 4) for _ in range(3)], "answer": draw.randrange(3)}
        for _ in range(13)
    ]
    texts = [{"text": said(1, 120)} for _ in range(7)]
    for name, records in (("choice", questions), ("rolling", texts)):
        (path / f"{name}.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    for name, text in (("choice", CHOICE), ("rolling", ROLLING), ("generates", GENERATES)):
        (path / f"{name}.yaml").write_text(text.format(folder=path))
    return [str(path / "choice.yaml"), str(path / "rolling.yaml")]
