"""Reads which layers Megatron-LM recomputes (``megatron/core/transformer/transformer_block.py``)."""

from __future__ import annotations

from typing import Any

from partool.engines.sections import PipelineDict
from partool.engines.settings import Sheet

_OLD = ("checkpoint-activations", "activations-checkpoint-method")
"""Names of full recomputation until 2022."""


def recompute_of(sheet: Sheet, layers: int, pipeline: PipelineDict) -> str | list[str]:
    """Return the policy of all layers, or of each: ``block`` recomputes the first layers of every virtual stage."""
    kind = sheet.get("recompute-granularity", to="parallel.recompute")
    if sheet.switch("recompute-activations", to="parallel.recompute"):
        kind = "selective"
    how = sheet.get("recompute-method", to="parallel.recompute")
    number = sheet.integer("recompute-num-layers", 1, to="parallel.recompute")
    modules = sheet.get("recompute-modules", to="parallel.recompute")
    old = [sheet.get(name, False, to="parallel.recompute") for name in _OLD]
    if kind is None and any(old):
        kind, how = "full", old[1] or "uniform"
        number = sheet.integer("activations-checkpoint-num-layers", 1, to="parallel.recompute")
    if kind != "full":
        return _selective(sheet, modules) if kind == "selective" else "none"
    if how is None:
        sheet.say(
            "PT821", "error", "full recomputation needs --recompute-method", "uniform, or block with "
            "--recompute-num-layers", "recompute-granularity",
        )  # fmt: skip
    if how != "block":
        if number > 1:
            sheet.say(
                "PT824", "warning", f"{number} layers are recomputed together; they are priced one by one",
                "--recompute-num-layers 1", "recompute-num-layers",
            )  # fmt: skip
        return "full"
    policies = list[str]()
    parts = pipeline["stages"] * pipeline.get("chunks", 1)
    for size in pipeline.get("layers", [-(-layers // parts)] * parts):
        policies += ["full" if place < number else "none" for place in range(size)]
    return policies[:layers]


def _selective(sheet: Sheet, modules: Any) -> str:
    """Return the policy of ``recompute-modules``, which are the core of attention unless they are named."""
    named = {"core_attn"} if modules is None else set(modules if isinstance(modules, tuple) else [modules])
    if others := sorted(map(str, named - {"core_attn"})):
        sheet.say(
            "PT824", "warning", f"recomputation of {', '.join(others)} is not priced",
            "--set parallel.recompute=selective prices all but matrix products", "recompute-modules",
        )  # fmt: skip
    return "attention" if "core_attn" in named else "none"
