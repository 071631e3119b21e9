"""Records the collectives that a rank issues while a :class:`CollectiveRecord` is active."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from partool_runtime.torch_internals.collectives import process_group, run_watched
from partool_runtime.torch_internals.tensors import TorchDispatchMode

_COLLECTIVES = ("c10d", "_c10d_functional")
_EXCHANGING = ("partool::attend_together", "partool::attend_together_backward")
"""partool's operators that contain exchanges between ranks."""
_SILENT = ("wait_tensor", "monitored_barrier_")


class Collective(NamedTuple):
    """One collective or message as a rank issued it."""

    kind: str
    """Name of the operator."""
    group: tuple[int, ...]
    """Global ranks of the group."""
    purpose: str
    """Description of the group."""
    elements: tuple[int, ...]
    """Numbers of elements of all tensors that the operator takes."""
    dtype: str
    """Type of the first tensor; empty without tensors."""
    peer: int
    """Global rank that a message goes to or comes from; -1 if there is none."""


class CollectiveRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records collectives in the order in which the thread that entered the record issues them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.collectives: list[Collective] = []
        self.operators = 0
        """Number of operators that ran."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and record it; operators of DTensors are recorded as those of their local tensors."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        self.operators += 1
        name = func._schema.name.partition("::")[2]
        if func.namespace in _COLLECTIVES and name not in _SILENT:
            self.collectives.append(_collective(name, args, functional=func.namespace != "c10d"))
        if func._schema.name in _EXCHANGING:
            with self:
                return run_watched(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _collective(name: str, args: tuple[Any, ...], *, functional: bool) -> Collective:
    tensors = list(_tensors(args))
    if functional:
        group = process_group(next(arg for arg in reversed(args) if isinstance(arg, str)))
    else:
        group = process_group(next(arg for arg in args if isinstance(arg, torch.ScriptObject | dist.ProcessGroup)))
    ranks = tuple(dist.get_process_group_ranks(group))
    peer = -1
    if name in ("send", "recv_"):
        peer = ranks[next(arg for arg in args if isinstance(arg, int))]
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return Collective(name, ranks, group.group_desc, tuple(tensor.numel() for tensor in tensors), dtype, peer)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
