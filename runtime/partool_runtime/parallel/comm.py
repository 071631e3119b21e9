"""Collectives that partool adds, and a counter of all collectives in the process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from partool_runtime.torch_internals.collectives import process_group, run_watched
from partool_runtime.torch_internals.tensors import TorchDispatchMode

EXPERT = "expert_parallel"
"""Description of process groups whose ranks share experts; CommCounter and a time term find groups by it."""
LOADS = "expert_loads"
"""Purpose of collectives of statistics of experts, which are a few kilobytes and belong to no term of traffic."""
UPDATES = "updates"
"""Purpose of collectives of optimizers that treat matrices as wholes: they gather and scatter them, or sum norms."""
SEQUENCE = "sequence_parallel"
"""Description of process groups whose ranks share sequences; CommCounter and a time term find groups by it."""


def sum_over(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Sum a tensor over a group's ranks, in place; return the tensor, whose bits are equal on all ranks.

    None is the group of one rank.
    """
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    return tensor


def maximum_over(value: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Return the largest ``value`` that any rank of the group passes."""
    if group.size() == 1:
        return value
    tensor = torch.full((), value, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return int(tensor.item())


@dataclass(slots=True)
class CollectiveTraffic:
    """Traffic of all collectives of one kind."""

    calls: int = 0
    payload_bytes: int = 0
    """Size of the whole tensor, which is the output of an all-gather and the input of every other collective."""
    sent_bytes: int = 0
    """Bytes that one rank sends, assuming ring algorithms; for all_to_all and send, the actual bytes to other ranks."""


_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast_": "broadcast",
    "broadcast": "broadcast",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
}
_SENT: dict[str, Callable[[int, int], int]] = {
    "all_gather": lambda size, ranks: size * (ranks - 1) // ranks,
    "reduce_scatter": lambda size, ranks: size * (ranks - 1) // ranks,
    "all_reduce": lambda size, ranks: 2 * size * (ranks - 1) // ranks,
    "broadcast": lambda size, ranks: size if ranks > 1 else 0,
    "send": lambda size, ranks: size,
}


class _Meant:
    kind: str | None = None
    purpose: str | None = None


@contextmanager
def counted_as(kind: str | None = None, *, purpose: str | None = None) -> Iterator[None]:
    """Make :class:`CommCounter` count collectives as of another ``kind``, or as of groups opened for ``purpose``."""
    _Meant.kind, _Meant.purpose = kind, purpose
    try:
        yield
    finally:
        _Meant.kind = _Meant.purpose = None


_OWN = "partool"
"""Namespace of partool's own operators: a dispatch mode sees one operator, even if the operator contains exchanges."""


class CommCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives and their bytes while it is active, including collectives of FSDP2 and DTensor.

    It intercepts every operator, which slows a step down: use it in tests and in sampled steps.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._traffic: dict[tuple[str, tuple[int, ...], str], CollectiveTraffic] = defaultdict(CollectiveTraffic)

    def snapshot(
        self, among: Collection[int] | None = None, described: str | None = None, exactly: bool = False
    ) -> dict[str, CollectiveTraffic]:
        """Return a map from the kind of collective to its traffic so far.

        Kinds are all_gather, reduce_scatter, all_reduce, broadcast, all_to_all and send.

        ``among`` restricts the result to groups whose world ranks are all in ``among``, or, if ``exactly``, to groups
        of exactly these ranks. ``described`` restricts it to groups that were opened with this description, and to
        collectives of this purpose.
        """
        traffic_by_kind: dict[str, CollectiveTraffic] = {}
        for (kind, ranks, description), traffic in self._traffic.items():
            if among is not None and not (set(ranks) == set(among) if exactly else set(ranks) <= set(among)):
                continue
            if described is not None and description != described:
                continue
            total = traffic_by_kind.setdefault(kind, CollectiveTraffic())
            total.calls += traffic.calls
            total.payload_bytes += traffic.payload_bytes
            total.sent_bytes += traffic.sent_bytes
        return traffic_by_kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count the call if it is a collective, then make it."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func, args)
        if func.namespace == _OWN:
            with self:
                return run_watched(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        kind = _Meant.kind or _KINDS.get(func._schema.name.partition("::")[2])
        if kind is None:
            return
        functional = func.namespace == "_c10d_functional"
        group = _group(args, functional)
        size = _bytes(args[0] if functional else args[1]) if kind == "all_to_all" else max(_bytes(a) for a in args)
        if functional and kind == "all_gather":
            size *= group.size()  # only the input, not the output, is an argument
        purpose = _Meant.purpose or group.group_desc
        traffic = self._traffic[kind, tuple(dist.get_process_group_ranks(group)), purpose]
        traffic.calls += 1
        traffic.payload_bytes += size
        if kind == "all_to_all":
            traffic.sent_bytes += size - _kept_bytes(args if functional else args[1:], size, group)
        else:
            traffic.sent_bytes += _SENT[kind](size, group.size())


def _kept_bytes(args: tuple[Any, ...], size: int, group: dist.ProcessGroup) -> int:
    """Return the bytes that a rank sends to itself in an all-to-all; the first of ``args`` is the input tensor."""
    if isinstance(args[0], list | tuple):
        return _bytes(args[0][group.rank()])
    splits = next((a for a in reversed(args) if isinstance(a, list | tuple)), ())  # the input's splits are the last
    if not splits or size == 0:
        return size // group.size()
    return size * int(splits[group.rank()]) // sum(splits)


def _group(args: tuple[Any, ...], functional: bool) -> dist.ProcessGroup:
    if functional:
        return process_group(next(a for a in reversed(args) if isinstance(a, str)))
    return process_group(next(a for a in args if isinstance(a, torch.ScriptObject | dist.ProcessGroup)))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.itemsize
    if isinstance(value, list | tuple):
        return sum(_bytes(item) for item in value)
    return 0
