"""Closed formulas for the number of activations that exist at once; ``partool.schedule`` counts from action lists.

Sources: for 1F1B, Narayanan et al. (arXiv 2006.09503); for interleaved 1F1B in the order of Megatron-LM, Narayanan et
al. (arXiv 2104.04473, section 2.2); for ZB-H1, Qi et al. (arXiv 2401.10241). ZB-H1 keeps activations until weight
gradients have been computed from them, so every rank keeps as many activations as the first rank keeps with 1F1B.

For schedules whose action lists are found by search, the formulas are lower bounds. ZB-V (Qi et al., arXiv 2405.15362)
keeps as many activations as the first rank keeps with 1F1B. With Hanayo (Liu et al., SC'23), the first rank keeps the
activations of all its stages except the last for each micro-batch in flight, and the last rank those of all its stages;
these numbers are exact where there are no more micro-batches than ranks.
"""

from __future__ import annotations

import numpy as np

from partool.cost.case import ONE_AT_THE_END, SCHEDULES, Column, Layouts, among


def in_flight(layouts: Layouts, rank: Column) -> Column:
    """Return the maximum number of activations in flight on ``rank``, counted per stage and micro-batch."""
    pp, m, chunks = layouts.pp, layouts.accumulation, layouts.chunks
    one = np.minimum(m, pp - rank)
    warm_up = 2 * (pp - rank - 1) + (chunks - 1) * pp + 1
    interleaved = np.minimum(m * chunks, warm_up)
    schedule = layouts.schedule
    activations = np.where(schedule == SCHEDULES.index("interleaved"), interleaved, one * chunks)
    activations = np.where(schedule == SCHEDULES.index("zb-h1"), np.minimum(m, pp) * chunks, activations)
    activations = np.where(schedule == SCHEDULES.index("gpipe"), m * chunks, activations)
    under_way = np.minimum(np.minimum(m, pp), np.where(layouts.in_flight > 0, layouts.in_flight, pp))
    activations = np.where(schedule == SCHEDULES.index("zb-v"), under_way * chunks, activations)
    folded = np.where(rank == pp - 1, under_way * chunks, under_way * (chunks - 1) + 1)
    activations = np.where(schedule == SCHEDULES.index("hanayo"), folded, activations)
    return np.where(pp == 1, chunks, activations)


def first_stage_inputs(layouts: Layouts, activations: Column) -> Column:
    """Return how many of the first rank's ``activations`` belong to the first stage, if none is folded.

    Passes of a rank's stages take turns in groups of as many as ranks.
    """
    turns, rest = np.divmod(activations, layouts.pp * layouts.chunks)
    return turns * layouts.pp + np.minimum(rest, layouts.pp)


def handed_over(layouts: Layouts, rank: Column, activations: Column) -> Column:
    """Return how many of the ``activations`` in flight on ``rank`` have inputs that are no messages.

    Where stages are folded, the rank at either end runs two stages in succession: every second one of the first rank,
    from the first on, and of the last rank, from its second on, takes the place of a message. The last stage holds one
    micro-batch where its backward pass follows at once.
    """
    chunks = np.asarray(layouts.chunks)
    one = among(layouts.schedule, ONE_AT_THE_END)
    first = np.where(one, (activations - 1) * chunks / np.maximum(2 * (chunks - 1), 1), activations / 2)
    folded = np.where(rank == 0, first, np.where(rank == layouts.pp - 1, activations / 2, 0.0))
    return np.where(layouts.folded, folded, np.where(rank == 0, first_stage_inputs(layouts, activations), 0.0))
