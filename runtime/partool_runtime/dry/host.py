"""The host of a dry run: its memory is none, its kernels compute nothing, and its threads' work runs at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from partool.plan.layout import OffloadLayout
from partool_kernels.host import IdlePool
from partool_runtime.host import HostParts
from partool_runtime.offload.buckets import Bucket
from partool_runtime.offload.lanes import CopyLane, Lanes, Mark, StreamLanes
from partool_runtime.offload.memory import HostMemory
from partool_runtime.offload.shards import MemoryShardStore
from partool_runtime.offload.store import MemoryStore
from partool_runtime.offload.worker import Work
from partool_runtime.parallel.weipipe.lanes import Lane

Tensors = Callable[[], AbstractContextManager[Any]]
"""Returns the context in which tensors are fake."""


def absent_host(tensors: Tensors) -> HostParts:
    """Return a host that has no memory, threads or files; ``tensors`` is :attr:`Ranks.tensors`.

    Limits of pinned memory hold as on a real host.
    """
    return HostParts(
        memory=partial(_NoMemory, tensors=tensors),
        lanes=_lanes,
        pool=lambda threads, per_node, device: (IdlePool(threads), ()),
        worker=lambda name: _Inline(),
        state_file=_no_state_file,
        shard_file=partial(_no_shard_file, tensors=tensors),
        ring_lane=partial(Lane, threaded=False),
        read_rows=_balanced_rows,
    )


def _balanced_rows(totals: torch.Tensor, balanced: Callable[[], list[int]]) -> list[int]:
    """Return the rows that ranks would exchange if every expert got the same number of them; see :data:`Read`."""
    del totals
    return balanced()


class _NoMemory(HostMemory):
    """Counts host memory as a real owner does, and hands out fake tensors."""

    def __init__(self, *, pinned: bool, limit_bytes: int = 0, tensors: Tensors) -> None:
        super().__init__(pinned=pinned, limit_bytes=limit_bytes)
        self._tensors = tensors

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """See :class:`HostMemory`."""
        with self._tensors():
            return torch.empty(size_bytes, dtype=torch.uint8)


class _Inline:
    """Runs jobs of the optimizer at once; see :class:`PassWorker`."""

    def put(self, work: Work) -> None:
        work()

    def drain(self) -> None:
        pass

    def wait_for(self, ready: Callable[[], bool]) -> None:
        pass

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


class _Reached:
    """Mark after a copy that is done."""

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True

    def before_compute(self) -> None:
        pass


class _InlineLane:
    def copy(self, to: torch.Tensor, source: torch.Tensor, after: Mark | None = None) -> Mark:
        with torch.no_grad():
            to.copy_(source)
        return _Reached()


class _InlineLanes:
    """Lanes of a CPU whose copies are made at once; see :class:`Lanes`."""

    def __init__(self) -> None:
        self.down: CopyLane = _InlineLane()
        self.up: CopyLane = _InlineLane()

    def now(self) -> Mark:
        return _Reached()

    def room(self, size_bytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(size_bytes, dtype=torch.uint8)

    def close(self) -> None:
        pass


def _lanes(device: torch.device) -> Lanes:
    """Return the lanes of a device; those of a GPU are streams, which a dry run has."""
    return StreamLanes(device) if device.type == "cuda" else _InlineLanes()


def _no_state_file(buckets: Sequence[Bucket], dtypes: Sequence[torch.dtype], *_: Any, **__: Any) -> MemoryStore:
    """Return the store of states that belong into a file."""
    return MemoryStore(buckets, dtypes, IdlePool())


def _no_shard_file(
    sizes_bytes: Sequence[int], work: OffloadLayout, lanes: Lanes, *, owner: str, tensors: Tensors
) -> MemoryShardStore:
    """Return the store of shards that belong into a file: they do not count as pinned memory."""
    return MemoryShardStore(sizes_bytes, _NoMemory(pinned=False, tensors=tensors), lanes)
