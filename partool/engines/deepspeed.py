"""Reads a DeepSpeed configuration into the layout of a spec.

Meanings and defaults are those of ``deepspeed/runtime/config.py`` and ``zero/config.py`` of DeepSpeed 0.19.8, and of
0.14 where they differ (https://www.deepspeed.ai/docs/config-json/). The file says
nothing of the model, the length of sequences or the machines: they are arguments of ``partool import``.
"""

from __future__ import annotations

from pathlib import Path

from partool.diagnostics.record import Diagnostic
from partool.engines.deepspeed_keys import no_effect, unpriced
from partool.engines.documents import document, leaves
from partool.engines.recipes import of_deepspeed
from partool.engines.sections import OffloadDict, ParallelDict, SpecDict, TrainingDict, tensor_section
from partool.engines.settings import Setting, Sheet, shown

_SECTIONS = frozenset(
    (
        "zero_optimization", "zero_optimization.offload_optimizer", "zero_optimization.offload_param", "bf16",
        "bfloat16", "fp16", "optimizer", "data_types", "activation_checkpointing",
    )
)  # fmt: skip
"""Sections whose keys are known one by one."""


def settings(path: Path, text: str) -> tuple[dict[str, Setting], list[Diagnostic]]:
    """Return the keys of a configuration, joined by dots, with their lines; findings for a file that is no such."""
    root, findings = document(path, text, "configuration of DeepSpeed, which is an object of JSON")
    return {name: Setting(name, value, str(path), line) for name, value, line in leaves(root)}, findings


def _skip_empty(sheet: Sheet) -> None:
    """Count sections of DeepSpeed that are empty as known; others may be misspelt."""
    for name, setting in sheet.settings.items():
        inside = {f"{name}.": setting}
        if setting.value == {} and (name in _SECTIONS or no_effect(inside) or unpriced(inside)):
            sheet.get(name, to="nothing: the section is empty")


