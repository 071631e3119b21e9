"""Builds transformers models with parameters on the meta device, without memory; buffers have their values."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from partool.spec.model_code import asked_code, code_hash
from partool_runtime.errors import EXIT_DONE, ConfigurationError, exit_code

_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_NAMED = 3
"""Number of buffers that a message lists."""


def build_causal(path: Path, code: str = "") -> nn.Module:
    """Return the causal language model of a folder's ``config.json``, with parameters on the meta device.

    If the model code in the folder is allowed to run, ``code`` is the hash of this code. Raises ConfigurationError
    PT643 if transformers is not installed or cannot build the model, PT590 if the model needs code that is not allowed,
    PT591 if the code has another hash.
    """
    _check_code(path, code)
    try:
        transformers: Any = import_module("transformers")
    except ImportError as error:
        fix = "pip install transformers, or write model.config: partool's own decoder"
        raise ConfigurationError("PT643", f"transformers cannot be imported: {error}", fix) from error
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with _own_modules(transformers) if code else nullcontext():
            allowed = {"trust_remote_code": bool(code)}
            config = transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, **allowed)
            with meta_parameters():
                causal = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **allowed)
    except Exception as error:  # a model's own code may raise anything
        if not code and "trust_remote_code" in str(error):
            raise _code_not_allowed(path) from None
        first = re.split(r"\n\s*\n", str(error).strip())[0]
        message = f"transformers cannot build the model of {path}: {type(error).__name__}: {first}"
        raise ConfigurationError("PT643", message, "Check that the folder's config.json is complete.") from error
    finally:
        logging.set_verbosity(before)
    return cast(nn.Module, causal)


def _check_code(path: Path, code: str) -> None:
    if not code:
        return
    if elsewhere := [f"{name} of {file}" for name, file in asked_code(path).items() if "--" in file]:
        message = f"{path / 'config.json'} asks for {', '.join(elsewhere)}: code of another repository"
        raise ConfigurationError("PT590", message, "Put the code into the folder, and name it without the repository.")
    try:
        digest = code_hash(path)
    except OSError as error:
        raise ConfigurationError("PT591", f"the code in {path} cannot be read: {error}") from error
    if digest != code:
        message = f"the code in {path} has the hash {digest[:12]}…, and the one that was allowed had {code[:12]}…"
        raise ConfigurationError("PT591", message, "Look at what changed, and plan again with --trust-remote-code.")


def _code_not_allowed(path: Path) -> ConfigurationError:
    wanted = ", ".join(f"{name} of {file}" for name, file in asked_code(path).items()) or "code"
    message = f"the model of {path} is built by code of its own, which is not run: config.json asks for {wanted}"
    fix = "Read that code; if you trust it, give --trust-remote-code on the command line."
    return ConfigurationError("PT590", message, fix)


@contextmanager
def _own_modules(transformers: Any) -> Iterator[None]:
    """Make transformers copy a folder's code to a private folder of this process and import it from there.

    The default folder is shared: another rank may be writing to it, or another file of the same size and time may be
    imported by mistake.
    """
    utilities: Any = import_module(f"{transformers.__name__}.dynamic_module_utils")
    before = utilities.HF_MODULES_CACHE
    with tempfile.TemporaryDirectory(prefix="partool-code-") as folder:
        utilities.HF_MODULES_CACHE = folder
        try:
            yield
        finally:
            utilities.HF_MODULES_CACHE = before
            sys.path[:] = [entry for entry in sys.path if entry != folder]


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Make modules built within the context put parameters on the meta device, but leave buffers where they are.

    ``torch.device("meta")`` would lose the values of buffers, such as the frequencies of rotary embeddings. A module
    allocates parameters in memory first. A parameter's memory is freed when the module registers the parameter, before
    the module writes to it.
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
    """Raise ConfigurationError PT644 if the configuration lacks a size that every decoder with attention has."""
    config = cast(Any, causal).config
    missing = [name for name in _SIZES if not isinstance(getattr(config, name, None), int)]
    if not missing:
        return
    if getattr(config, "text_config", None) is not None:
        raise _not_cut(causal, "its language model is one part of it, described in text_config")
    raise _not_cut(causal, f"its {type(config).__name__} has no {', '.join(missing)}: its layers are not of attention")


def base_name(causal: nn.Module) -> str:
    """Return the name of the child module that maps tokens to hidden states; raises ConfigurationError PT644."""
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
        count = f"{len(lists)} lists" if lists else "no list"
        raise _not_cut(base, f"{count} of {layers} layers")
    return lists[0]


def check_buffers(causal: nn.Module) -> None:
    """Raise ConfigurationError PT649 if the model's state holds more than the model's parameters.

    Checkpoints, exports and loading cover parameters only; a buffer that belongs to the state, such as the balance that
    DeepSeek-V3 learns for its routers (arXiv 2412.19437, section 2.1.2), would be lost silently.
    """
    parameters = {name for name, _ in causal.named_parameters(remove_duplicate=False)}
    buffers = [name for name in causal.state_dict() if name not in parameters]
    if buffers:
        more = f" and {len(buffers) - _NAMED} more" if len(buffers) > _NAMED else ""
        message = f"{type(causal).__name__} keeps state in buffers: {', '.join(buffers[:_NAMED])}{more}"
        fix = "They would be neither loaded nor saved nor exported; choose a model whose state is all parameters."
        raise ConfigurationError("PT649", message, fix)


def draws_random(module: nn.Module) -> bool:
    """Return True if a training forward pass draws random numbers, for dropout or for noise on routers."""
    rates = [m.p for m in module.modules() if isinstance(m, nn.Dropout)]
    names = ("attention_dropout", "jitter_noise", "dropout")
    rates += [getattr(m, name) for m in module.modules() for name in names if isinstance(getattr(m, name, None), float)]
    return any(rate > 0.0 for rate in rates)


def aliases(module: nn.Module) -> dict[str, str]:
    """Return a mapping from each further name of a tied parameter to the parameter's first name."""
    first: dict[nn.Parameter, str] = {}
    every = module.named_parameters(remove_duplicate=False)
    return {name: before for name, parameter in every if (before := first.setdefault(parameter, name)) != name}


def _name_of(wanted: nn.Module, causal: nn.Module) -> str:
    names: list[str] = [name for name, module in causal.named_modules() if module is wanted]
    return names[0]


def _not_cut(module: nn.Module, why: str) -> ConfigurationError:
    fix = "Only language models of embedding, one list of layers, final norm and output matrix can be trained so."
    return ConfigurationError("PT644", f"{type(module).__name__}: {why}", fix)


def say_as_json(describe: Callable[..., dict[str, object]], arguments: list[str]) -> int:
    """Print what ``describe`` finds out about the model that ``arguments`` name; print errors as JSON ``error``.

    Returns the exit code of the process.
    """
    torch.set_num_threads(1)
    try:
        description = describe(*arguments)
    except ConfigurationError as error:
        return _failed(error)
    except Exception as error:  # a model's own code may raise anything
        message = f"{arguments[0]} cannot be looked at: {type(error).__name__}: {error}"
        return _failed(ConfigurationError("PT644", message, "Its code differs from that of decoders partool knows."))
    print(json.dumps(description))
    return EXIT_DONE


def _failed(error: ConfigurationError) -> int:
    print(json.dumps({"error": {"code": error.code, "message": error.message, "help": error.help}}))
    return exit_code(error)
