"""DeepSpeed below accelerate: its configuration is filled from ``TrainingArguments`` and read by DeepSpeed's reader.

What is filled in follows ``transformers/integrations/deepspeed.py`` of 4.57
(https://github.com/huggingface/transformers): values that are ``auto``, and values that are not there.
"""

from __future__ import annotations

from typing import Any

from partool.diagnostics.record import Diagnostic
from partool.engines import deepspeed
from partool.engines.accelerate_files import OF
from partool.engines.sections import SpecDict
from partool.engines.settings import Setting, Sheet

_PLUGIN = {
    "zero_stage": "zero_optimization.stage",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
}
"""Keys of accelerate's ``deepspeed_config`` → DeepSpeed's own."""
_FILLED = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size", 8),
    "gradient_accumulation_steps": ("gradient_accumulation_steps", 1),
}


def spec_of(sheet: Sheet, inner: Sheet, world: int | None, trainer_spec: SpecDict) -> SpecDict:
    """Return the sections that DeepSpeed decides; ``trainer_spec`` has what the other settings say."""
    settings = dict(inner.settings)
    for name, target in _PLUGIN.items():
        key = f"{OF}deepspeed_config.{name}"
        if (value := sheet.get(key, to=f"DeepSpeed's {target}")) is not None and _open(settings.get(target)):
            settings[target] = _with(sheet.settings[key], value)
    if "zero_optimization.stage" not in settings and not inner.settings:
        settings["zero_optimization.stage"] = Setting("zero_stage", 2, "", 1)
    _fill(sheet, inner, settings)
    kinds = {"bf16": "bf16.enabled", "fp16": "fp16.enabled"}
    chosen = trainer_spec["training"]["precision"]
    for kind, key in kinds.items():
        if key in settings and settings[key].value == "auto":
            settings[key] = _with(settings[key], kind == chosen)
    if not any(key in settings for key in (*kinds.values(), "bfloat16.enabled")) and chosen in kinds:
        settings[kinds[chosen]] = Setting("mixed_precision", True, "", 1)
    if settings.get("optimizer.type") is None:
        settings["optimizer.type"] = Setting("optim", trainer_spec["optimizer"]["name"], "", 1)
    merged = Sheet(settings)
    spec = deepspeed.spec_of(merged, world)
    inner.carried |= {name: path for name, path in merged.carried.items() if name in inner.settings}
    inner.findings += [each for each in merged.findings if not _answered(each)]
    return _joined(sheet, spec, trainer_spec, chosen)


def _open(setting: Setting | None) -> bool:
    return setting is None or setting.value == "auto"


def _with(setting: Setting, value: Any) -> Setting:
    return Setting(setting.name, value, setting.file, setting.line)


def of_launcher(sheet: Sheet) -> int | None:
    """Return the steps of accumulation in accelerate's own configuration, if it has them."""
    name = f"{OF}deepspeed_config.gradient_accumulation_steps"
    if (given := sheet.settings.get(name)) is not None and given.value == "auto":
        sheet.get(name, to="training.global_batch")
        return None
    number: int | None = sheet.integer(name, to="training.global_batch")
    return number


def _fill(sheet: Sheet, inner: Sheet, settings: dict[str, Setting]) -> None:
    """Fill in the three sizes of a batch; a finding where DeepSpeed's configuration has another one."""
    given = any(not name.startswith((OF, "launch.")) for name in sheet.settings)
    for key, (name, default) in _FILLED.items():
        value = sheet.integer(name, default if given else 0, to=f"DeepSpeed's {key}") or None
        if value is None and key == "gradient_accumulation_steps":
            value = of_launcher(sheet)
        setting = settings.get(key)
        if _open(setting):
            if value is not None:
                settings[key] = Setting(name, value, "", 1) if setting is None else _with(setting, value)
        elif setting is not None and given and value is not None and str(setting.value) != str(value):
            inner.say(
                "PT821", "error", f"{key} is {setting.value}, and {name} is {value}"
                + " by default" * (name not in sheet.settings), f"{key}: auto, or the same number", key,
            )  # fmt: skip
    batch = settings.get("train_batch_size")
    if batch is not None and batch.value == "auto":
        settings["train_batch_size"] = _with(batch, None)


def _answered(finding: Diagnostic) -> bool:
    """Return whether a finding of DeepSpeed's reader asks for what other settings say."""
    recomputed = finding.code == "PT824" and "recomputed" in finding.message
    return recomputed or (finding.code == "PT822" and finding.path in (
        ("training", "sequence_length"), ("parallel", "micro_batch"), ("training", "global_batch"),
    ))  # fmt: skip


def _joined(sheet: Sheet, spec: SpecDict, trainer_spec: SpecDict, chosen: str) -> SpecDict:
    parallel = spec["parallel"]
    if parallel["recompute"] != "full":
        parallel["recompute"] = trainer_spec["parallel"]["recompute"]
    if trainer_spec["parallel"]["compile"] == "block":
        sheet.say(
            "PT824", "note", "torch_compile with DeepSpeed is not priced: the constants are of eager runs",
            "no change is needed", "torch_compile", "torch_compile_backend", OF + "dynamo_config.dynamo_backend",
        )  # fmt: skip
    training = trainer_spec["training"] | spec["training"]
    if chosen == "fp8":
        training["precision"] = "fp8"
    return {"engine": "deepspeed", "training": training, "parallel": parallel, "optimizer": spec["optimizer"]}
