"""Reads how the optimizer is set: rates, decays and schedules. None of it changes a price; a rendered run needs it.

Only what a file says is carried, so that a spec shows what was said. Values that a system works out at its start
(``auto``) and words without a counterpart stay without effect.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, cast

from partool.engines.sections import OptimizerDict, ScheduleDict
from partool.engines.settings import Sheet, real_of, shown
from partool.spec.training import TrainingSpec

_SCHEDULE = "optimizer.schedule."
_LENGTHS = (_SCHEDULE + "warmup_steps", _SCHEDULE + "decay_steps")
"""Fields that systems also give as samples, or as a share of the run."""
_OPEN = ("auto", "none", "null", "")
"""Words for a value that the system finds out by itself."""


def of_megatron(sheet: Sheet, steps: int | None, batch: int | None) -> OptimizerDict:
    """Return the fields of ``optimizer`` that Megatron-LM's arguments say; ``batch`` turns samples into steps."""
    fields = _rates(sheet, lr="lr", betas=("adam-beta1", "adam-beta2"), eps="adam-eps", clip="clip-grad")
    fields |= _numbers(sheet, {"momentum": "sgd-momentum", "weight_decay": "weight-decay"})
    kinds = {"cosine": "cosine", "linear": "linear", "constant": "constant", "WSD": "wsd"}
    schedule = _kind(sheet, "lr-decay-style", kinds)
    schedule |= _least(sheet, "min-lr", fields.get("lr"))
    warmup = _number(sheet, "lr-warmup-iters", "warmup_steps")
    samples = _number(sheet, "lr-warmup-samples", "warmup_steps")
    share = _number(sheet, "lr-warmup-fraction", "warmup_steps")
    if samples:
        warmup = samples / batch if batch else _unknown(sheet, "lr-warmup-samples", "samples of a step are")
    if share:
        decay_steps = _number(sheet, "lr-decay-iters", "warmup_steps") or steps
        warmup = share * decay_steps if decay_steps else _unknown(sheet, "lr-warmup-fraction", "number of steps is")
    decay = _number(sheet, "lr-wsd-decay-iters", "decay_steps")
    return _with(fields, schedule, warmup, decay if schedule.get("kind") == "wsd" else None)


def of_deepspeed(sheet: Sheet) -> OptimizerDict:
    """Return the fields of ``optimizer`` that a configuration of DeepSpeed says."""
    before = "optimizer.params."
    fields = _rates(sheet, lr=before + "lr", betas=(), eps=before + "eps", clip="gradient_clipping")
    fields |= _numbers(sheet, {"momentum": before + "momentum", "weight_decay": before + "weight_decay"})
    betas = sheet.settings.get(before + "betas")
    if betas is not None and not _is_open(betas.value):
        numbers = [real_of(value) for value in betas.value] if isinstance(betas.value, list) else []
        given = [value for value in numbers if value is not None]
        sheet.get(betas.name, to="optimizer.betas")
        if len(given) == len(numbers) == 2:
            fields["betas"] = given
        else:
            message = f"{betas.name} is {shown(betas.value)}, and two numbers are expected"
            sheet.say("PT820", "error", message, "[0.9, 0.999]", betas.name)
    kinds = {"WarmupCosineLR": "cosine", "WarmupDecayLR": "linear", "WarmupLR": "constant"}
    schedule = _kind(sheet, "scheduler.type", kinds)
    ratio = _number(sheet, "scheduler.params.cos_min_ratio", "min_ratio") if schedule.get("kind") == "cosine" else None
    if ratio is not None and 0 <= ratio <= 1:
        schedule["min_ratio"] = ratio
    elif schedule.get("kind") == "linear":
        schedule["min_ratio"] = 0.0
    return _with(fields, schedule, _number(sheet, "scheduler.params.warmup_num_steps", "warmup_steps"))


