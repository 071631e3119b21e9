"""Ranks of test_sequence_compiled.py: models whose graph is sharded, against transformers, in float64."""

from __future__ import annotations

import torch
from _sequence_hf_worker import WIDE, Case, check_case, ways, written

torch.compiler.list_backends()  # loads what every trace needs, before ranks are copied: it takes a second

__all__ = ["Case", "cases", "check_case", "written"]

FAMILIES = (
    "odd",
    "llama",
    "qwen2_deep",
    "mixtral",
    "gpt2",
    "gemma3_text_deep",
    "falcon",
    "gemma2",
    "gpt_oss",
    "deepseek_v2",
)
GRADIENTS_ALONE = {2: ("gemma2", "qwen2_deep", "mixtral", "falcon"), 4: ("gpt2",)}
"""By the number of ranks, families of which the first step's gradients are checked in a case of their own.

What follows gradients is the same for every family.
"""


def cases(world: int) -> list[Case]:
    """Return the models and layouts that so many ranks check."""
    found = [Case(name, "compiled", cp=world) for name in FAMILIES]
    found += [Case(name, "compiled", cp=world, steps=0) for name in GRADIENTS_ALONE.get(world, ())]
    if world == 1:
        return [Case("odd", cp=1), Case("tied", cp=1)]
    if world == 2:
        for policy in ("full", "selective", "attention", "keep_attention"):
            found.append(Case("llama", "compiled", cp=2, fields=ways(recompute=(policy,) * 2), steps=0))
        for policy in ("full", "selective", "attention", "keep_attention"):
            found.append(Case("odd", "compiled", cp=2, fields=ways(recompute=(policy,) * 3), steps=0))
        found += [Case("llama", "compiled", cp=2, documents=True), Case("gpt2", "compiled", cp=2, documents=True)]
        found += [Case(f"{name}_{wide}", "compiled", cp=2, steps=0) for name in WIDE for wide in ("wide", "wider")]
        found.append(Case("mistral_wide", "compiled", cp=2, documents=True))
        found += [Case("tied", cp=1, dp=2, fields=ways(zero=zero, recompute=("full",) * 4)) for zero in range(4)]
        found += [Case("tied", "compiled", cp=2, fields=ways(zero=3, recompute=("keep_attention",) * 4))]
    if world == 3:
        found += [Case("tied", "compiled", cp=3, fields=ways(zero=zero)) for zero in (1, 3)]
        found += [Case(f"{name}_wide", "compiled", cp=3) for name in WIDE]
    if world == 4:
        found += [Case("odd", "compiled", cp=2, dp=2, fields=ways(zero=zero)) for zero in (0, 3)]
        found += [Case("qwen2", "compiled", cp=2, dp=2, fields=ways(zero=zero)) for zero in range(4)]
    return found
