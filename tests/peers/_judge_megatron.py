"""Megatron-LM's parser and checks of arguments, and the configurations that its trainer makes of them (0.19.2).

The package is for Python 3.12 and newer. Of what is used here only one decorator is missing in 3.11.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from typing import Any

import torch

if not hasattr(typing, "override"):
    typing.override = lambda function: function  # type: ignore[attr-defined]
# Checks ask for the device's generation: Hopper's.
torch.cuda.get_device_capability = lambda device=None: (9, 0)
torch.cuda.get_device_properties = lambda device=None: type("Hopper", (), {"major": 9, "minor": 0})()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import transformer_config  # noqa: E402
from megatron.training.argument_utils import core_transformer_config_from_args  # noqa: E402
from megatron.training.arguments import parse_args, validate_args  # noqa: E402

# Experts in fp8 need Transformer Engine, which needs a GPU.
transformer_config.is_te_min_version = lambda version, check_equality=True: True


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """Parse and check the arguments of a script for so many ranks; return them, and the configurations' fields."""
    os.environ |= {"WORLD_SIZE": str(case["world"]), "RANK": "0"}
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if case["connections"] is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = case["connections"]
    sys.argv = ["pretrain_gpt.py", *case["arguments"]]
    args = parse_args()
    validate_args(args)
    args.apply_rope_fusion = False  # needs Transformer Engine, which needs a GPU
    made = [core_transformer_config_from_args(args)]
    for kind in (OptimizerConfig, DistributedDataParallelConfig):
        named = {
            field.name: getattr(args, field.name) for field in dataclasses.fields(kind) if hasattr(args, field.name)
        }
        made.append(kind(**named))
    names = ("model", "optimizer", "data_parallel")
    found = {name: _plain(vars(config)) for name, config in zip(names, made, strict=True)}
    return found | {"class": type(made[0]).__name__, "arguments": _plain(vars(args)), "rates": _rates(args)}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (str, int, float, list, type(None)))}


def _rates(args: Any) -> list[float]:
    """Return the learning rate of each step, with steps for samples."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.lr)
    schedule = OptimizerParamScheduler(
        optimizer, args.lr_warmup_init, args.lr, args.min_lr, args.lr_warmup_iters,
        args.lr_decay_iters or args.train_iters, args.lr_decay_style, args.weight_decay, args.weight_decay,
        args.train_iters, "constant", wsd_decay_steps=args.lr_wsd_decay_iters,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )  # fmt: skip
    found = []
    for _ in range(args.train_iters):
        found.append(float(optimizer.param_groups[0]["lr"]))
        schedule.step(1)
    return found
