"""Embeddings tied across pipeline ranks: two copies of one parameter, with one gradient."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import nn

from partool.schedule import Schedule
from partool_runtime.hf.stages import HfParts
from partool_runtime.mesh import Ranks
from partool_runtime.model import DecoderParts
from partool_runtime.parallel.comm import sum_over
from partool_runtime.torch_internals.tensors import local


class TiedGradients:
    """Adds up the gradients of the first stage's embedding and of its copy in the last stage.

    Both ranks then hold the same bits and make the same update, so the copies never differ.
    """

    def __init__(self, embed: nn.Module, group: dist.ProcessGroup) -> None:
        self._embed, self._group = embed, group

    @classmethod
    def between(cls, parts: DecoderParts | HfParts, schedule: Schedule, ranks: Ranks) -> TiedGradients | None:
        """Return what this rank does; None where it holds no copy. A collective of all ranks."""
        first, last = schedule.placement[0], schedule.placement[-1]
        if first == last:
            return None
        mine = None
        for pipeline in ranks.pipelines:
            both = [pipeline[first], pipeline[last]]
            group = dist.new_group(both)
            mine = group if ranks.rank in both else mine
        if mine is None or parts.embed is None:
            return None
        return cls(parts.embed, mine)

    def add_up(self) -> None:
        """Sum the gradients, after they were reduced over data-parallel ranks."""
        gradient = cast(torch.Tensor, self._embed.weight).grad
        if gradient is not None and local(gradient).numel() > 0:
            sum_over(local(gradient), self._group)
