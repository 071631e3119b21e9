"""Records the collectives that a rank issues while a :class:`CollectiveRecord` is active."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from partool.plan.rank_trace import COMPUTE, Collective
from partool_runtime.dry.memory import MemoryRecord
from partool_runtime.torch_internals.collectives import process_group, run_watched
from partool_runtime.torch_internals.tensors import TorchDispatchMode, is_higher_order

_COLLECTIVES = ("c10d", "_c10d_functional", "symm_mem")
"""Namespaces of operators that exchange between ranks; operators of ``symm_mem`` also multiply matrices."""
_EXCHANGING = ("partool::attend_together", "partool::attend_together_backward")
"""partool's operators that contain exchanges between ranks."""
_SILENT = ("wait_tensor", "monitored_barrier_")


class CollectiveRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records collectives in the order in which the thread that entered the record issues them."""

    def __init__(self, memory: MemoryRecord | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = memory
        """Is told the results of every operator."""
        self.vocabulary: dict[Collective, int] = {}
        """The collectives that differ, with their places."""
        self.order: list[int] = []
        """See :attr:`RankTrace.order`."""
        self.operators = 0
        """Number of operators that ran."""

        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing within this context."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    supports_higher_order_operators = True
    """Compiled blocks call operators that call other operators: those that keep the state of random numbers."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: torch may compile while the record is active."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and record it; operators of DTensors are recorded as those of their local tensors."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        if self._paused or func.namespace == "prim":  # questions about a tensor, which autograd asks of fake ones
            return func(*args, **(kwargs or {}))
        self.operators += 1
        if is_higher_order(func):
            results = func(*args, **(kwargs or {}))
            if self.memory is not None:
                self.memory.operators = self.operators
                self.memory.saw(func.name(), results)
            return results
        name = func._schema.name.partition("::")[2]
        if func.namespace in _COLLECTIVES and name not in _SILENT:
            issued = _collective(name, args, functional=func.namespace != "c10d")
            if self.memory is not None:
                _check_devices(issued, args, self.memory.kind)
            self.order.append(self.vocabulary.setdefault(issued, len(self.vocabulary)))
        elif not self.order or self.order[-1] != COMPUTE:
            self.order.append(COMPUTE)
        if _takes_lists(func):
            _check_lists(name, args)
        if name == "wait_tensor":
            # The operator returns its argument; its implementation for fake tensors makes another tensor.
            func(*args, **(kwargs or {}))
            return args[0]
        if func._schema.name in _EXCHANGING:
            with self:
                results = run_watched(func, args, kwargs or {})
        else:
            results = func(*args, **(kwargs or {}))
        if self.memory is not None and _allocates(func):
            self.memory.operators = self.operators
            self.memory.saw(func._schema.name, results)
        return results

    def restart(self) -> None:
        """Forget the exchanges so far."""
        self.vocabulary.clear()
        self.order.clear()
        self.operators = 0


@functools.cache
def _allocates(func: Any) -> bool:
    """Return whether an operator has results that are not always its inputs or views of them."""
    return any(result.alias_info is None for result in func._schema.returns)


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
    elements = _exchanged(name, tensors) or tuple(tensor.numel() for tensor in tensors)
    return Collective(name, ranks, group.group_desc, elements, dtype, peer, *_parts(name, args, len(ranks)))


def _exchanged(name: str, tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """Return the elements that a product fused with an exchange takes part with; the ranks' factors may differ."""
    if name == "fused_all_gather_matmul":
        return (tensors[0].numel(),)
    if name == "fused_matmul_reduce_scatter":
        return (math.prod(tensors[0].shape[:-1]) * tensors[1].shape[-1],)
    return ()


def _check_devices(issued: Collective, args: tuple[Any, ...], kind: str) -> None:
    """Raise RuntimeError for a tensor on a device that the group does not serve, as torch does for a real group."""
    stray = next((tensor for tensor in _tensors(args) if tensor.device.type != kind), None)
    if stray is not None and len(issued.group) > 1:
        message = f"{issued.kind} of a tensor of {stray.numel()} elements on {stray.device.type}, in a group for {kind}"
        raise RuntimeError(f"{message} ({issued.purpose or 'no purpose'}; ranks {issued.group})")


@functools.cache
def _takes_lists(func: Any) -> bool:
    """Return whether an operator works on lists of tensors; of these torch's fake tensors do not compare devices."""
    return bool(func.namespace == "aten" and func._schema.name.startswith(("aten::_foreach_", "aten::_fused_")))


def _check_lists(name: str, args: tuple[Any, ...]) -> None:
    """Raise RuntimeError for lists of tensors on several devices, as the kernels do."""
    devices = {tensor.device for tensor in _tensors(args) if tensor.dim()}
    if len(devices) > 1:
        raise RuntimeError(f"{name} of tensors on {' and '.join(sorted(map(str, devices)))}")


def _parts(name: str, args: tuple[Any, ...], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the elements that an all-to-all sends to each rank and receives from each; empty for other operators."""
    if name not in ("alltoall_base_", "all_to_all_single"):
        return ()
    functional = name == "all_to_all_single"
    given, rows = (args[0], args[1:3]) if functional else (args[1], args[3:5])
    each = math.prod(given.shape[1:])
    equal = [len(given) // ranks] * ranks
    received, sent = (tuple(each * int(count) for count in counts or equal) for counts in rows)
    return sent, received


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
