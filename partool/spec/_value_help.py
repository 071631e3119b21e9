"""Help for values that are almost right: numbers with units or in quotes, percentages, words of YAML 1.1."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

NONE_WORDS = ("off", "none", "no", "false", "0")
TRUTHS = ("yes", "on", "no", "off", "none")
_NUMBERS = ("int_type", "float_type", "int_from_float")
_UNITS = ("gib", "mib", "tflops", "w", "us", "s")
"""Units at the end of names of fields, such as ``memory_gib`` and ``link_gb_per_s``."""
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z%/]+)", re.IGNORECASE)
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgb]|ki|mi)(?:\s*(?:tokens|tok))?", re.IGNORECASE)
_FACTORS = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "ki": 2**10, "mi": 2**20}
_WORDS = {
    "float16": "fp16", "half": "fp16", "float32": "fp32", "single": "fp32", "float": "fp32", "float64": "fp64",
    "double": "fp64", "float8": "fp8",
}  # fmt: skip
"""Word of other tools → word of a spec."""


def near_word(value: Any, words: list[str]) -> str:
    """Return the word that a value of another tool stands for, such as ``adamw`` for ``adamw_torch``; else empty."""
    text = str(value).lower()
    if _WORDS.get(text) in words:
        return _WORDS[text]
    return next((word for word in words if len(word) > 2 and text.startswith(f"{word}_")), "")


def truth(value: Any) -> str:
    """Return the YAML 1.2 word for a truth value of YAML 1.1, such as ``true`` for ``yes``; else an empty text."""
    text = str(value).lower()
    return "" if text not in TRUTHS else "true" if text in ("yes", "on") else "false"


def number_words(name: str, kind: str, value: Any) -> str:
    """Return help for a value that is not the number that the field ``name`` takes; empty if nothing helps.

    ``kind`` is pydantic's type of the error.
    """
    if kind not in _NUMBERS:
        return ""
    if value is None:
        return "leave the key out for its default"
    if isinstance(value, float) and kind != "float_type" and isfinite(value) and value == int(value):
        return f"write {int(value)}"
    if not isinstance(value, str):
        return ""
    text = value.strip().replace(",", "")
    try:
        return f"write {text} without quotes" if isfinite(float(text)) else ""
    except ValueError:
        match = _AMOUNT.fullmatch(text)
    if match is None:
        return ""
    number, unit = match.groups()
    if unit == "%" and kind == "float_type":
        return f"write {float(number) / 100:g}"
    if name.rpartition("_")[2] in _UNITS:
        return f"write {number}: the name ends with the unit"
    return "write all digits, such as 8192" if unit.lower() in ("k", "m", "ki") else f"write {number}"


def limit_words(name: str, value: Any, bound: float | None) -> str:
    """Return help for a number of the field ``name`` that is above ``bound``; empty if nothing helps."""
    if bound is None or isinstance(value, bool) or not isinstance(value, int | float) or value < bound:
        return ""
    if bound == 1:
        return "it is a fraction of 1: 0.05 for 5 %" if value <= 100 else ""
    return "the name ends with the unit" if name.rpartition("_")[2] in _UNITS else ""


def written(key: str, value: Any) -> str:
    """Return help for a value that stands under another tool's name: the spec's key, with the value as it takes it."""
    amount = _AMOUNT.fullmatch(value.strip()) if isinstance(value, str) else None
    if key == "per_node" or (isinstance(value, int) and key == "accelerator"):
        return "did you mean `per_node`?"
    if amount and key.rpartition("_")[2] in _UNITS:
        return f"write `{key}: {amount[1]}`: the name ends with the unit"
    if isinstance(value, str | int | float) and not isinstance(value, bool) and len(str(value)) <= 60:
        return f"write `{key}: {value}`"
    return f"did you mean `{key}`?"


def section_words(name: str, value: Any, keys: list[str]) -> str:
    """Return help for a value in place of the section ``name``, which has ``keys``."""
    if name == "parallel.data":
        stage = re.fullmatch(r"(?:zero|stage)[-_ ]?([0-3])", str(value).lower())
        if stage or str(value).lower() in ("fsdp", "full_shard", "true"):
            return f"write data: {{zero: {stage[1] if stage else 3}}}"
        if isinstance(value, int):
            return f"its ranks follow from the others; for states shared by {value} of them: data: {{shard: {value}}}"
    if name == "optimizer" and isinstance(value, str):
        return f"write optimizer: {{name: {value.lower().partition('_')[0]}}}"
    return f"its keys: {', '.join(keys)}" if keys else ""


def batch_words(value: Any, sequence_length: Any) -> str:
    """Return help for a batch that is written as a number of tokens, such as ``4M``; empty for other values."""
    match = _TOKENS.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        return ""
    tokens = round(float(match[1]) * _FACTORS[match[2].lower()])
    length = sequence_length if isinstance(sequence_length, int) and 0 < sequence_length <= tokens else None
    if length is None:
        return "it counts samples, not tokens: divide the tokens by training.sequence_length"
    return f"it counts samples, not tokens: {tokens // length} for {tokens:,} tokens of sequences of {length:,}"
