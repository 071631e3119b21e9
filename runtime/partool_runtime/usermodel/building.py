"""Imports the user's class of a model and builds it, from files that the user allowed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, cast

import torch
from torch import nn

from partool.plan.types import ModuleModel
from partool.spec.model_code import changed_files
from partool_runtime.errors import ConfigurationError
from partool_runtime.hf.building import check_buffers, meta_parameters
from partool_runtime.usermodel.code import UserCode, installed

_ONE_MODULE = (
    "Put a module of its own into the list for each layer, and let layers share parameters instead: "
    "layers[1].up.weight = layers[0].up.weight."
)
_HELP = "Name it as package.module:Class; the package is installed, or lies in the folder of the spec."


def build_module(model: ModuleModel, code: UserCode | None = None) -> nn.Module:
    """Return the module with parameters on the meta device.

    ``code`` records the files that are loaded; by default those of ``model`` are the only ones that are allowed. Raises
    ConfigurationError PT655 if the class cannot be imported or built, PT591 if a file is not one that was allowed,
    PT649 if the module keeps state in buffers.
    """
    kind = _class(model, code)
    with meta_parameters():
        root = _built(kind, model)
    check_buffers(root)
    return root


def built_weights(model: ModuleModel, seed: int) -> dict[str, torch.Tensor]:
    """Return the first values of all parameters, in float32: those that the class itself draws from ``seed``.

    The whole model is built in the memory of this process. The state of torch's generators stays as it is.
    """
    kind = _class(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        root = _built(kind, model)
    return {name: parameter.detach().float() for name, parameter in root.named_parameters()}


def blocks_of(root: nn.Module) -> str:
    """Return the name of the list of layers: the list of modules with most parameters; raises PT655."""
    lists = {name: module for name, module in root.named_modules() if isinstance(module, nn.ModuleList) and len(module)}
    if not lists:
        message = f"{type(root).__name__} has no nn.ModuleList of layers, which are sharded and recomputed one by one"
        raise ConfigurationError("PT655", message, "Put its layers into an nn.ModuleList.")
    name = str(max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters())))
    first: dict[int, int] = {}
    for number, layer in enumerate(lists[name]):
        if (before := first.setdefault(id(layer), number)) != number:
            message = f"{type(root).__name__}: {name}.{before} and {name}.{number} are one module"
            raise ConfigurationError("PT655", message, _ONE_MODULE)
    return name


def user_code(model: ModuleModel, *, recorded: bool = False) -> UserCode:
    """Check each import of the user's code from now on; ``recorded``: allow and record all instead."""
    package = model.module.partition(":")[0].partition(".")[0]
    return installed(package, model.folder, None if recorded else model.files)


def _class(model: ModuleModel, code: UserCode | None = None) -> type[nn.Module]:
    name, _, kind = model.module.partition(":")
    if code is None:
        user_code(model)
        if changed := changed_files(model.files, model.folder):
            are = "is not the one that was" if len(changed) == 1 else "are not those that were"
            message = f"{', '.join(changed)} {are} allowed when the plan was made"
            raise ConfigurationError("PT591", message, "Look at what changed, and plan again with --trust-remote-code.")
    try:
        module_class = getattr(import_module(name), kind)
    except ConfigurationError:
        raise
    except Exception as error:  # the user's code may raise anything
        message = f"model.module: {model.module} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigurationError("PT655", message, _HELP) from error
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ConfigurationError("PT655", f"model.module: {model.module} is no class of torch.nn.Module", _HELP)
    return module_class


def _built(kind: type[nn.Module], model: ModuleModel) -> nn.Module:
    try:
        return cast(nn.Module, cast(Any, kind)(**model.config))
    except Exception as error:  # the user's code may raise anything
        message = f"model.module: {model.module} cannot be built: {type(error).__name__}: {error}"
        raise ConfigurationError("PT655", message, "model.config holds the keywords of its constructor.") from error
