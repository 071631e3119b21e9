"""The layout in accelerate's settings and in ``TrainingArguments``: sharding, degrees, recomputation, compilation.

``accelerate/utils/dataclasses.py`` and ``accelerate/parallelism_config.py`` of accelerate 1.10
(https://github.com/huggingface/accelerate), ``transformers/training_args.py`` of 4.57
(https://github.com/huggingface/transformers).
"""

from __future__ import annotations

import re
from math import gcd
from typing import Any

from partool.engines.accelerate_files import OF
from partool.engines.sections import DataDict, ParallelDict, tensor_section
from partool.engines.settings import Sheet

_STRATEGIES = {
    "FULL_SHARD": (3, False), "1": (3, False), "SHARD_GRAD_OP": (2, False), "2": (2, False), "NO_SHARD": (0, False),
    "3": (0, False), "HYBRID_SHARD": (3, True), "4": (3, True), "HYBRID_SHARD_ZERO2": (2, True), "5": (2, True),
    "TRUE": (3, False), "FALSE": (2, False),
}  # fmt: skip
"""Words and numbers of FSDP's strategies → ZeRO stage, and whether copies are sharded within machines only."""


def fsdp(sheet: Sheet, name: str, default: Any = None, *, to: str) -> Any:
    """Return a setting of FSDP: that of ``TrainingArguments`` counts over accelerate's."""
    keys = (f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}", f"{OF}fsdp_config.fsdp_{name}", f"fsdp_{name}")
    values = [sheet.get(key, to=to) for key in keys]
    return next((value for value in values if value is not None), default)


def parallel_of(sheet: Sheet, below: str, world: int | None, per_node: int | None) -> ParallelDict:
    """Return the section ``parallel``; ``below`` says what shards the state."""
    data, offload = _sharded(sheet, world, per_node) if below == "fsdp" else (DataDict(zero=0), "none")
    parallel: ParallelDict = {
        "data": data,
        "tensor": {"degree": 1},
        "pipeline": {"stages": 1},
        "sequence": {"degree": 1},
        "tiles": {"mlp": 0, "loss": 0},
        "recompute": "full" if _recomputed(sheet, below) else "none",
        "compile": "block" if _compiled(sheet) else "none",
        "offload": {"optimizer": offload, "parameters": offload, "activations": "none"},
    }
    _degrees(sheet, parallel, world)
    if below == "megatron":
        _megatron(sheet, parallel)
    return parallel


def _sharded(sheet: Sheet, world: int | None, per_node: int | None) -> tuple[DataDict, str]:
    """Return the section ``data`` for FSDP, and the place of the state."""
    path = "parallel.data.zero"
    version = str(fsdp(sheet, "version", 1, to=path))
    words = re.split(r"[\s,]+", str(sheet.get("fsdp", "", to=path) or "").strip("'\"[]").replace("'", "").upper())
    strategy = next((word for word in words if word in _STRATEGIES and word != "TRUE"), None)
    reshard = fsdp(sheet, "reshard_after_forward", to=path)
    old = fsdp(sheet, "sharding_strategy", to=path)
    # Version 2 has a truth value only; version 1 has strategies, under either name.
    chosen = reshard if version == "2" else strategy or (old if old is not None else reshard)
    word = str(chosen if chosen is not None else "FULL_SHARD").upper()
    if word not in _STRATEGIES:
        names = ("fsdp", OF + "fsdp_config.fsdp_sharding_strategy", OF + "fsdp_config.fsdp_reshard_after_forward")
        sheet.say("PT823", "error", f"the strategy {word} has no counterpart here", "FULL_SHARD", *names)
    elif version == "2" and word not in ("TRUE", "FALSE", "FULL_SHARD"):
        names = (OF + "fsdp_config.fsdp_reshard_after_forward", "fsdp_config.reshard_after_forward", "fsdp")
        sheet.say(
            "PT821", "error", f"FSDP2 takes true or false, not {word}", "fsdp_reshard_after_forward: true", *names
        )
    zero, hybrid = _STRATEGIES.get(word, (3, False))
    data: DataDict = {"zero": zero}
    if hybrid and per_node:
        data["shard"] = gcd(per_node, world or per_node)
    elif zero and world:
        data["shard"] = world
    away = str(fsdp(sheet, "offload_params", False, to="parallel.offload")).lower() == "true"
    return data, "cpu" if away or "OFFLOAD" in words else "none"


