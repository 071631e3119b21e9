"""Opens the compiled CPU library through ctypes; an install without a C++ compiler has no such library."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import os
import site
import sys
from pathlib import Path

ABI_VERSION = 4
ISA_VARIABLE = "PARTOOL_ISA"
"""Environment variable that names the instruction set to use."""
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_POINTER, _COUNT, _CODE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_SIGNATURES: dict[str, list[type]] = {
    "partool_set_isa": [ctypes.c_char_p],
    "partool_finite_sum_squares": [_POINTER, _COUNT, _CODE, _POINTER, _POINTER],
    "partool_onebit_pack": [_POINTER, _CODE, _POINTER, _CODE, _COUNT, _COUNT, _CODE, _POINTER, _POINTER],
    "partool_onebit_unpack": [_POINTER, _POINTER, _CODE, _COUNT, _COUNT, _COUNT, _COUNT, _POINTER, _CODE],
    "partool_dequantise": [_POINTER, _CODE, _POINTER, _COUNT, _COUNT, _COUNT, _POINTER, _CODE],
    "partool_update": [_POINTER, _POINTER, _COUNT, _POINTER, _POINTER, _CODE, _CODE],
    "partool_sums": [_POINTER, _POINTER, _COUNT],
    "partool_convert": [_POINTER, _POINTER, _COUNT],
    "partool_accumulate": [_POINTER, _POINTER, _COUNT],
    "partool_zero": [_POINTER, _POINTER, _COUNT],
}
"""Argument types of each library function that returns a status, by name; the order is that of ``partool_cpu.h``."""


class InstructionSetError(RuntimeError):
    """``PARTOOL_ISA`` names an instruction set that this processor or this library does not have."""


def library_path() -> Path | None:
    """Return the path of the compiled library, or None where it is not installed."""
    # An editable install keeps the sources in the checkout and the built library in site-packages; both are searched.
    # The module path is not: the folder of a user's model is on it, and may hold a file of this name.
    name = f"libpartool_cpu{_SUFFIX}"
    installed = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    folders = [Path(str(importlib.resources.files("partool_kernels"))) / "cpu"]
    folders += [Path(entry) / "partool_kernels" / "cpu" for entry in installed]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def open_library(path: Path) -> ctypes.CDLL | None:
    """Open a library, declare the argument types of its functions, and return the library.

    Returns None where the library cannot be opened or its version is not the one that this package needs.
    """
    try:
        lib = ctypes.CDLL(str(path))
        lib.partool_abi_version.restype = ctypes.c_int32
        if lib.partool_abi_version() != ABI_VERSION:
            return None
        for name, arguments in _SIGNATURES.items():
            function = getattr(lib, name)
            function.argtypes, function.restype = arguments, ctypes.c_int32
    except (OSError, AttributeError):
        return None
    lib.partool_isa.restype = lib.partool_isas.restype = ctypes.c_char_p
    lib.partool_pool_open.restype = ctypes.c_void_p
    lib.partool_pool_open.argtypes = [_CODE, _POINTER, _CODE, _POINTER]
    lib.partool_pool_close.restype = None
    lib.partool_pool_close.argtypes = [_POINTER]
    return lib


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; None where it is missing or its version is not the one that this package needs.

    Raises :class:`InstructionSetError` where ``PARTOOL_ISA`` names an instruction set that is not available here.
    """
    path = library_path()
    lib = None if path is None else open_library(path)
    wanted = os.environ.get(ISA_VARIABLE)
    if lib is not None and wanted and lib.partool_set_isa(wanted.encode()) != 0:
        have = lib.partool_isas().decode().replace(",", ", ")
        raise InstructionSetError(f"{ISA_VARIABLE}={wanted!r}: this machine and this build have {have}")
    return lib


def isa() -> str | None:
    """Return the instruction set in use, or None where the library is missing.

    It is ``avx512``, ``avx2`` or ``baseline`` (SSE2) on x86-64, and ``sve2`` or ``baseline`` (NEON) on aarch64.
    """
    lib = library()
    return None if lib is None else lib.partool_isa().decode()


def isas() -> tuple[str, ...]:
    """Return the instruction sets that both this processor and the library support, the widest vectors first."""
    lib = library()
    return () if lib is None else tuple(lib.partool_isas().decode().split(","))


if __name__ == "__main__":
    print(isa(), *isas())
