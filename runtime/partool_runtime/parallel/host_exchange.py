"""Exchanges gradients and parameters of FSDP2's units between CPUs over gloo, while the next unit computes.

gloo's threads move bytes while the training thread computes, but on a CPU, which has no streams, FSDP2 waits for
every collective.
gloo's reduce-scatter is an all-reduce after which each rank keeps only its part of the sum; this all-reduce sends twice
the necessary bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from partool_runtime.exchanges import Exchanges
from partool_runtime.parallel.comm import counted_as
from partool_runtime.torch_internals.collectives import gather_into, waiting

AHEAD = 1
"""Number of reductions in flight in a backward pass; each one holds two copies of a unit's unsharded gradients."""


class HostSum:
    """Sums gradients over CPU ranks; all units of a model share one such object.

    While ``overlap`` is true, the call that starts a sum returns before the sum is complete. Neither FSDP2 nor other
    code may read the sum before :meth:`finish`. So ``overlap`` may be true only in a step's first reduction (FSDP2
    accumulates nothing), and only if gradients are reduced in the type of the sharded parameters (FSDP2 casts nothing).
    """

    def __init__(self) -> None:
        self.overlap = False
        self._started: deque[tuple[Any, Callable[[], object]]] = deque()

    def finish(self) -> None:
        """Wait for all sums that were started."""
        self._finish(0)

    def _start(self, work: Any, then: Callable[[], object]) -> None:
        """Record a collective in flight; the function ``then`` completes its sum and keeps its tensors alive."""
        self._started.append((work, then))
        self._finish(AHEAD if self.overlap else 0)

    def _finish(self, most_in_flight: int) -> None:
        while len(self._started) > most_in_flight:
            work, then = self._started.popleft()
            with waiting("gradient_sync"):
                work.wait()
                then()


class ScatterSum(HostSum):
    """A reduce-scatter for ``FSDPModule.set_custom_reduce_scatter``.

    Each of n ranks sends to every other rank the part of the gradients that the receiver keeps. In total, a rank sends
    (n − 1)/n of the gradients. Then each rank adds up the received parts in the order of the ranks.
    """

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor; FSDP2 allocates its communication buffers by this method."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Start to sum ``input_tensor`` [N] over n ranks and to write this rank's part to ``output_tensor`` [N / n]."""
        del op, async_op  # gradients are always summed, and FSDP2 uses no handle
        received = torch.empty_like(input_tensor)
        with counted_as("reduce_scatter"):
            work = dist.all_to_all_single(received, input_tensor, group=group, async_op=True)

        def add_up(_sent: torch.Tensor = input_tensor) -> None:
            torch.sum(received.view(-1, output_tensor.numel()), 0, out=output_tensor)

        self._start(work, add_up)


class ReplicaSum(HostSum):
    """An all-reduce of replicas' gradients for :func:`~partool_runtime.torch_internals.fsdp.sum_replicas_by`.

    ``exchanges`` says in which steps replicas sum gradients; None means in every step.
    """

    def __init__(self, group: dist.ProcessGroup, exchanges: Exchanges | None = None) -> None:
        super().__init__()
        self._group, self._exchanges = group, exchanges

    def __call__(self, gradients: torch.Tensor) -> None:
        """Start to sum ``gradients`` [N] over the replicas, in place."""
        if self._exchanges is not None and not self._exchanges.sums_gradients:
            return
        work = dist.all_reduce(gradients, group=self._group, async_op=True)
        self._start(work, lambda: gradients)


class _Gather(dist.Work):
    """An all-gather in flight; :meth:`wait` records the waiting time."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the parameters of all ranks have arrived."""
        with waiting("parameter_gather"):
            self._work.wait()
        return True


class ParameterGather:
    """An all-gather for ``FSDPModule.set_custom_all_gather`` that records how long ranks wait."""

    allocate = ScatterSum.allocate

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> _Gather | None:
        """Gather ``input_tensor`` [N / n] of all ranks into ``output_tensor`` [N]."""
        if not async_op:
            gather_into(output_tensor, input_tensor, group, asynchronous=False)
            return None
        with waiting("parameter_gather"):
            return _Gather(gather_into(output_tensor, input_tensor, group, asynchronous=True))
