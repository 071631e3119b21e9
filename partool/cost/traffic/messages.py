"""Collectives of tensor parallelism as data: the collectives of a pass over one micro-batch, and their ranks."""

from __future__ import annotations

from typing import Literal, NamedTuple

from partool.cost.case import Column, Layouts
from partool.cost.sequence import shares as sequence_shares
from partool.work.base import Workload

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
Axis = Literal["tp", "tp0", "tp1"]
"""Axis of the mesh: ``tp`` has all tensor ranks; in two dimensions ``tp0`` has d1 outer ranks, ``tp1`` d2 inner
ranks."""

Beside = Literal["", "results", "weights"]
"""Products that may run while a collective is in progress. ``''``: none; ``results``: a pair's second product, piece by
piece; ``weights``: the products that compute the weight gradients of a pair's first matrices."""


class Move(NamedTuple):
    """A collective of one pass over one micro-batch; ``rows`` × ``width`` is the size of the ranks' shared tensor."""

    kind: Collective
    axis: Axis
    rows: Column
    """Number of tokens; 0 where a layout does not have this collective."""
    width: Column
    times: Column = 1
    pieces: Column = 1
    """Number of parts of the rows, by ``torch.chunk``, that are sent one by one."""
    wide: bool = False
    """True for the loss's statistics, which are float32 or wider."""
    beside: Beside = ""


class Moves(NamedTuple):
    """The collectives of a layer, of the embedding or of the head, per micro-batch."""

    forward: list[Move]
    backward: list[Move]
    recompute: list[Move]
    """Collectives of a fully recomputed layer. The layer's last sum is left out: no gradient needs it."""


def tokens(job: Workload, layouts: Layouts) -> Column:
    """Return the number of tokens of a micro-batch on one rank."""
    return layouts.micro_batch * sequence_shares.tokens(job, layouts)
