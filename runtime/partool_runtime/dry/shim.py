"""Compiles and loads the library that stands in for CUDA (``shim.cpp``). It does not import torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from partool_runtime.errors import ConfigurationError
from partool_runtime.private import NotPrivateError, kept_file, private_folder

SOURCE = Path(__file__).with_name("shim.cpp")
_HIDDEN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that hide a machine's devices from torch."""
_LOADED: list[ctypes.CDLL] = []
_NO_COMPILER = "install a C++ compiler (Debian: apt install g++; macOS: xcode-select --install)"


def load(*folders: Path) -> None:
    """Load the library, which is compiled on first use and kept, by torch's version, in the first private folder.

    Call this before anything imports torch: torch looks for CUDA once. The machine's own devices are hidden from this
    process. Raises ConfigurationError PT516 without torch, a compiler or a folder that only this user can write to, or
    if the library does not compile or load.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the library that stands in for CUDA")
    torch = require_torch()
    os.environ.update(dict.fromkeys(_HIDDEN, ""))
    try:
        for name in ("libc10", "libtorch_cpu"):
            (library,) = (torch / "lib").glob(f"{name}.*")
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        _LOADED.append(ctypes.CDLL(str(_compiled(torch, _private(folders))), mode=ctypes.RTLD_GLOBAL))
    except OSError as error:
        message = f"the library that stands in for CUDA cannot be made or loaded: {error}"
        raise ConfigurationError("PT516", message, "set PARTOOL_HOME to a folder that can be written to") from error


def require_torch() -> Path:
    """Return torch's folder; raises ConfigurationError PT516 if torch is missing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ConfigurationError("PT516", "torch is not installed", "pip install 'partool[train]'")
    return Path(spec.origin).parent


def guard_devices() -> None:
    """Let the loaded library serve the device "cuda" from now on; call this after torch was imported."""
    for library in _LOADED:
        library.partool_guard_devices()


def _compiled(torch: Path, folder: Path) -> Path:
    """Return the path of the library, which is compiled if it is missing."""
    version = importlib.metadata.version("torch")
    command = _command(torch)
    key = hashlib.sha256(f"{version} {command} {platform.machine()}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    return kept_file(folder, f"shim-{version}-{key}", ".so", lambda made: _compile([*command, "-o", str(made)]))


def _private(folders: Sequence[Path]) -> Path:
    """Return the first of some folders that only this user can write to; raises ConfigurationError PT516."""
    reasons = []
    for folder in folders:
        try:
            return private_folder(folder)
        except NotPrivateError as error:
            reasons.append(str(error))
    message = f"the library that stands in for CUDA is kept where only you can write: {'; '.join(reasons)}"
    raise ConfigurationError("PT516", message, "chmod go-w that folder, or set PARTOOL_HOME to a folder of yours")


def _command(torch: Path) -> list[str]:
    """Return the compiler's command without its output; raises ConfigurationError PT516 if there is no compiler."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [shutil.which("c++") or shutil.which("g++") or ""]
    if not compiler[0]:
        raise ConfigurationError("PT516", "no C++ compiler is found", _NO_COMPILER)
    options = ["-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch / 'include'}", str(SOURCE)]
    return [*compiler, *options, f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]


def _compile(command: list[str]) -> None:
    try:
        process = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError("PT516", f"{command[0]} does not start or end: {error}", _NO_COMPILER) from error
    if process.returncode:
        lines = process.stderr.strip().splitlines() or ["no message"]
        first = next((line for line in lines if "error" in line), lines[0])
        message = f"{command[0]} cannot compile the library that stands in for CUDA: {first}"
        raise ConfigurationError("PT516", message, "a compiler with C++20 (GCC 11, Clang 14 or later), or set CXX")
