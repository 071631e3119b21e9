"""Recognises runs that do not train all weights, or train them for another task: an import prices neither."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from partool.diagnostics.record import Diagnostic, Span
from partool.engines.settings import Setting, is_off, shown

_PARTS = re.compile(
    r"(^|[._-])(q|rs|ada|x)?(lora|loraplus|dora|peft|adapters?|pissa|vera|loha|lokr|ia3|oft|hra|bitfit|relora|"
    r"(prefix|prompt)[_-]?tuning|p[_-]?tuning(_v2)?|soft[_-]prompts?|num_virtual_tokens|pre_seq_len)([._-]|$)",
    re.I,
)
"""Names of settings that add adapters (https://huggingface.co/docs/peft has the methods)."""
_SWITCHES = re.compile(
    r"(^|\.)(use_)?(peft|q?lora|peft_lora|adapters?)(_enabled?)?$|^(finetuning|train|tuner|tuning)_type$|^lora_enable$",
    re.I,
)
"""Settings that switch adapters on or off as a whole; where one of them says no, the others have no effect."""
_FULL = ("full", "none", "")
_KINDS = ("finetuning_type", "train_type", "tuner_type", "tuning_type")
"""Settings that name how a run fine-tunes, as full or lora."""
_BITS = re.compile(
    r"^(load|use)_(in_)?[48]_?bit(_q\w*ization)?$|^(bits|quantization_bit|quant_bits|bnb_4bit|use_bnb)$|"
    r"^quantization_config\.load_in_[48]bit$"
)
"""Settings that load weights in few bits; the second word is spelt in several ways in examples of PEFT."""
_FROZEN = re.compile(
    r"(^|[._-])(freeze|frozen|unfreeze)([._-]|$)|^num_layer_trainable$|^trainable_(layers|params|parameters|modules)$|"
    r"^tune_(mm_mlp_adapter|mm_llm|mm_mlp|mm_vision)$",
    re.I,
)
_STAGES = {
    "dpo": "compares answers", "kto": "compares answers", "orpo": "compares answers", "rm": "trains a reward model",
    "ppo": "alternates training and generation", "grpo": "alternates training and generation",
    "reward": "trains a reward model", "reward_modeling": "trains a reward model", "cpo": "compares answers",
    "simpo": "compares answers", "rloo": "alternates training and generation", "gkd": "trains with another model's "
    "predictions", "distill": "trains with another model's predictions", "online_dpo": "compares answers",
    "bco": "compares answers", "prm": "trains a reward model", "rlhf": "alternates training and generation",
}  # fmt: skip
"""Tasks by the words for them in scripts of TRL and LLaMA-Factory → what they do besides training on tokens."""
_PROGRAM = re.compile(rf"(?:^|[/_-])({'|'.join(sorted(_STAGES, key=len, reverse=True))})(?:_trainer|_training)?\.py$")
_OF_FREEZING = "freeze_trainable_"
"""Beginning of LLaMA-Factory's settings that only count with ``finetuning_type: freeze``."""
_NO_ADAPTERS = "an import prices the training of all weights"


def named(settings: Mapping[str, Setting], *, ignored: Collection[str] = ()) -> list[str]:
    """Return the settings that say which weights are trained, but for names in ``ignored``."""
    patterns = (_PARTS, _BITS, _FROZEN)
    return [
        name
        for name in settings
        if name not in ignored and (name in _KINDS or any(pattern.search(name) for pattern in patterns))
    ]


def findings(settings: Mapping[str, Setting], *, ignored: Collection[str] = ()) -> list[Diagnostic]:
    """Return an error for each setting with which a part of the weights is trained, but for names in ``ignored``."""
    off = any(_SWITCHES.search(name) and _says_no(name, one.value) for name, one in settings.items())
    return [
        Diagnostic("PT823", judged[0], help=judged[1], span=settings[name].span)
        for name in named(settings, ignored=ignored)
        if (judged := _judged(name, settings[name].value, off=off)) is not None
    ]


def _judged(name: str, value: Any, *, off: bool) -> tuple[str, str] | None:
    """Return message and help; None for a setting that changes nothing. ``off``: adapters are switched off."""
    if name in _KINDS:
        if str(value).lower() in _FULL:
            return None
        return f"{name} is {shown(value)}: {_NO_ADAPTERS}", f"{name}: full prices the run with all weights"
    if is_empty(value) or (off and name.startswith(_OF_FREEZING)):
        return None
    if _BITS.search(name):
        message = f"{name}: weights in few bits come with adapters, and {_NO_ADAPTERS}"
        return None if str(value) in ("16", "32") else (message, f"remove {name} to price full fine-tuning")
    if _FROZEN.search(name):
        fix = f"remove {name}; model.frozen of a spec names parameters that are not trained"
        return f"{name} keeps a part of the weights as it is, which is not imported", fix
    if off and not _SWITCHES.search(name):
        return None
    fix = f"remove {name} and its kin to price full fine-tuning, and write adapter: in the spec that it gives"
    return f"{name} asks for adapters, and {_NO_ADAPTERS}", fix


def task(word: str, span: Span | None) -> Diagnostic | None:
    """Return an error if a stage, or the name of a program, is of another task than the next token's prediction."""
    named = _PROGRAM.search(word.lower())
    does = _STAGES.get(named[1] if named else word.lower())
    if does is None:
        return None
    message = f"{word} {does}: a step of it is more than the forward and backward pass that is priced"
    return Diagnostic("PT823", message, help="give a run that trains on its tokens (pt, sft)", span=span)


def is_empty(value: Any) -> bool:
    """Return whether a value asks for nothing."""
    return value is None or value in ({}, [], ()) or is_off(value) or str(value).lower() == "null"


def _says_no(name: str, value: Any) -> bool:
    return str(value).lower() == "full" if name in _KINDS else is_off(value)
