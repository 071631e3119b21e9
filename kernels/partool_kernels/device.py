"""Choice of the devices that run Triton kernels, and of the kernels' configurations."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, NamedTuple

from partool_kernels.registry import ARCHITECTURES, Choice, Config, Request
from partool_kernels.registry.look_up import get, use

if TYPE_CHECKING:
    import torch

Mode = Literal["auto", "native", "torch"]
_TYPES = ("torch.float32", "torch.bfloat16", "torch.float16")


def uses_triton(mode: str, *tensors: torch.Tensor | None) -> bool:
    """Return whether a Triton kernel computes the result for ``tensors``; otherwise torch computes the result.

    Kernels take float32, bfloat16 and float16 on GPUs of :data:`ARCHITECTURES`, and on the CPU only where Triton's
    interpreter is enabled (``TRITON_INTERPRET=1``). ``mode``: ``auto`` uses kernels wherever they run; ``torch`` never
    uses kernels; ``native`` is like ``auto``, but raises :class:`RuntimeError` on a GPU that cannot run the kernels.
    """
    first = tensors[0]
    assert first is not None
    if mode == "torch" or any(x is not None and (x.numel() == 0 or _is_wide(x.dtype)) for x in tensors):
        return False
    if first.device.type == "cpu":
        return interpreting() and has_triton()
    if first.device.type != "cuda":
        return False
    able = has_triton() and architecture(first.device) is not None
    if mode == "native" and not able:
        what = "Triton is not installed" if not has_triton() else f"no kernels are compiled for {_named(first.device)}"
        raise RuntimeError(f"compiled kernels were asked for (kernels.mode: native), but {what}")
    return able


def uses_triton_8bit(mode: str, dtype: torch.dtype, *tensors: torch.Tensor) -> bool:
    """Return whether a Triton kernel that multiplies 8-bit numbers of type ``dtype`` computes the result.

    The rules are those of :func:`uses_triton`; an architecture multiplies at most one of the two 8-bit types.
    """
    if not uses_triton(mode, *tensors):
        return False
    device, name = tensors[0].device, str(dtype).removeprefix("torch.")
    if device.type == "cpu":
        return True
    kind = architecture(device)
    able = kind is not None and ARCHITECTURES[kind].fp8 == name
    if mode == "native" and not able:
        raise RuntimeError(f"compiled kernels were asked for (kernels.mode: native), but {kind} has no {name}")
    return able


@functools.cache
def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1 and str(dtype) not in _TYPES


@functools.cache
def has_triton() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Return whether kernels are interpreted on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def architecture(device: torch.device) -> str | None:
    """Return the name of a GPU's architecture, or None where it is not among :data:`ARCHITECTURES`."""
    import torch

    if torch.version.hip is not None:
        name = str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    else:
        major, minor = torch.cuda.get_device_capability(device)
        name = f"sm_{major}{minor}"
    return name if name in ARCHITECTURES else None


@functools.cache
def _named(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device)


@functools.cache
def _units(device: torch.device) -> int:
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.cache
def triton_version() -> str:
    """Return Triton's major and minor version."""
    import triton

    return ".".join(triton.__version__.split(".")[:2])


class KernelCall(NamedTuple):
    """Kernel to launch, and the sizes and types of its arguments."""

    kernel: str
    """Name in :data:`partool_kernels.registry.KERNELS`."""
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[tuple[str, int], ...]
    """Names and values of the widths; the names are those of the kernel's ``describe.py``."""
    rows: int
    flags: tuple[str, ...] = ()


def choose(call: KernelCall, device: torch.device) -> Choice:
    """Return the configuration for a call on a device; Triton's interpreter uses the configuration for ``sm_90``.

    Look-ups are cached per bucket of rows: the number of rows is rounded up to a power of two.
    """
    return _chosen(call._replace(rows=1 << max(call.rows - 1, 0).bit_length()), device)


@functools.lru_cache(maxsize=4096)
def _chosen(call: KernelCall, device: torch.device) -> Choice:
    kernel, dtypes, shape, rows, flags = call
    names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if device.type == "cpu":
        return get(Request(kernel, "sm_90", names, shape, rows, flags))
    kind = architecture(device)
    assert kind is not None
    return get(Request(kernel, kind, names, shape, rows, flags, _named(device), _units(device), triton_version()))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that makes the device the current GPU, because Triton launches kernels on the current GPU."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launch_options(config: Config, device: torch.device) -> dict[str, int | bool]:
    """Return a launch's keyword arguments: constants, numbers of warps and stages, and options of AMD's compiler."""
    import torch

    backend = "hip" if torch.version.hip is not None and device.type == "cuda" else "cuda"
    return config.constants | config.options(backend)


def use_tables(paths: Sequence[str]) -> None:
    """Make all later look-ups of this process search ``paths``, the user's files and folders, for configurations.

    Raises :class:`partool_kernels.registry.tables.TableError` where a file cannot be read.
    """
    use(paths)
    _chosen.cache_clear()
