"""accelerate's launcher, its plugins, and ``TrainingArguments`` of transformers (1.15.0 and 5.24.0)."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import HfArgumentParser, TrainingArguments

SIMPLE = (str, int, float, bool, type(None))


def launched(options: list[str]) -> tuple[Any, dict[str, str]]:
    """Return what ``accelerate launch`` understands, and the environment that it gives to ranks."""
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args([*options, "mine.py"]))
    return args, prepare_multi_gpu_env(args)


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """Read a command line as ``accelerate launch`` and a script do; return what each makes of it."""
    options, arguments = case["options"], case["arguments"]
    args, environment = launched(options)
    before = dict(os.environ)
    os.environ |= {name: value for name, value in environment.items() if name.startswith(("FSDP_", "PARALLELISM_"))}
    try:
        plugin = FullyShardedDataParallelPlugin() if args.use_fsdp else None
        sharding = _simple(plugin) | {"offloads": type(plugin.cpu_offload).__name__} if plugin else {}
        mesh = ParallelismConfig() if args.use_parallelism_config else None
        sizes = (
            {name: getattr(mesh, f"{name}_size") for name in ("dp_replicate", "dp_shard", "tp", "cp")} if mesh else {}
        )
        handler = getattr(mesh, "cp_handler", None)
    finally:
        os.environ.clear()
        os.environ |= before
    trained, rest = HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses(
        ["--output_dir", "out", "--use_cpu", "true", *arguments], return_remaining_strings=True
    )
    return {
        "launch": {name: value for name, value in vars(args).items() if isinstance(value, SIMPLE)},
        "sharding": sharding,
        "mesh": sizes,
        "rotation": getattr(handler, "cp_comm_strategy", None),
        "training": _simple(trained) | {"optim": str(getattr(trained.optim, "value", trained.optim))},
        "rest": rest,
        "rates": _rates(trained),
    }


def _simple(instance: Any) -> dict[str, Any]:
    values = {field.name: getattr(instance, field.name, None) for field in dataclasses.fields(instance)}
    return {name: value for name, value in values.items() if isinstance(value, SIMPLE)}


def _rates(args: TrainingArguments) -> list[float]:
    """Return the learning rate of each step, which Trainer moves after a step."""
    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    own = args.lr_scheduler_kwargs or {}
    steps = args.max_steps
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(steps), steps, own)
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return found
