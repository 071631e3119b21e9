"""Recognises files of training systems by their contents."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from typing import Literal

from partool.engines.deepspeed_keys import TOP
from partool.engines.documents import names, outline, toml
from partool.strategies.engines import Engine

Kind = Literal["json", "toml", "yaml", "python", "script"]

_OF_DEEPSPEED = frozenset(
    ("zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer")
)
_OF_ACCELERATE = frozenset(
    (
        "distributed_type", "compute_environment", "per_device_train_batch_size", "fsdp_config", "deepspeed_config",
        "model_name_or_path", "output_dir", "num_train_epochs", "gradient_checkpointing", "num_processes",
    )
)  # fmt: skip
_OF_TORCHTITAN = frozenset(("training", "parallelism", "job", "model", "activation_checkpoint"))
_TABLE = re.compile(r"^\[(job|training|parallelism|activation_checkpoint)\][ \t]*$", re.M)
"""A table of torchtitan's, in TOML that may be broken elsewhere."""
_WORDS: tuple[tuple[Engine, str], ...] = (
    ("torchtitan", r"--job\.config_file|--(training|parallelism|activation_checkpoint|compile|model)\.\w|torchtitan\."
     r"train\b|run_(llama_)?train\.sh|--module\s+\S+\s+--config\s"),
    ("megatron", r"--num[-_]layers\b|--tensor[-_]model[-_]parallel[-_]size\b|--micro[-_]batch[-_]size\b"),
    # Of the word deepspeed in a line, the first decides: no line is read again from every such word.
    ("accelerate", r"(?m)\baccelerate\s+launch\b|--per_device_train_batch_size\b|--model_name_or_path\b|"
     r"^(?>.*?\bdeepspeed\s).*\w\.py\b"),
)  # fmt: skip
"""Expressions that scripts of a system match; the first counts."""
LOOKED_FOR = (
    "looked for: --num-layers or --micro-batch-size (Megatron-LM), zero_optimization or train_batch_size (DeepSpeed), "
    "torchtitan.train, or [training] and [parallelism] of TOML (torchtitan), accelerate launch, distributed_type or "
    "per_device_train_batch_size (accelerate); a spec is YAML with model: and hardware:"
)
"""Says by what files are recognised."""


@lru_cache(16)
def kind_of(text: str) -> Kind:
    """Return the format of a file's text; whatever is nothing else is taken for a script."""
    if text.lstrip().startswith("{"):
        return "json"
    if toml(text)[0] or _TABLE.search(text):
        return "toml"
    if names(text):
        return "yaml"
    if re.search(r"^(def|from|import|class)\s", text, re.M):
        try:
            ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return "script"
        return "python"
    return "script"


def engine_of(text: str) -> Engine | None:
    """Return the engine whose file this is, by its contents."""
    kind = kind_of(text)
    if kind == "toml":
        tables, problem = toml(text)
        return "torchtitan" if problem or tables.keys() & _OF_TORCHTITAN else None
    if kind in ("json", "yaml"):
        keys = names(text)
        if keys & _OF_ACCELERATE and not keys & _OF_DEEPSPEED:
            return "accelerate"
        if kind == "json" and (keys & TOP or outline(text).broken):
            return "deepspeed"
        return "deepspeed" if keys & _OF_DEEPSPEED else None
    if kind == "python":
        return "torchtitan" if "torchtitan" in text else None
    return next((engine for engine, words in _WORDS if re.search(words, text)), None)


def engine_of_all(texts: list[str]) -> Engine | None:
    """Return the engine of files that belong together; accelerate's come with DeepSpeed's configurations."""
    engines = {engine_of(text) for text in texts} - {None}
    if engines == {"accelerate", "deepspeed"}:
        return "accelerate"
    return engines.pop() if len(engines) == 1 else None