def _recomputed(sheet: Sheet, below: str) -> bool:
    """Return whether layers are recomputed; LLaMA-Factory does so unless it is told not to."""
    path = "parallel.recompute"
    inside = str(fsdp(sheet, "activation_checkpointing", False, to=path)).lower() == "true" and below == "fsdp"
    factory = "finetuning_type" in sheet.settings or "cutoff_len" in sheet.settings
    off = sheet.flag("disable_gradient_checkpointing", to=path)
    by_trainer = sheet.flag("gradient_checkpointing", factory and not off, to=path)
    if inside and by_trainer and "gradient_checkpointing" in sheet.settings:
        sheet.say(
            "PT821", "error", "both gradient_checkpointing and FSDP's activation_checkpointing are true",
            "set gradient_checkpointing to false", "gradient_checkpointing",
        )  # fmt: skip
    return inside or by_trainer


_UNCOMPILED = {"NO", "FALSE", "NONE", "EAGER", "AOT_EAGER"}
"""Words for a backend of dynamo that compiles no kernels."""


def _compiled(sheet: Sheet) -> bool:
    path = "parallel.compile"
    backend = sheet.get("torch_compile_backend", to=path) or sheet.get("torchdynamo", to=path)
    dynamo = str(sheet.get(OF + "dynamo_config.dynamo_backend", "NO", to=path)).upper()
    old = str(sheet.get(OF + "dynamo_backend", "NO", to=path)).upper()
    sheet.get("torch_compile_mode", to=path)
    return sheet.flag("torch_compile", bool(backend), to=path) or bool({dynamo, old} - _UNCOMPILED)


def _degrees(sheet: Sheet, parallel: ParallelDict, world: int | None) -> None:
    """Carry ``parallelism_config`` of accelerate 1.10."""
    before = f"{OF}parallelism_config.parallelism_config_"
    tensor = sheet.integer(f"{before}tp_size", 1, to="parallel.tensor.degree")
    context = sheet.integer(f"{before}cp_size", 1, to="parallel.sequence.degree")
    copies, shard = (
        sheet.integer(f"{before}{name}_size", 1, to="parallel.data.shard") for name in ("dp_replicate", "dp_shard")
    )
    how = str(sheet.get(f"{before}cp_comm_strategy", "allgather", to="parallel.sequence.method"))
    if tensor > 1:
        parallel["tensor"] = tensor_section(tensor)
    if context > 1:
        method = "ring" if how == "alltoall" else "all_gather"
        parallel["sequence"] = {"degree": context, "method": method, "order": "zigzag"}
    if world and tensor * context * copies * shard > 1:
        if copies * shard * tensor * context != world:
            sheet.say(
                "PT821", "error", f"degrees {copies} · {shard} · {tensor} · {context} are not {world} ranks",
                "degrees whose product is the number of processes", *(before + f"{each}_size" for each in
                ("dp_shard", "dp_replicate", "tp", "cp")),
            )  # fmt: skip
        if parallel["data"]["zero"]:
            parallel["data"]["shard"] = shard


def _megatron(sheet: Sheet, parallel: ParallelDict) -> None:
    """Carry ``megatron_lm_config``."""
    before = f"{OF}megatron_lm_config.megatron_lm_"
    tensor = sheet.integer(before + "tp_degree", 1, to="parallel.tensor.degree")
    stages = sheet.integer(before + "pp_degree", 1, to="parallel.pipeline.stages")
    norms = sheet.flag(before + "sequence_parallelism", to="parallel.tensor.sequence_norms")
    if tensor > 1:
        parallel["tensor"] = tensor_section(tensor, sequence_norms=norms)
    if stages > 1:
        parallel["pipeline"] = {"stages": stages, "schedule": "1f1b"}
    if sheet.flag(before + "use_distributed_optimizer", to="parallel.data.zero"):
        parallel["data"] = {"zero": 1}
    if sheet.flag(before + "recompute_activations", to="parallel.recompute"):
        parallel["recompute"] = "attention"
    parallel["compile"] = "block"
