"""Recognises files of training systems that are not imported, so that none is taken for one that it resembles.

Names of keys and commands are from the projects' examples and documentation: https://github.com/EleutherAI/gpt-neox
(``configs``), https://github.com/modelscope/ms-swift (``examples``), https://github.com/hiyouga/LLaMA-Factory
(``examples/v1``), https://github.com/axolotl-ai-cloud/axolotl (``examples``), https://github.com/mosaicml/llm-foundry
(``scripts/train/yamls``), https://github.com/pytorch/torchtune (``recipes/configs``),
https://github.com/huggingface/nanotron (``examples``), https://github.com/NVIDIA/NeMo (``examples/nlp``),
https://github.com/OpenRLHF/OpenRLHF and https://github.com/volcengine/verl (``examples``), and
https://huggingface.co/docs/transformers/main_classes/configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.engines.documents import names

_DEEPSPEED = "its DeepSpeed configuration (ds_config.json) with --model and the machines"
_ARGUMENTS = "a script of Megatron-LM with the same sizes and degrees"
_NOTHING = "nothing of it: partool prices training on tokens"
_LAUNCHED = "the same run as TrainingArguments: accelerate's YAML and a script of Trainer or TRL"


@dataclass(frozen=True)
class Other:
    """A system whose files are recognised and not read."""

    title: str
    instead: str
    """What of such a run can be imported."""
    keys: Sequence[frozenset[str]] = ()
    """Names at the top of its YAML or JSON; each set alone tells it. Dashes are written as underscores."""
    command: str = ""
    """Expression that its commands match."""


def _sets(*texts: str) -> tuple[frozenset[str], ...]:
    return tuple(frozenset(text.split()) for text in texts)


OTHERS: Mapping[str, Other] = {
    "gpt-neox": Other(
        "GPT-NeoX", _ARGUMENTS,
        _sets("pipe_parallel_size", "model_parallel_size", "num_layers hidden_size train_micro_batch_size_per_gpu"),
        r"(^|/)deepy\.py\b",
    ),
    "ms-swift": Other(
        "ms-swift", f"{_DEEPSPEED}, or {_LAUNCHED}",
        _sets("tuner_type", "train_type model", "swift_version", "rlhf_type"),
        r"(^|[\s;&|/])(swift|megatron)\s+(sft|pt|rlhf|rl|export|sample)(\s|$)|-m\s+swift\.|swift/cli/",
    ),
    "llamafactory-v1": Other(
        "LLaMA-Factory v1", f"{_DEEPSPEED}, or the arguments of LLaMA-Factory v0 (model_name_or_path, finetuning_type)",
        _sets(
            "model dist_config", "model init_config", "model kernel_config", "model train_dataset", "model peft_config",
        ),
        r"\bUSE_V1=(1|[Tt]rue)\b",
    ),
    "axolotl": Other(
        "Axolotl", f"{_DEEPSPEED}, or {_LAUNCHED}",
        _sets("base_model datasets", "base_model sequence_len", "base_model micro_batch_size"),
        r"(^|[\s;&|/])axolotl\s+train\b|-m\s+axolotl\.",
    ),
    "llm-foundry": Other(
        "LLM Foundry (Composer)", _LAUNCHED,
        _sets("max_seq_len train_loader", "global_train_batch_size device_train_microbatch_size"),
        r"(^|/)composer\s+\S*train\S*\.py",
    ),
    "torchtune": Other("torchtune", _LAUNCHED, (), r"(^|[\s;&|/])tune\s+run\s"),
    "nemo": Other("NeMo", _ARGUMENTS, _sets("exp_manager trainer")),
    "nanotron": Other("nanotron", _ARGUMENTS, _sets("parallelism tokens", "tokens general")),
    "openrlhf": Other("OpenRLHF", _NOTHING, (), r"-m\s+openrlhf\.|\bopenrlhf\.cli\."),
    "verl": Other("verl", _NOTHING, (), r"-m\s+verl\.|\bverl\.trainer\."),
}  # fmt: skip
_OF_MODEL = frozenset(("architectures", "model_type", "transformers_version"))
_CONTINUED = re.compile(r"\\\r?\n")


def refusals(files: Sequence[tuple[Path, str]]) -> list[Diagnostic]:
    """Return an error for each file of a system that is not read, and for configurations of models."""
    return [refusal for path, text in files if (refusal := _refusal(path, text)) is not None]


def _refusal(path: Path, text: str) -> Diagnostic | None:
    keys = frozenset(name.replace("-", "_") for name in names(text))
    if keys & _OF_MODEL and "hidden_size" in keys:
        message = f"{path} describes a model, not a run"
        return Diagnostic("PT830", message, help=f"give the run's files, and --model {path} beside them")
    other = next((each for each in OTHERS.values() if any(names_ <= keys for names_ in each.keys)), None)
    if other is None and not keys:
        lines = [line.lstrip() for line in _CONTINUED.sub(" ", text).split("\n")]
        commands = [line for line in lines if line and not line.startswith("#")]
        patterns = [(each, re.compile(each.command)) for each in OTHERS.values() if each.command]
        other = next((each for each, words in patterns if any(words.search(line) for line in commands)), None)
    if other is None:
        return None
    message = f"{path} is of {other.title}, which is not imported"
    return Diagnostic("PT830", message, help=f"what can be imported: {other.instead}")
