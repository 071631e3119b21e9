"""The selectors of this process's devices, which use real timers and the user's cache."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

import torch

from partool_kernels.device import has_triton, triton_version
from partool_kernels.select.selector import Selector
from partool_kernels.select.store import Store
from partool_kernels.timing import CudaTimer, HostTimer

_ATTENTION = ("flash-attn-3", "flash-attn-4")
"""Packages of attention implementations that torch does not include."""


@functools.cache
def selector(device: torch.device, *, measure: bool = True) -> Selector:
    """Return the device's selector, which all callers share; ``measure`` as in :class:`Selector`.

    Results on CPUs are not stored in files, as the model and the load of the CPU are unknown.
    """
    if device.type != "cuda":
        return Selector(HostTimer(), measure=measure)
    if not measure:
        return Selector(HostTimer(), measure=False)
    name = torch.cuda.get_device_name(device)
    return Selector(CudaTimer(device), Store(name, versions()))


def versions() -> dict[str, str]:
    """Return the versions, by name, of all libraries whose speed is compared."""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return {
        "torch": torch.__version__,
        "runtime": str(torch.version.hip or torch.version.cuda),
        "cudnn": str(cudnn),
        "triton": triton_version() if has_triton() else "none",
        **{name: _version(name) for name in _ATTENTION},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
