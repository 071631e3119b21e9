"""Recognizes configuration files of other tools that were given in place of a spec or a plan."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

DEEPSPEED = {
    "train_batch_size": "training.global_batch",
    "train_micro_batch_size_per_gpu": "parallel.micro_batch",
    "gradient_accumulation_steps": "training.global_batch",
    "zero_optimization": "parallel.data",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
    "gradient_clipping": "optimizer.clip",
    "activation_checkpointing": "parallel.recompute",
    "tensor_parallel": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "sequence_parallel_size": "parallel.sequence",
    "steps_per_print": "training.log_every",
    "tensorboard": "telemetry.trackers",
    "wandb": "telemetry.trackers",
    "checkpoint": "checkpoint",
}
"""Key of a DeepSpeed configuration (https://www.deepspeed.ai/docs/config-json/) → section or field of a spec."""
_ONLY_DEEPSPEED = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "zero_optimization",
}  # fmt: skip
_ONLY_HUGGINGFACE = {"model_type", "architectures", "transformers_version"}
"""Keys of a model's config.json that no other file has, https://huggingface.co/docs/transformers/main_classes/configuration."""
_OFFLOADS = ("offload_optimizer", "offload_param")
_LARGEST = 1_000_000


def foreign(document: Any, file: str) -> tuple[str, str] | None:
    """Return (what the file is, what to do instead) for another tool's configuration; None for any other document."""
    if not isinstance(document, dict) or {"model", "partool_version"} & document.keys():
        return None
    if _ONLY_HUGGINGFACE & document.keys():
        kind = document.get("model_type")
        of = f" of a {kind} model" if isinstance(kind, str) and kind else ""
        help = f"write a spec with `model: {{config: {file}}}` and `data`; partool init writes one to start from"
        return f"this is the Hugging Face configuration{of}, not a spec", help
    if _ONLY_DEEPSPEED & document.keys():
        renamed = [f"{key} → {field}" for key, field in DEEPSPEED.items() if key in document]
        zero = document.get("zero_optimization")
        if isinstance(zero, dict) and any(key in zero for key in _OFFLOADS):
            renamed.append("offload_optimizer and offload_param → parallel.offload")
        help = f"write a spec (partool init), and put there: {'; '.join(renamed)}"
        return "this is a DeepSpeed configuration, not a spec", help
    return None


def foreign_file(file: Path) -> tuple[str, str] | None:
    """Return :func:`foreign` of a JSON file; None if the file cannot be read."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:  # reading a pipe might never end
            return None
        return foreign(json.loads(file.read_text(encoding="utf-8")), str(file))
    except (OSError, ValueError, RecursionError):
        return None
