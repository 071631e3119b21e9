"""The world of a dry run: a process group without other ranks, and fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from partool_runtime.torch_internals import collectives
from partool_runtime.torch_internals.collectives import in_memory_store
from partool_runtime.torch_internals.compiling import partitioned
from partool_runtime.torch_internals.fake import ALONE, fake_mode
from partool_runtime.torch_internals.tensors import forget_meshes


@contextmanager
def alone_in(world_size: int, rank: int) -> Iterator[None]:
    """Be one rank of a world whose other ranks do not exist: collectives return at once."""
    dist.init_process_group(ALONE, store=in_memory_store(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()


@contextmanager
def fake_tensors(*, compiled: bool = False) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """Yield a function that returns the context in which tensors are fake.

    Where the host reads a number from a tensor it gets 0: norms are finite, nothing is requested to stop. A transfer
    between ranks counts as complete at once. Blocks that the plan compiles run as they are, or, if ``compiled``, as
    graphs that keep for the backward pass what the compiler for GPUs keeps; operators of a graph run one by one.
    """
    asked = collectives.is_complete
    collectives.is_complete = lambda work: True
    try:
        with partitioned() if compiled else torch.compiler.set_stance("force_eager"), fake_mode() as mode:
            yield lambda: mode
    finally:
        collectives.is_complete = asked
