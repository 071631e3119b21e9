"""Replacement of attention in layers whose ranks exchange keys and values."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from partool_runtime.errors import ConfigurationError
from partool_runtime.model.attention import AttentionLayout, Tokens
from partool_runtime.model.operator import attend_by, register
from partool_runtime.parallel.comm import SEQUENCE
from partool_runtime.parallel.sequence.types import Exchange
from partool_runtime.torch_internals import collectives


class Post:
    """A transfer in flight; made by :func:`send`."""

    def __init__(self, works: list[dist.Work], sent: list[torch.Tensor]) -> None:
        self._works = works
        self._sent = sent
        """Tensors that must live until they are sent."""

    def wait(self) -> None:
        """Wait until all sends and receives are complete; on a GPU, make the current stream wait."""
        if self._works:
            with waiting():
                for work in self._works:
                    work.wait()
        self._sent.clear()


def send(
    letters: Iterable[tuple[int, torch.Tensor]], wanted: Iterable[tuple[int, torch.Tensor]], group: dist.ProcessGroup
) -> Post:
    """Start to send the tensors ``letters`` to ranks of a group, and to receive into the tensors ``wanted``.

    Messages between two ranks arrive in the order of sending. Tensors without elements are not sent.
    """
    outgoing = [(rank, tensor.contiguous()) for rank, tensor in letters if tensor.numel() > 0]
    operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=rank) for rank, tensor in outgoing]
    operations += [
        dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank) for rank, tensor in wanted if tensor.numel() > 0
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Post(works, [tensor for _, tensor in outgoing])


def finished(x: torch.Tensor) -> torch.Tensor:
    """See :func:`partool_runtime.torch_internals.collectives.finished`."""
    return collectives.finished(x, SEQUENCE)


def waiting() -> AbstractContextManager[None]:
    """Return a context manager that measures the waiting time for transfers other than functional collectives."""
    return collectives.waiting(SEQUENCE)


class ExchangeAttend:
    """Attention through an :class:`Exchange`; compilers and dispatch modes see the attention as one operator."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.name = register(exchange)

    def __call__(
        self,
        q_BNSD: torch.Tensor,
        k_BKSD: torch.Tensor,
        v_BKSD: torch.Tensor,
        layout: AttentionLayout,
        tokens: Tokens | None = None,
        *,
        sinks_N: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of this rank's queries, ``[B, N, S, D]``.

        Raises ConfigurationError PT653 for a layer that attends along the rows or columns of a grid.
        """
        if layout.axis is not None:
            fix = "Use parallel.sequence: {method: dsp} or ulysses."
            raise ConfigurationError("PT653", "this method cannot attend along the rows or columns of a grid", fix)
        documents_BL = None if tokens is None else tokens.documents_BL
        return attend_by((q_BNSD, k_BKSD, v_BKSD), layout, documents_BL, self.name, sinks_N)
