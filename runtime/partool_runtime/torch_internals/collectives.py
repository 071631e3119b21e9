"""Collectives as operators that compilers and recomputation see, and waits for them that can be watched."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.distributed import distributed_c10d


def process_group(handle: Any) -> torch.distributed.ProcessGroup:
    """Return the process group that an operator was given: a boxed script object, or functional collectives' name."""
    if isinstance(handle, str):
        return distributed_c10d._resolve_process_group(handle)  # type: ignore[attr-defined,arg-type]
    if isinstance(handle, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(handle)
    return cast(torch.distributed.ProcessGroup, handle)


def run_watched(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a custom operator's own code so that dispatch modes see what it calls.

    To a mode it is one operator, whose code runs with the mode set aside; no public way leads around that.
    """
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    key = torch._C.DispatchKey.CUDA if any(a.is_cuda for a in tensors) else torch._C.DispatchKey.CPU
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def start_sum(x: torch.Tensor, group_name: str, *, in_place: bool, kind: str = "sum") -> torch.Tensor:
    """Begin to sum a tensor (or ``kind="max"``) over a group's ranks; the result is there after :func:`finished`.

    The functional collectives are documented under a private name, and are the only ones that ``torch.compile`` and
    selective recomputation see as operators. The result must be taken from here also where it is in place: a
    recomputation hands out the saved one.
    """
    collectives = torch.ops._c10d_functional
    if in_place and not torch.compiler.is_compiling():
        return cast(torch.Tensor, collectives.all_reduce_(x, kind, group_name))
    return cast(torch.Tensor, collectives.all_reduce(x, kind, group_name))


def start_gather(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Begin to gather the ranks' tensors, one after the other along dimension 0; see :func:`finished`."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), ranks, group_name)
    return cast(torch.Tensor, gathered)


def start_scatter_sum(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Begin to sum a tensor over ranks, of which each gets an equal part of dimension 0; see :func:`finished`."""
    scattered = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group_name)
    return cast(torch.Tensor, scattered)


def start_exchange(x: torch.Tensor, sent: list[int], received: list[int], group_name: str) -> torch.Tensor:
    """Begin to send stretches of dimension 0, ``sent`` rows to each rank in order; see :func:`finished`.

    The result holds ``received`` rows of each rank, one after the other.
    """
    exchanged = torch.ops._c10d_functional.all_to_all_single(x, received, sent, group_name)
    return cast(torch.Tensor, exchanged)


def finished(x: torch.Tensor, term: str = "tensor_parallel") -> torch.Tensor:
    """Wait for what a ``start_…`` function has returned (on a GPU, let the current stream wait), and return it.

    ``term`` is the one of :data:`partool.plan.terms.TIME_TERMS` that the time belongs to.
    """
    if torch.compiler.is_compiling() or _Waits.around is None:
        return cast(torch.Tensor, torch.ops._c10d_functional.wait_tensor(x))
    with _Waits.around(term):
        return cast(torch.Tensor, torch.ops._c10d_functional.wait_tensor(x))


def waiting(term: str) -> AbstractContextManager[None]:
    """Return what is entered around a wait of another kind, whose time belongs to ``term``; not in compiled code."""
    return nullcontext() if _Waits.around is None else _Waits.around(term)


class _Waits:
    around: Callable[[str], AbstractContextManager[None]] | None = None


def watch_waits(around: Callable[[str], AbstractContextManager[None]] | None) -> None:
    """Enter what ``around`` returns for a term at every :func:`finished` and :func:`waiting`; None ends it.

    Compiled code is not watched.
    """
    _Waits.around = around


def has_symmetric_products() -> bool:
    """Tell whether this torch has products fused with exchanges; they lie in no public module."""
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    return hasattr(torch.ops, "symm_mem") and all(hasattr(torch.ops.symm_mem, name) for name in names)


def gathered_products(
    x: torch.Tensor, factors: list[torch.Tensor], dim: int, group_name: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the ranks' tensors gathered along ``dim``, and its products with each factor, computed as parts arrive."""
    whole, products = torch.ops.symm_mem.fused_all_gather_matmul(x, factors, dim, group_name, return_A=True)
    return whole, products


def scattered_product(x: torch.Tensor, factor: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum over ranks of ``x @ factor``, parts of which leave when done."""
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, factor, "sum", dim, group_name)
    return cast(torch.Tensor, fused)


def summing_operators() -> frozenset[Any]:
    """Return the collectives of passes whose results are worth keeping."""
    collectives = torch.ops._c10d_functional
    return frozenset(
        {
            collectives.all_reduce.default,
            collectives.all_reduce_.default,
            collectives.all_gather_into_tensor.default,
            collectives.reduce_scatter_tensor.default,
            collectives.all_to_all_single.default,
        }
    )


def exchanging_operators() -> frozenset[Any]:
    """Return the collectives that trade one axis of a tensor for another between ranks that share sequences."""
    return frozenset({torch.ops._c10d_functional.all_to_all_single.default})


def in_memory_store() -> Any:
    """Return a rendezvous store for a world of one rank: no port, no file. It is exported, but not typed so."""
    return torch.distributed.HashStore()  # type: ignore[attr-defined]


def gather_into(whole: torch.Tensor, part: torch.Tensor, ranks: Any, *, asynchronous: bool) -> Any:
    """Gather what ranks hold into ``whole``, one after the other; torch 2.13 has a new name for it."""
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    return gather(whole, part, group=ranks, async_op=asynchronous)


def scatter_sum_into(part: torch.Tensor, whole: torch.Tensor, ranks: Any) -> None:
    """Sum what ranks hold, and leave each its part of the sum; torch 2.13 has a new name for it."""
    scatter = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
    scatter(part, whole, group=ranks)