def of_torchtitan(sheet: Sheet, steps: int | None) -> OptimizerDict:
    """Return the fields of ``optimizer`` that torchtitan's settings say."""
    names = ("optimizer.beta1", "optimizer.beta2")
    fields = _rates(sheet, lr="optimizer.lr", betas=names, eps="optimizer.eps", clip="training.max_norm")
    fields |= _numbers(sheet, {"weight_decay": "optimizer.weight_decay"})
    schedule = _kind(sheet, "lr_scheduler.decay_type", {"linear": "linear", "cosine": "cosine"})
    share = _number(sheet, "lr_scheduler.decay_ratio", "decay_steps")
    decay = None
    if share is not None and share < 1:
        schedule["kind"] = "wsd" if share else "constant"
        decay = share * (steps or 0)
    if (ratio := _number(sheet, "lr_scheduler.min_lr_factor", "min_ratio")) is not None and 0 <= ratio <= 1:
        schedule["min_ratio"] = ratio
    warmup = _number(sheet, "lr_scheduler.warmup_steps", "warmup_steps")
    return _with(fields, schedule, warmup, decay)


def of_trainer(sheet: Sheet, steps: int | None) -> OptimizerDict:
    """Return the fields of ``optimizer`` that ``TrainingArguments`` say."""
    names = ("adam_beta1", "adam_beta2")
    fields = _rates(sheet, lr="learning_rate", betas=names, eps="adam_epsilon", clip="max_grad_norm")
    fields |= _numbers(sheet, {"weight_decay": "weight_decay"})
    kinds = {
        "linear": "linear", "polynomial": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine",
        "constant": "constant", "constant_with_warmup": "constant",
    }  # fmt: skip
    schedule = _kind(sheet, "lr_scheduler_type", kinds)
    if schedule.get("kind") in ("linear", "cosine"):
        schedule["min_ratio"] = _least_of_trainer(sheet, fields.get("lr"))
    warmup = _number(sheet, "warmup_steps", "warmup_steps")
    share = _number(sheet, "warmup_ratio", "warmup_steps")
    if not warmup and share:
        warmup = share * steps if steps else _unknown(sheet, "warmup_ratio", "number of steps is")
    return _with(fields, schedule, warmup)


def _unknown(sheet: Sheet, name: str, what: str) -> float | None:
    """Say that a length of the warm-up cannot be told in steps."""
    message = f"{name} is of a run whose {what} not known: the spec has no warm-up for it"
    sheet.say("PT824", "note", message, "--set optimizer.schedule.warmup_steps=NUMBER", name)
    return None


def _least_of_trainer(sheet: Sheet, lr: float | None) -> float:
    """Return the last rate as a share of the highest: Trainer's schedules end at 0 unless their arguments say more."""
    given = sheet.settings.get("lr_scheduler_kwargs")
    try:
        values = json.loads(str(given.value)) if given is not None else {}
    except (ValueError, RecursionError):
        values = {}
    if not isinstance(values, dict):
        return 0.0
    sheet.get("lr_scheduler_kwargs", to=_SCHEDULE + "min_ratio")
    rate, last = real_of(values.get("min_lr_rate")), real_of(values.get("min_lr", values.get("lr_end")))
    ratio = rate if rate is not None else last / lr if last is not None and lr else 0.0
    return ratio if 0 <= ratio <= 1 else 0.0


def _rates(sheet: Sheet, *, lr: str, betas: tuple[str, ...], eps: str, clip: str) -> OptimizerDict:
    fields = _numbers(sheet, {"lr": lr, "eps": eps, "clip": clip})
    both = [carried(sheet, name, "optimizer.betas") for name in betas]
    if any(value is not None for value in both):
        # The systems' own values of the one that is left out.
        fields["betas"] = [
            default if value is None else value for value, default in zip(both, (0.9, 0.999), strict=True)
        ]
    positive: tuple[tuple[Literal["lr", "eps"], str], ...] = (("lr", lr), ("eps", eps))
    for field, name in positive:
        if fields.get(field) == 0:
            del fields[field]
            message = f"{name} is 0, which a spec has no place for: its own {field} stands there"
            sheet.say("PT824", "note", message, f"--set optimizer.{field}=NUMBER", name)
    return fields


