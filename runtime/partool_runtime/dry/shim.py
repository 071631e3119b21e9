"""Compiles and loads the library that stands in for CUDA (``shim.cpp``). It does not import torch."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from partool_runtime.errors import ConfigurationError

SOURCE = Path(__file__).with_name("shim.cpp")
_NO_COMPILER = "install a C++ compiler (Debian: apt install g++; macOS: xcode-select --install)"


def load(folder: Path) -> None:
    """Load the library, which is compiled on first use and kept in ``folder`` by torch's version.

    Call this before anything imports torch: torch looks for CUDA once. Raises ConfigurationError PT516 without a
    compiler, or if the library does not compile against the installed torch.
    """
    if "torch" in sys.modules:
        raise RuntimeError("torch was imported before the library that stands in for CUDA")
    torch = _torch_folder()
    for name in ("libc10", "libtorch_cpu"):
        (found,) = (torch / "lib").glob(f"{name}.*")
        ctypes.CDLL(str(found), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(_compiled(torch, folder)), mode=ctypes.RTLD_GLOBAL)


def _torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "the runtime needs torch"
    assert spec.origin is not None
    return Path(spec.origin).parent


def _compiled(torch: Path, folder: Path) -> Path:
    """Return the path of the library, which is compiled if it is missing."""
    version = importlib.metadata.version("torch")
    key = hashlib.sha256(f"{version} {torch} {platform.machine()}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    target = folder / f"shim-{version}-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as unfinished:
            made = Path(unfinished) / target.name
            _compile(torch, made)
            made.replace(target)  # at once, as several ranks may compile it at the same time
    return target


def _compile(torch: Path, target: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise ConfigurationError("PT516", "no C++ compiler is found", _NO_COMPILER)
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{torch / 'include'}", str(SOURCE), "-o"]
    command += [str(target), f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise ConfigurationError("PT516", f"{compiler} does not start: {error.strerror}", _NO_COMPILER) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[0]
        message = f"{compiler} cannot compile the library that stands in for CUDA: {last}"
        raise ConfigurationError("PT516", message, "a compiler with C++20 (GCC 11, Clang 14 or later), or set CXX")
