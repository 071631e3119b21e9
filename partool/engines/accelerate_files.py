"""Gathers a run of Hugging Face's Trainer: accelerate's configuration, ``TrainingArguments``, DeepSpeed's, a script.

Names: ``accelerate/commands`` of accelerate 0.20 to 1.10 (https://github.com/huggingface/accelerate) and
``transformers/training_args.py`` of 4.30 to 4.57 (https://github.com/huggingface/transformers). Settings of accelerate
and of launchers have a prefix here; those of ``TrainingArguments`` and of training scripts have none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.engines import adapters, slurm
from partool.engines.accelerate_keys import NO_EFFECT
from partool.engines.budget import Budget
from partool.engines.commands import (
    File,
    Gathered,
    default_nodes,
    launcher_without_nodes,
    named_file,
    not_found,
    options,
    script_of,
    span_of,
    training_command,
    unknown_value,
)
from partool.engines.documents import document, leaves
from partool.engines.kinds import engine_of, kind_of
from partool.engines.settings import Setting
from partool.engines.shell import Word

OF = "accelerate."
"""Before names of accelerate's own settings."""
_MARKS = (
    r"accelerate(\.commands\.|\s+)launch|--per_device_train_batch_size|--model_name_or_path|(?>^.*?\w\.py\b).*--deepspeed|"
    r"\btrl\s|llamafactory-cli"
)
_LAUNCHES = re.compile(r"^[^-].*accelerate|^accelerate|torchrun$|^(\S+/)?deepspeed$|torch\.distributed")
"""Words of programs that start ranks; what stands after the training program is not theirs."""
_ENVIRONMENT = frozenset(("distributed_type", "compute_environment", "num_machines", "num_processes"))
_INNER = {
    "fsdp_": "fsdp_config.", "megatron_lm_": "megatron_lm_config.", "parallelism_config_": "parallelism_config.",
    "dynamo_": "dynamo_config.", "fp8_": "fp8_config.",
}  # fmt: skip
"""Beginnings of launch options → sections of accelerate's configuration that have them."""
_OF_DEEPSPEED = frozenset(
    (
        "zero_stage", "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path",
        "offload_param_nvme_path", "gradient_accumulation_steps", "gradient_clipping", "zero3_init_flag",
        "zero3_save_16bit_model", "deepspeed_config_file", "deepspeed_hostfile", "deepspeed_exclusion_filter",
        "deepspeed_inclusion_filter", "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names",
    )
)  # fmt: skip
_OPAQUE = frozenset(
    (
        "dataset_mixer", "dataset_mixture", "lr_scheduler_kwargs", "model_init_kwargs", "gradient_checkpointing_kwargs",
        "dataset_kwargs", "liger_kernel_config", "optim_args", "datasets", "chat_template_kwargs", "tpu_env",
        "chat_template",
    )
)  # fmt: skip
"""Settings whose inner names are the user's own."""
LAUNCHER = {
    "nproc_per_node": "per_node", "nnodes": "nodes", "num_gpus": "per_node", "num_nodes": "nodes",
}  # fmt: skip
"""Options of torchrun and of the deepspeed command → fields of ``hardware``."""


def gather(files: Sequence[File], budget: Budget) -> Gathered:
    """Return the settings of all files, and of the files that they name; commands count over files."""
    gathered, over = Gathered(budget), dict[str, Setting]()
    seen: set[str] = set()
    for path, text in files:
        if kind_of(text) in ("json", "yaml"):
            seen.add(str(path))
            _file(path, text, gathered)
        else:
            over |= _script(path, text, gathered)
    queue = {**over, **gathered.settings}
    while queue:
        before = dict(gathered.settings)
        for name, setting in queue.items():
            _follow(name, setting, files, gathered, seen)
        queue = {name: one for name, one in gathered.settings.items() if name not in before}
    gathered.settings |= over
    return gathered


def _file(path: Path, text: str, gathered: Gathered) -> None:
    """Take in a file of YAML or JSON: DeepSpeed's configuration, accelerate's, or ``TrainingArguments``."""
    root, wrong = document(path, text, "YAML or JSON of a run")
    gathered.findings += wrong
    settings = {name: Setting(name, value, str(path), line) for name, value, line in leaves(root, opaque=_OPAQUE)}
    if engine_of(text) == "deepspeed":
        gathered.deepspeed |= settings
    elif _ENVIRONMENT & settings.keys():
        gathered.settings |= {OF + name: one for name, one in settings.items()}
    else:
        gathered.settings |= settings


