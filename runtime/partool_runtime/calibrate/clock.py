"""Timing of work that all ranks repeat at the same time."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from partool_runtime.calibrate.items import Item, Work

_MOST = 200
_LEAST = 3


@dataclass(frozen=True, slots=True)
class Timing:
    """Device, ranks and duration of the measurements."""

    device: torch.device
    world: int
    seconds: float
    """Target duration of the measurement of an item, in seconds."""

    def samples(self, item: Item) -> list[float]:
        """Return the seconds of every repeat of ``item`` on every rank; all ranks must call this with equal items.

        All ranks start together and make the same number of repeats, so that all work at the same time.
        """
        work = item.prepare()
        cuda = self.device.type == "cuda" and not item.host_clock
        once = max(self._times(work, 2, cuda=cuda)[1:])  # the first call allocates memory and chooses kernels
        repeats = self._agree(min(_MOST, max(_LEAST, int(self.seconds / max(once, 1e-9)))))
        local_s = self._times(work, repeats, cuda=cuda)
        if self.world == 1:
            return local_s
        gathered = [torch.zeros(repeats, dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(gathered, torch.tensor(local_s, dtype=torch.float64))
        if item.kind == "collective":  # a collective is done when its last rank is
            return [float(value) for value in torch.stack(gathered).amax(0)]
        return [float(value) for value in torch.cat(gathered)]

    def _agree(self, repeats: int) -> int:
        """Return the smallest value of ``repeats`` over all ranks; the call also synchronises the ranks."""
        if self.world == 1:
            return repeats
        count = torch.tensor([repeats])
        dist.all_reduce(count, dist.ReduceOp.MIN)
        return int(count.item())

    def _times(self, work: Work, repeats: int, *, cuda: bool) -> list[float]:
        if not cuda:
            marks = [time.perf_counter()]
            for _ in range(repeats):
                work()
                marks.append(time.perf_counter())
            return [after - before for before, after in itertools.pairwise(marks)]
        events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(events)]