def _numbers(sheet: Sheet, names: Mapping[str, str]) -> OptimizerDict:
    """Return the values of some fields of ``optimizer``, by the names of their settings."""
    values = {field: carried(sheet, name, f"optimizer.{field}") for field, name in names.items()}
    return cast(OptimizerDict, {field: value for field, value in values.items() if value is not None})


def _number(sheet: Sheet, name: str, field: str) -> float | None:
    return carried(sheet, name, _SCHEDULE + field)


def carried(sheet: Sheet, name: str, to: str) -> float | None:
    """Return a setting's finite number from 0 on and carry it to a path of the spec.

    It stays without effect where it is ``auto``, none, or left to a variable of the script. Anything else is a finding.
    """
    setting = sheet.settings.get(name)
    if setting is None or isinstance(setting.value, bool) or _is_open(setting.value):
        return None
    value = sheet.number(name, to=to, derived=to in _LENGTHS)
    return None if value is None else float(value)


def _is_open(value: Any) -> bool:
    """Return whether a value is left to the system, or to whoever runs the script."""
    return value is None or (isinstance(value, str) and (value.lower() in _OPEN or any(each in value for each in "$`")))


def _kind(sheet: Sheet, name: str, kinds: Mapping[str, str]) -> ScheduleDict:
    setting = sheet.settings.get(name)
    word = "" if setting is None else str(setting.value)
    if word not in kinds:
        return {}
    sheet.get(name, to=_SCHEDULE + "kind")
    return {"kind": kinds[word]}


def _least(sheet: Sheet, name: str, lr: float | None) -> ScheduleDict:
    least = _number(sheet, name, "min_ratio")
    if least is None or not lr:
        return {}
    if least > lr:
        message = f"{name} {least:g} is above the highest rate, {lr:g}"
        sheet.say("PT821", "error", message, "a rate that is at most the highest", name)
        return {}
    return {"min_ratio": round(least / lr, 9)}


def _with(
    fields: OptimizerDict, schedule: ScheduleDict, warmup: float | None, decay: float | None = None
) -> OptimizerDict:
    """Return the fields with the section ``schedule``; steps are rounded."""
    if warmup is not None and warmup >= 0:
        schedule["warmup_steps"] = round(warmup)
    if decay:
        schedule["decay_steps"] = max(1, round(decay))
    if schedule:
        fields["schedule"] = schedule
    return fields


def shortened(sheet: Sheet, spec: dict[str, object]) -> None:
    """Leave a schedule's lengths out of a spec whose steps they exceed: runs that only measure are that short."""
    training, optimizer = spec.get("training"), spec.get("optimizer")
    if not isinstance(training, dict) or not isinstance(optimizer, dict):
        return  # --set put something else there, about which the spec's own checks say more
    steps, schedule = training.get("steps", TrainingSpec().steps), optimizer.get("schedule")
    if not isinstance(schedule, dict):
        return
    names = ("warmup_steps", "decay_steps")
    lengths = {name: schedule[name] for name in names if isinstance(schedule.get(name), int)}
    if isinstance(steps, int) and sum(lengths.values()) > steps:
        for name in lengths:
            del schedule[name]
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        message = f"the schedule is longer than the {steps} steps of the spec, and is left out: {listed}"
        places = [name for name, path in sheet.carried.items() if path.startswith(_SCHEDULE)]
        sheet.say("PT824", "note", message, "--set training.steps=NUMBER, and the lengths again", *places)
    if schedule.get("kind") == "wsd" and "decay_steps" not in schedule and lengths:
        schedule["kind"] = "constant"
    if not schedule:
        del optimizer["schedule"]
