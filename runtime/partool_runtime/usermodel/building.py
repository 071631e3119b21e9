"""Imports the user's class of a model and builds it, if the user allowed the file that defines it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from partool.plan.types import ModuleModel
from partool.spec.model_code import module_file, module_hash
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.building import check_buffers, meta_parameters

_ONE_MODULE = (
    "Put a module of its own into the list for each layer, and let layers share parameters instead: "
    "layers[1].up.weight = layers[0].up.weight."
)
_HELP = "Name it as package.module:Class; the package is installed, or lies in the folder of the spec."


def build_module(model: ModuleModel) -> nn.Module:
    """Return the module with parameters on the meta device.

    Raises ConfigurationError PT655 if it cannot be imported or built, PT591 if its file is not the one that was
    allowed, PT649 if it keeps state in buffers.
    """
    kind = _class(model)
    with meta_parameters():
        own = _built(kind, model)
    check_buffers(own)
    return own


def built_weights(model: ModuleModel, seed: int) -> dict[str, torch.Tensor]:
    """Return the first values of all parameters, in float32: those that the class itself draws from ``seed``.

    The whole model is built in the memory of this process. The state of torch's generators stays as it is.
    """
    kind = _class(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        own = _built(kind, model)
    return {name: parameter.detach().float() for name, parameter in own.named_parameters()}


def blocks_of(own: nn.Module) -> str:
    """Return the name of the list of layers: the list of modules with most parameters; raises PT655."""
    lists = {name: module for name, module in own.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    if not lists:
        message = f"{type(own).__name__} has no nn.ModuleList of layers, which are sharded and recomputed one by one"
        raise ConfigurationError("PT655", message, "Put its layers into an nn.ModuleList.")
    name = str(max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters())))
    first: dict[int, int] = {}
    for number, layer in enumerate(lists[name]):
        if (before := first.setdefault(id(layer), number)) != number:
            message = f"{type(own).__name__}: {name}.{before} and {name}.{number} are one module"
            raise ConfigurationError("PT655", message, _ONE_MODULE)
    return name


def _class(model: ModuleModel) -> type[nn.Module]:
    name, _, kind = model.module.partition(":")
    if model.folder not in sys.path:
        sys.path.insert(0, model.folder)
    try:
        if module_hash(module_file(name, model.folder)) != model.code_hash:
            message = f"the file of {name} is not the one that was allowed when the plan was made"
            raise ConfigurationError("PT591", message, "Look at what changed, and plan again with --trust-remote-code.")
        found = getattr(import_module(name), kind)
    except ConfigurationError:
        raise
    except Exception as error:  # the user's code may raise anything
        message = f"model.module: {model.module} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigurationError("PT655", message, _HELP) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigurationError("PT655", f"model.module: {model.module} is no class of torch.nn.Module", _HELP)
    return found


def _built(kind: type[nn.Module], model: ModuleModel) -> nn.Module:
    try:
        return cast(nn.Module, cast(Any, kind)(**model.config))
    except Exception as error:  # the user's code may raise anything
        message = f"model.module: {model.module} cannot be built: {type(error).__name__}: {error}"
        raise ConfigurationError("PT655", message, "model.config holds the keywords of its constructor.") from error
