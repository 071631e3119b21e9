"""The compiled CPU library, opened through ctypes; absent where the package was installed without a C++ compiler."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import sys
from pathlib import Path

ABI_VERSION = 1
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")


def _library_path() -> Path | None:
    # An editable install keeps the sources in the checkout and the built library in site-packages; both are searched.
    name = f"libpartool_cpu{_SUFFIX}"
    folders = [Path(str(importlib.resources.files("partool_kernels"))) / "cpu"]
    folders += [Path(entry) / "partool_kernels" / "cpu" for entry in sys.path if entry]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library with its functions typed, or None where it is missing or of another version."""
    path = _library_path()
    if path is None:
        return None
    try:
        lib = ctypes.CDLL(str(path))
        lib.partool_abi_version.restype = ctypes.c_int32
        if lib.partool_abi_version() != ABI_VERSION:
            return None
    except (OSError, AttributeError):
        return None
    lib.partool_isa.restype = ctypes.c_char_p
    lib.partool_finite_sum_squares.restype = ctypes.c_int
    lib.partool_finite_sum_squares.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int32,
        ctypes.POINTER(ctypes.c_double),
        ctypes.POINTER(ctypes.c_int32),
    ]
    return lib


def isa() -> str | None:
    """Return the instruction set in use (``avx512``, ``avx2``, ``baseline``), or None without the library."""
    lib = library()
    return None if lib is None else lib.partool_isa().decode()
