"""DeepSpeed's configuration class, and its optimizers' and schedulers' signatures (0.19.8)."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from deepspeed import comm
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DeepSpeedConfig

OPTIMIZERS: dict[str, tuple[type, ...]] = {
    "AdamW": (FusedAdam, DeepSpeedCPUAdam, torch.optim.AdamW),
    "Lion": (FusedLion, DeepSpeedCPULion),
    "SGD": (torch.optim.SGD,),
    "Adagrad": (torch.optim.Adagrad, DeepSpeedCPUAdagrad),
}


class Noted(dict[str, Any]):
    """A dictionary that notes the keys that are looked up, as the class ignores keys that it does not know."""

    seen: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """Construct a configuration for so many ranks; return its fields."""
    comm.get_rank = lambda group=None: 0
    comm.get_world_size = lambda group=None: case["world"]
    Noted.seen.clear()
    config = case["config"]
    made = DeepSpeedConfig(Noted(config))
    # deepspeed.initialize reads this key before the class does.
    unknown = [f"{key}" for key in config.keys() - Noted.seen]
    unknown += _unknown("optimizer", config["optimizer"], {"type", "params"})
    for kind in OPTIMIZERS[config["optimizer"]["type"]]:
        unknown += _unknown(kind.__name__, config["optimizer"]["params"], set(inspect.signature(kind).parameters))
    zero = made.zero_config
    offload, parameters = zero.offload_optimizer, zero.offload_param
    return {
        "unknown": unknown,
        "batch": made.train_batch_size,
        "micro": made.train_micro_batch_size_per_gpu,
        "accumulation": made.gradient_accumulation_steps,
        "data_ranks": made.world_size,
        "stage": int(zero.stage),
        "bf16": made.bfloat16_config.enabled,
        "fp16": made.float16_config.enabled,
        "optimizer_device": offload.device if offload else "none",
        "optimizer_ratio": offload.ratio if offload else None,
        "optimizer_folder": str(offload.nvme_path) if offload and offload.nvme_path else None,
        "parameter_device": parameters.device if parameters else "none",
        "parameter_folder": str(parameters.nvme_path) if parameters and parameters.nvme_path else None,
        "tensor": made.tensor_parallel_config.autotp_size,
        "clip": made.gradient_clipping,
        "optimizer": made.optimizer_name,
        "rates": _rates(config, case["steps"]),
    }


def _unknown(where: str, given: dict[str, Any], known: set[str]) -> list[str]:
    return [f"{where}.{key}" for key in given.keys() - known]


def _rates(config: dict[str, Any], steps: int) -> list[float]:
    """Return the learning rate of each step, as the engine makes them: it moves the schedule after a step."""
    lr = config["optimizer"]["params"]["lr"]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = None
    if "scheduler" in config:
        scheduler = getattr(lr_schedules, config["scheduler"]["type"])(optimizer, **config["scheduler"]["params"])
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        if scheduler is not None:
            scheduler.step()
    return found
