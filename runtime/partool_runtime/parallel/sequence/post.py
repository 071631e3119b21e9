"""Tensors from rank to rank of a group, several at once."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from partool_runtime.parallel.sequence.waits import waiting


class Post:
    """What is on its way; made by :func:`send`."""

    def __init__(self, works: list[dist.Work], sent: list[torch.Tensor]) -> None:
        self._works = works
        self._sent = sent
        """Which must live until they were sent."""

    def wait(self) -> None:
        """Wait until all was sent and has come; on a GPU, let the current stream wait."""
        if self._works:
            with waiting():
                for work in self._works:
                    work.wait()
        self._sent.clear()


def send(
    letters: Iterable[tuple[int, torch.Tensor]], wanted: Iterable[tuple[int, torch.Tensor]], group: dist.ProcessGroup
) -> Post:
    """Begin to send tensors to places in a group, and to fill those ``wanted`` from places in it.

    What one rank sends to another arrives in the order in which it was sent. Tensors without elements do not travel.
    """
    outgoing = [(rank, tensor.contiguous()) for rank, tensor in letters if tensor.numel() > 0]
    operations = [dist.P2POp(dist.isend, tensor, group=group, group_peer=rank) for rank, tensor in outgoing]
    operations += [
        dist.P2POp(dist.irecv, tensor, group=group, group_peer=rank) for rank, tensor in wanted if tensor.numel() > 0
    ]
    works = dist.batch_isend_irecv(operations) if operations else []
    return Post(works, [tensor for _, tensor in outgoing])