def _script(path: Path, text: str, gathered: Gathered) -> dict[str, Setting]:
    """Return the options of a script's command."""
    script, notes = script_of(path, text, gathered.budget)
    gathered.findings += notes
    gathered.machines.scheduler |= slurm.machines(path, text)
    command = training_command(script, marks=_MARKS)
    if not command:
        nothing = f"{path} has no command with TrainingArguments"
        gathered.findings.append(Diagnostic("PT825", nothing, help="name another file"))
        return {}
    start = next((place for place, word in enumerate(command) if _is_program(command, place)), len(command))
    if not any(_LAUNCHES.search(word.text) for word in command[:start]):
        start = 0
    launch = _options(command[:start], gathered)
    for name, target in LAUNCHER.items():
        if name in launch:
            gathered.machines.option(launch[name], target)
    default_nodes(gathered.machines, launcher_without_nodes(command))
    by_accelerate = any("accelerate" in word.text for word in command[:start])
    arguments = _options(command[start:], gathered)
    for word in command[start : start + 2]:
        if word.text.endswith(".py") or command[start].text == "trl":
            gathered.findings += filter(None, [adapters.task(word.text, span_of(word))])
    arguments |= (
        {_launch_name(name): one for name, one in launch.items() if name not in LAUNCHER}
        if by_accelerate
        else {f"launch.{name}": one for name, one in launch.items() if name not in LAUNCHER}
    )
    for word in command[start + 1 : start + 3]:
        if re.search(r"\.(ya?ml|json)$", word.text) and not word.unknown:
            arguments["config"] = Setting("the argument", word.text, word.file, word.line)
            break
    return arguments


def _is_program(command: Sequence[Word], place: int) -> bool:
    text = command[place].text
    before = command[place - 1].text if place else ""
    return text.endswith(".py") or text in ("trl", "llamafactory-cli") or before.lstrip("-") in ("m", "module")


def _launch_name(name: str) -> str:
    if name in _OF_DEEPSPEED:
        return f"{OF}deepspeed_config.{name}"
    inner = next((section for start, section in _INNER.items() if name.startswith(start)), "")
    return f"{OF}{inner}{name}"


def _options(words: Sequence[Word], gathered: Gathered) -> dict[str, Setting]:
    settings = {}
    for name, value, word, after in options(words):
        plain = name.replace("-", "_")
        value_optional = plain in NO_EFFECT or _launch_name(plain) in NO_EFFECT or plain in LAUNCHER or plain in _FILES
        if after.unknown and value is not True and not value_optional:
            gathered.findings.append(unknown_value(name, after))
        else:
            settings[plain] = Setting(name, value, word.file, word.line)
    return settings


_FILES = frozenset(("config", "config_file", "deepspeed", "deepspeed_config", "fsdp_config"))


def _follow(name: str, setting: Setting, files: Sequence[File], gathered: Gathered, seen: set[str]) -> None:
    """Take in the file that a setting names, under those that were given."""
    names = ("config", "config_file", "deepspeed", "fsdp_config", f"{OF}config_file")
    if name not in names and name != f"{OF}deepspeed_config.deepspeed_config_file":
        return
    text = str(setting.value)
    if not re.search(r"\.(ya?ml|json|jsonc)$", text):
        if name != "fsdp_config" and setting.value not in (None, "", "none") and not text.startswith("{"):
            gathered.findings.append(not_found(setting))
        if text.startswith("{"):
            _inline(name, setting, gathered)
        return
    file = named_file(text, setting.file, files, gathered.budget)
    if file is None:
        if not (name == "deepspeed" and gathered.deepspeed):
            gathered.findings.append(not_found(setting))
        return
    if str(file[0]) in seen:
        return
    seen.add(str(file[0]))
    gathered.texts[str(file[0])] = file[1]
    inner = Gathered()
    _file(*file, inner)
    if name == "fsdp_config":
        inner.settings = {f"fsdp_config.{key}": one for key, one in inner.settings.items()}
    gathered.settings = inner.settings | gathered.settings
    gathered.deepspeed = inner.deepspeed | gathered.deepspeed
    gathered.findings += inner.findings


def _inline(name: str, setting: Setting, gathered: Gathered) -> None:
    """Take in JSON that stands in a command's argument."""
    inner = Gathered()
    _file(Path(setting.file), str(setting.value), inner)
    leaves = {key: Setting(f"{name}.{key}", one.value, setting.file, setting.line) for key, one in
              {**inner.settings, **inner.deepspeed}.items()}  # fmt: skip
    if name == "deepspeed":
        gathered.deepspeed = leaves | gathered.deepspeed
    else:
        gathered.settings = {
            f"fsdp_config.{key.removeprefix(OF)}": one for key, one in leaves.items()
        } | gathered.settings
