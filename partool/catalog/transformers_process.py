"""Starts a process that describes a transformers model in a folder; caches the description on disk.

The planner itself never imports torch. The process builds the model without allocating tensors, which takes some
seconds. The description depends only on the folder's ``config.json``, the folder's allowed code and the installed
packages, so it can be cached.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from partool.catalog.profile_file import home
from partool.process import python_command
from partool.spec.model_code import asked_code, code_hash, hash_now
from partool.version import __version__

TIMEOUT_S = 300.0
_MODULE = "partool_runtime.hf.structure"
_GRAPH = "partool_runtime.hf.graph"
_MODULE_OF_USER = "partool_runtime.usermodel.structure"
_FORMAT = "5"
"""Version of the answer's format; changing it makes cached answers invalid."""
_NEEDED = ("torch", "transformers")
_CODE_ALLOWED: ContextVar[bool] = ContextVar("code_allowed", default=False)


def allow_code(allowed: bool) -> None:
    """Set whether code in the folders of models may run; only the command line may call this, never a spec or plan."""
    _CODE_ALLOWED.set(allowed)


def code_allowed() -> bool:
    """Return whether code in the folders of models may run."""
    return _CODE_ALLOWED.get()


class DescriptionError(Exception):
    """Raised if the model could not be described; ``help`` says what to do, ``code`` is the rule's code."""

    def __init__(self, message: str, help: str = "", code: str = "PT450") -> None:
        super().__init__(message)
        self.help, self.code = help, code


def describe(folder: Path) -> tuple[dict[str, Any], str]:
    """Return ``partool_runtime.hf.structure``'s description of a folder's model, and the SHA-256 of its config.json.

    The description's ``code_hash`` is the hash of the folder's code that ran, or empty if none ran.
    Raises :class:`DescriptionError`.
    """
    try:
        content = (folder / "config.json").read_bytes()
    except OSError as error:
        help = "give a folder on this machine; names of a model hub are not looked up"
        raise DescriptionError(f"{folder / 'config.json'} cannot be read: {error.strerror}", help) from error
    code = code_hash(folder) if code_allowed() and asked_code(folder) else ""
    description = _kept_or_asked(_key(content, code), _MODULE, str(folder.absolute()), code)
    return description | {"code_hash": code}, hashlib.sha256(content).hexdigest()


def describe_graph(folder: Path, sequence_length: int) -> dict[str, Any]:
    """Return ``partool_runtime.hf.graph``'s description of the graph of a folder's model.

    The graph depends on the length of sequences where the model's code branches on it, as for windows. :func:`describe`
    must have described the model before. Raises :class:`DescriptionError`.
    """
    code = code_hash(folder) if code_allowed() and asked_code(folder) else ""
    key = _key((folder / "config.json").read_bytes(), code)
    return _kept_or_asked(f"{key}-graph-{sequence_length}", _GRAPH, str(folder.absolute()), code, str(sequence_length))


def describe_module(model: Mapping[str, Any], sequence_length: int) -> dict[str, Any]:
    """Return ``partool_runtime.usermodel.structure``'s description of a user's module, given as a ``ModuleModel``.

    The description is for sequences of ``sequence_length`` tokens. Raises :class:`DescriptionError`, also if the user
    has not allowed the code.
    """
    if not code_allowed():
        message = f"the model is built by your code {model['module']}, which is not run"
        raise DescriptionError(message, "give --trust-remote-code on the command line if you trust it", "PT590")
    text = json.dumps(model, sort_keys=True)
    key = f"{_key(text.encode(), _MODULE_OF_USER)}-{sequence_length}"
    arguments = (text, str(sequence_length))
    return _kept_or_asked(key, _MODULE_OF_USER, *arguments, sound=lambda kept: not _changed(kept, model["folder"]))


def _changed(kept: Mapping[str, Any], folder: str) -> bool:
    """Return True if a file from which an answer about a user's module was made is another one now."""
    files = kept.get("code_files")
    return not isinstance(files, dict) or any(hash_now(name, folder) != digest for name, digest in files.items())


def _kept_or_asked(
    key: str, module: str, *arguments: str, sound: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> dict[str, Any]:
    """Return the answer that is kept under ``key`` if it is ``sound``, or ask a module of the runtime and keep it."""
    kept = home() / "models" / f"{key}.json"
    answer = _read(kept)
    if answer is None or not sound(answer):
        answer = _answer(module, *arguments)
        _keep(answer, kept)
    return answer


def _key(content: bytes, code: str) -> str:
    try:
        versions = [f"{name} {version(name)}" for name in _NEEDED]
    except PackageNotFoundError as error:
        raise DescriptionError(f"{error.name} is not installed", "pip install 'partool[train,hf]'") from error
    return hashlib.sha256(
        b"\0".join([content, __version__.encode(), _FORMAT.encode(), code.encode(), *map(str.encode, versions)])
    ).hexdigest()


def _answer(module: str, *arguments: str) -> dict[str, Any]:
    """Return what a module of the runtime prints in a process of its own; raises :class:`DescriptionError`."""
    command = python_command(module, *arguments)
    try:
        process = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DescriptionError(f"the runtime could not inspect the model: {error}") from error
    try:
        answer = json.loads(process.stdout)
    except ValueError as error:
        last = (process.stderr.strip().splitlines() or ["no error output"])[-1]
        raise DescriptionError(f"the runtime could not inspect the model: {last}") from error
    if "error" in answer:
        said = answer["error"]
        raise DescriptionError(said["message"], said["help"], said["code"])
    return dict(answer)


def _read(kept: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _keep(answer: dict[str, Any], kept: Path) -> None:
    """Write the description ``answer`` to the cache file ``kept`` atomically; errors of the file system are ignored."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False, encoding="utf-8") as file:
            json.dump(answer, file)
        Path(file.name).replace(kept)
    except OSError:
        return
