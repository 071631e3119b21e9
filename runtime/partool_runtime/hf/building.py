"""Models of transformers without memory: parameters on the meta device, buffers with their values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from partool_runtime.errors import ConfigurationError

_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_NAMED = 3
"""Buffers that a message names."""


def build_causal(path: Path) -> nn.Module:
    """Return the causal language model of a folder's ``config.json``, its parameters on the meta device.

    Raises ConfigurationError PT643 where transformers is not installed or cannot build it.
    """
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        fix = "pip install transformers, or write model.config: partool's own decoder"
        raise ConfigurationError("PT643", f"transformers cannot be imported: {error}", fix) from error
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
        with meta_parameters():
            causal = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever a model's own code raises
        first = re.split(r"\n\s*\n", str(error).strip())[0]
        message = f"transformers cannot build the model of {path}: {type(error).__name__}: {first}"
        raise ConfigurationError("PT643", message, "Check that the folder's config.json is complete.") from error
    finally:
        logging.set_verbosity(before)
    return cast(nn.Module, causal)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Let modules built meanwhile keep their parameters on the meta device, and buffers where they are made.

    ``torch.device("meta")`` would lose the values of buffers, such as the frequencies of rotary embeddings. Memory that
    a module asks for is given back untouched: it fills parameters after it registers them.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            module._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    setattr(nn.Module, "register_parameter", on_meta)  # noqa: B010 - mypy forbids assigning a method
    try:
        yield
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def check_sizes(causal: nn.Module) -> None:
    """Raise ConfigurationError PT644 where the configuration lacks a size that every decoder with attention has."""
    config = cast(Any, causal).config
    missing = [name for name in _SIZES if not isinstance(getattr(config, name, None), int)]
    if not missing:
        return
    if getattr(config, "text_config", None) is not None:
        raise _not_cut(causal, "its language model is one part of it, described in text_config")
    raise _not_cut(causal, f"its {type(config).__name__} has no {', '.join(missing)}: its layers are not of attention")


def base_name(causal: nn.Module) -> str:
    """Return the name of the child that maps tokens to hidden states; raises ConfigurationError PT644."""
    name = getattr(causal, "base_model_prefix", "")
    if not name or not isinstance(getattr(causal, name, None), nn.Module):
        raise _not_cut(causal, "no model without its head inside")
    return str(name)


def head_name(causal: nn.Module) -> str:
    """Return the name of the output matrix, a linear layer; raises ConfigurationError PT644."""
    head = cast(Any, causal).get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise _not_cut(causal, f"its output layer is {type(head).__name__}, not a linear layer")
    return _name_of(head, causal)


def blocks_name(base: nn.Module, layers: int) -> str:
    """Return the name of the list of layers, a child of ``base``; raises ConfigurationError PT644."""
    lists = [n for n, m in base.named_children() if isinstance(m, nn.ModuleList) and len(m) == layers]
    if len(lists) != 1:
        found = f"{len(lists)} lists" if lists else "no list"
        raise _not_cut(base, f"{found} of {layers} layers")
    return lists[0]


def check_buffers(causal: nn.Module) -> None:
    """Raise ConfigurationError PT649 where the model's state is more than its parameters.

    Checkpoints, exports and loading know parameters; a buffer that belongs to the state, such as the balance that
    DeepSeek-V3 learns for its routers (arXiv 2412.19437, section 2.1.2), would be lost without a word.
    """
    parameters = {name for name, _ in causal.named_parameters(remove_duplicate=False)}
    buffers = [name for name in causal.state_dict() if name not in parameters]
    if buffers:
        more = f" and {len(buffers) - _NAMED} more" if len(buffers) > _NAMED else ""
        message = f"{type(causal).__name__} keeps state in buffers: {', '.join(buffers[:_NAMED])}{more}"
        fix = "They would be neither loaded nor saved nor exported; choose a model whose state is all parameters."
        raise ConfigurationError("PT649", message, fix)


def _name_of(wanted: nn.Module, causal: nn.Module) -> str:
    names: list[str] = [name for name, module in causal.named_modules() if module is wanted]
    return names[0]


def _not_cut(module: nn.Module, why: str) -> ConfigurationError:
    fix = "Only language models of embedding, one list of layers, final norm and output matrix can be trained so."
    return ConfigurationError("PT644", f"{type(module).__name__}: {why}", fix)
