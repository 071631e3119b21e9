"""The world of a dry run: a process group without other ranks, fake tensors, and answers where the host reads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode

from partool_runtime.parallel.pipeline.wires import Wires
from partool_runtime.torch_internals.collectives import in_memory_store
from partool_runtime.torch_internals.tensors import without_modes


@contextmanager
def alone_in(world_size: int, rank: int) -> Iterator[None]:
    """Be one rank of a world whose other ranks do not exist: collectives return at once."""
    dist.init_process_group("fake", store=in_memory_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Yield a function that returns the context in which tensors are fake.

    Where the host reads a number from a tensor it gets 0: norms are finite, nothing is requested to stop. A transfer
    between ranks counts as complete at once. Blocks are not compiled.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    table, read = fake_impls.op_implementations_dict, torch.ops.aten._local_scalar_dense.default
    before, made, poll = table[read], torch.tensor, Wires._poll

    def tensor(data: Any, *, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> torch.Tensor:
        """Return ``torch.tensor(data)``; torch itself would put the numbers on the device, which does not exist."""
        if device is None or torch.device(device).type == "cpu":
            return made(data, dtype=dtype, device=device, **rest)
        with without_modes():
            real = made(data, dtype=dtype)
        return mode.from_tensor(real).to(device)

    table[read] = lambda mode, func, tensor: _zero(tensor.dtype)
    torch.tensor = tensor  # type: ignore[assignment]
    Wires._poll = lambda *_: None  # type: ignore[method-assign]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield lambda: mode
    finally:
        table[read], torch.tensor = before, made
        Wires._poll = poll  # type: ignore[method-assign]


def _zero(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 0