def spec_of(sheet: Sheet, world: int | None) -> SpecDict:
    """Return the sections ``training``, ``parallel`` and ``optimizer``; ``world`` is the number of ranks."""
    _skip_empty(sheet)
    # DeepSpeed takes 0 of tensor ranks for none.
    tensor = sheet.integer("tensor_parallel.autotp_size", 1, to="parallel.tensor.degree", off=(0,)) or 1
    sequence = sheet.integer("sequence_parallel_size", 1, to="parallel.sequence.degree")
    # Ranks that share a sequence or the matrices have the same batch (DeepSpeedConfig's world_size).
    micro, batch = _batch(sheet, None if world is None else max(1, world // (tensor * sequence)))
    stage = _stage(sheet)
    parallel: ParallelDict = {
        "data": {"zero": stage},
        "tensor": tensor_section(tensor),
        "pipeline": {"stages": 1},
        "tiles": {"mlp": 0, "loss": 0},
        "recompute": "none",
        "compile": "block" if sheet.flag("compile.enabled", to="parallel.compile") else "none",
        "sequence": {"degree": sequence},
        "offload": _offload(sheet, stage),
    }
    if parallel["sequence"]["degree"] > 1:
        parallel["sequence"]["method"] = "ulysses"
    if (size := _persistent(sheet, stage)) is not None:
        parallel["data"]["persistent"] = size
    if (shard := sheet.integer("zero_optimization.zero_hpz_partition_size", 1, to="parallel.data.shard", least=0)) > 1:
        sheet.say(
            "PT823", "error", f"zero_hpz_partition_size is {shard}: a second copy of the parameters in each "
            "node is not priced", "remove it, or --set parallel.data.shard=NUMBER prices hybrid sharding",
            "zero_optimization.zero_hpz_partition_size",
        )  # fmt: skip
    if micro:
        parallel["micro_batch"] = micro
    _recompute(sheet, parallel)
    training: TrainingDict = {"precision": _precision(sheet)}
    sheet.lacks("training.sequence_length", "the file does not say how long sequences are")
    if micro is None:
        sheet.lacks("parallel.micro_batch", "the file does not say the micro-batch", "train_batch_size")
    if batch is None:
        sheet.lacks("training.global_batch", "the file does not say the global batch", "train_batch_size")
    if batch:
        training["global_batch"] = batch
    return {"training": training, "parallel": parallel, "optimizer": {"name": _optimizer(sheet), **of_deepspeed(sheet)}}


def _optimizer(sheet: Sheet) -> str:
    optimizer = str(sheet.get("optimizer.type", "AdamW", to="optimizer.name")).lower()
    names = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "sgd": "sgd", "adagrad": "adagrad"}
    if optimizer not in names:
        sheet.say("PT823", "error", f"the optimizer {optimizer} is not priced here", "AdamW or Lion", "optimizer.type")
    return names.get(optimizer, "adamw")


def _persistent(sheet: Sheet, stage: int) -> int | None:
    """Return up to how many elements parameters stay gathered with ZeRO-3."""
    threshold = None
    for name in ("stage3_param_persistence_threshold", "param_persistence_threshold"):
        key = f"zero_optimization.{name}"
        size = None
        if stage == 3 and key in sheet.settings and sheet.settings[key].value not in ("auto", None):
            size = sheet.integer(key, to="parallel.data.persistent", least=0)
        else:
            sheet.get(key, to="nothing: it is automatic, or without ZeRO-3")
        threshold = size if threshold is None else threshold
    return threshold


def _stage(sheet: Sheet) -> int:
    """Return the stage of ZeRO; the whole section is a truth value in old files."""
    section = sheet.settings.get("zero_optimization")
    old = section is not None and section.value not in ({}, None) and sheet.flag(section.name, to="parallel.data.zero")
    stage: int = sheet.integer("zero_optimization.stage", int(old), to="parallel.data.zero", least=0)
    return stage


def _batch(sheet: Sheet, ranks: int | None) -> tuple[int | None, int | None]:
    """Return the micro-batch and the global batch, which is micro-batch · accumulation · data-parallel ranks."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    to = ("parallel.micro_batch", "training.global_batch", "training.global_batch")
    given: list[int | None] = []
    for name, path in zip(names, to, strict=True):
        if name in sheet.settings and sheet.settings[name].value == "auto":
            sheet.get(name, to=path)
            sheet.lacks(path, f"{name} is auto: the trainer's arguments have it", name)
            given.append(None)
        else:
            given.append(sheet.integer(name, to=path))
    micro, steps, batch = given
    if ranks is None:
        return micro, batch
    if micro and batch and not steps:
        steps = batch // (micro * ranks)
    if batch and not micro and (steps is None or batch % (steps * ranks) == 0):
        steps = steps or 1
        micro = batch // (steps * ranks)
    if micro and not batch:
        batch = micro * (steps or 1) * ranks
    if micro and batch and micro * (steps or 1) * ranks != batch:
        sheet.say(
            "PT821", "error", f"train_batch_size {batch} is not {micro} · {steps or 1} · {ranks} ranks = "
            f"{micro * (steps or 1) * ranks}", "remove one of the three; DeepSpeed works it out", "train_batch_size",
        )  # fmt: skip
    return micro, batch


def _precision(sheet: Sheet) -> str:
    on = dict.fromkeys(("bf16", "bfloat16", "fp16"), False)
    for kind in on:
        name = f"{kind}.enabled"
        if name in sheet.settings and str(sheet.settings[name].value).lower() == "auto":
            sheet.get(name, to="training.precision")
            sheet.lacks("training.precision", f"{name} is auto: the trainer's arguments have it", name)
        else:
            on[kind] = sheet.flag(name, to="training.precision")
    bf16 = on["bf16"] if "bf16.enabled" in sheet.settings else on["bfloat16"]
    if bf16 and on["fp16"]:
        sheet.say("PT821", "error", "both bf16 and fp16 are enabled", "disable one of them", "fp16.enabled")
    return "bf16" if bf16 else "fp16" if on["fp16"] else "fp32"


_PLACES = ("none", "cpu", "nvme")


def _place(sheet: Sheet, section: str, old: str, to: str) -> str:
    """Return where a section of offload puts a part of the state; ``old`` is the name of a flag of older versions."""
    before = sheet.flag(f"zero_optimization.{old}", to=to)
    name = f"zero_optimization.{section}.device"
    given = sheet.get(name, to=to)
    word = ("cpu" if before else "none") if given is None else str(given).lower()
    if word not in _PLACES:
        message = f"{name} is {shown(given)}, and {', '.join(_PLACES[:-1])} or {_PLACES[-1]} is expected"
        sheet.say("PT820", "error", message, "one of these", name)
        return "none"
    return word


def _offload(sheet: Sheet, stage: int) -> OffloadDict:
    offload: OffloadDict = {"optimizer": "none", "parameters": "none", "activations": "none"}
    place = _place(sheet, "offload_optimizer", "cpu_offload", "parallel.offload.optimizer")
    share = float(sheet.number("zero_optimization.offload_optimizer.ratio", 1.0, to="parallel.offload.gpu_fraction"))
    if share < 1 and stage < 3:
        sheet.say(
            "PT821", "error", f"a part of the optimizer stays on the device with ZeRO-3 only, and the stage is {stage}",
            "stage: 3, or remove ratio", "zero_optimization.offload_optimizer.ratio",
        )  # fmt: skip
    if place in ("cpu", "nvme"):
        offload |= {"optimizer": place, "gpu_fraction": round(1.0 - share, 6)}
        if stage == 0 or (stage < 3 and place == "nvme"):
            sheet.say(
                "PT821", "error", f"the optimizer cannot go to {place} with ZeRO-{stage}",
                "stage 1 or higher for cpu, stage 3 for nvme", "zero_optimization.offload_optimizer.device",
            )  # fmt: skip
    where = _place(sheet, "offload_param", "cpu_offload_param", "parallel.offload.parameters")
    if where in ("cpu", "nvme"):
        offload["parameters"] = where
        if stage < 3:
            sheet.say(
                "PT821", "error", f"parameters leave the device with ZeRO-3 only, and the stage is {stage}",
                "stage: 3, or remove offload_param", "zero_optimization.offload_param.device",
            )  # fmt: skip
    for name in ("offload_optimizer", "offload_param"):
        folder = sheet.get(f"zero_optimization.{name}.nvme_path", to="parallel.offload.dir")
        if isinstance(folder, str) and folder:
            offload["dir"] = folder
        elif folder:
            key = f"zero_optimization.{name}.nvme_path"
            sheet.say("PT820", "error", f"{key} is {shown(folder)}, and a path is expected", "a path in quotes", key)
    return offload


def _recompute(sheet: Sheet, parallel: ParallelDict) -> None:
    """Carry the section about recomputation. The model's code decides whether layers are recomputed."""
    sheet.say(
        "PT824", "note", "whether layers are recomputed is decided by the model's code; none is priced",
        "--set parallel.recompute=full, if it calls gradient_checkpointing_enable or the like",
    )  # fmt: skip
    sheet.get("activation_checkpointing.partition_activations", to="nothing: off without tensor ranks")
    if sheet.flag("activation_checkpointing.cpu_checkpointing", to="parallel.offload.activations"):
        parallel["offload"]["activations"], parallel["recompute"] = "cpu", "full"
