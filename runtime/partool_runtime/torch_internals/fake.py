"""Fake tensors where they stand for a device that does not exist, and a process group without other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._device import _device_constructors

from partool_runtime.torch_internals.tensors import without_modes

ALONE = "fake"
"""Backend of process groups whose collectives return at once, without other ranks."""


@contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Yield a mode in which tensors are fake; where the host reads a number from a fake tensor it gets 0.

    ``torch.tensor`` with a device makes a fake tensor, too: torch itself would put its numbers on the device first.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    table, read = fake_impls.op_implementations_dict, torch.ops.aten._local_scalar_dense.default
    _device_constructors()  # torch keeps this set of functions, in which the usual ``torch.tensor`` has to be
    before, made = table[read], torch.tensor
    table[read] = lambda mode, func, tensor: _zero(tensor.dtype)
    torch.tensor = _made_on_devices(mode, made)
    table.setdefault(torch.ops.aten.record_stream.default, _nothing)  # torch has no fake implementation of it
    try:
        yield mode
    finally:
        table[read], torch.tensor = before, made


def _made_on_devices(mode: FakeTensorMode, made: Any) -> Any:
    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> torch.Tensor:
        if device is None or torch.device(device).type == "cpu":
            return cast(torch.Tensor, made(data, dtype=dtype, device=device, **rest))
        with without_modes():
            real = made(data, dtype=dtype)
        return mode.from_tensor(real).to(device)

    return cast(Callable[..., torch.Tensor], tensor)


def _nothing(mode: FakeTensorMode, func: Any, *arguments: Any) -> None:
    pass


def _zero(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0
