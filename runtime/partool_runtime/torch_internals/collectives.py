"""Collectives as operators that compilers and recomputation recognise, and waits whose time is measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.distributed import distributed_c10d


def process_group(handle: Any) -> torch.distributed.ProcessGroup:
    """Return the process group that an operator's argument denotes, as a boxed script object or as a group name."""
    if isinstance(handle, str):
        return distributed_c10d._resolve_process_group(handle)  # type: ignore[attr-defined,arg-type]
    if isinstance(handle, torch.ScriptObject):
        return torch.distributed.ProcessGroup.unbox(handle)
    return cast(torch.distributed.ProcessGroup, handle)


def is_complete(work: torch.distributed.Work) -> bool:
    """Return whether a transfer is complete; a dry run, whose transfers never run, replaces this function."""
    return work.is_completed()


def run_watched(operator: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """Run a custom operator's implementation such that dispatch modes see the operators that it calls.

    By default a mode sees one operator, whose implementation runs with the mode disabled; no public API changes this
    default.
    """
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    key = torch._C.DispatchKey.CUDA if any(a.is_cuda for a in tensors) else torch._C.DispatchKey.CPU
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def start_sum(x: torch.Tensor, group_name: str, *, in_place: bool, kind: str = "sum") -> torch.Tensor:
    """Start the sum or maximum (``kind``) of a tensor over a group's ranks; :func:`finished` returns the result.

    The functional collectives are documented under a private name, and are the only ones that ``torch.compile`` and
    selective recomputation see as operators. Use the returned tensor also if ``in_place``, since recomputation returns
    the saved result instead of ``x``.
    """
    collectives = torch.ops._c10d_functional
    if in_place and not torch.compiler.is_compiling():
        return cast(torch.Tensor, collectives.all_reduce_(x, kind, group_name))
    return cast(torch.Tensor, collectives.all_reduce(x, kind, group_name))


def start_gather(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Start to all-gather the ranks' tensors along dimension 0; see :func:`finished`."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), ranks, group_name)
    return cast(torch.Tensor, gathered)


def start_scatter_sum(x: torch.Tensor, ranks: int, group_name: str) -> torch.Tensor:
    """Start to reduce-scatter a tensor in equal parts of dimension 0; see :func:`finished`."""
    scattered = torch.ops._c10d_functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group_name)
    return cast(torch.Tensor, scattered)


def start_exchange(x: torch.Tensor, sent: list[int], received: list[int], group_name: str) -> torch.Tensor:
    """Start an all-to-all along dimension 0, with ``sent`` rows to each rank in order; see :func:`finished`.

    The result holds ``received`` rows from each rank, in the order of the ranks.
    """
    exchanged = torch.ops._c10d_functional.all_to_all_single(x, received, sent, group_name)
    return cast(torch.Tensor, exchanged)


def finished(x: torch.Tensor, term: str = "tensor_parallel") -> torch.Tensor:
    """Wait for the result of a ``start_…`` function (on a GPU, make the current stream wait), and return it.

    ``term`` is the key of :data:`partool.plan.terms.TIME_TERMS` to which the time is added.
    """
    if torch.compiler.is_compiling() or _Waits.around is None:
        return cast(torch.Tensor, torch.ops._c10d_functional.wait_tensor(x))
    with _Waits.around(term):
        return cast(torch.Tensor, torch.ops._c10d_functional.wait_tensor(x))


def waiting(term: str) -> AbstractContextManager[None]:
    """Return a context manager that counts a wait's time for ``term``; it cannot be used in compiled code."""
    return nullcontext() if _Waits.around is None else _Waits.around(term)


class _Waits:
    around: Callable[[str], AbstractContextManager[None]] | None = None


def watch_waits(around: Callable[[str], AbstractContextManager[None]] | None) -> None:
    """Enter the context manager ``around(term)`` at every :func:`finished` and :func:`waiting`; None stops that.

    Waits in compiled code are not timed.
    """
    _Waits.around = around


def has_symmetric_products() -> bool:
    """Return whether this torch has matrix products fused with exchanges; no public module contains such products."""
    names = ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    return hasattr(torch.ops, "symm_mem") and all(hasattr(torch.ops.symm_mem, name) for name in names)


def gathered_products(
    x: torch.Tensor, factors: list[torch.Tensor], dim: int, group_name: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the ranks' tensors gathered along ``dim``, and their products with ``factors``, made as parts arrive."""
    gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, factors, dim, group_name, return_A=True)
    return gathered, products


def scattered_product(x: torch.Tensor, factor: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    """Return this rank's part along ``dim`` of the sum over ranks of ``x @ factor``; parts are sent once computed."""
    fused = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, factor, "sum", dim, group_name)
    return cast(torch.Tensor, fused)


def summing_operators() -> frozenset[Any]:
    """Return the collectives whose results selective recomputation keeps."""
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
    """Return the all-to-all operators by which ranks that share sequences exchange tokens for heads."""
    return frozenset({torch.ops._c10d_functional.all_to_all_single.default})


def in_memory_store() -> Any:
    """Return a rendezvous store for a world of one rank, without port or file; torch exports it without a type."""
    return torch.distributed.HashStore()  # type: ignore[attr-defined]


def gather_into(full: torch.Tensor, part: torch.Tensor, ranks: Any, *, asynchronous: bool) -> Any:
    """All-gather the ranks' ``part`` into ``full``, in rank order; torch 2.13 has a new name for it."""
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    return gather(full, part, group=ranks, async_op=asynchronous)


def scatter_sum_into(part: torch.Tensor, full: torch.Tensor, ranks: Any) -> None:
    """Reduce-scatter the ranks' ``full`` into ``part``; torch 2.13 has a new name for it."""
    scatter = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
    scatter(part, full, group=ranks)
