"""Number of micro-batches whose activations exist at once, in closed form; ``partool.schedule`` counts action lists.

1F1B: Narayanan et al. (arXiv 2006.09503); interleaved: Narayanan et al. (arXiv 2104.04473, section 2.2), as Megatron-LM
orders it; ZB-H1: Qi et al. (arXiv 2401.10241), which keeps activations until weight gradients have been computed from
them, so that every rank keeps as many activations as the first rank keeps with 1F1B.

For schedules whose action lists are found by search, the formulas are lower bounds. ZB-V (Qi et al., arXiv 2405.15362)
keeps as many activations as the first rank keeps with 1F1B. Hanayo (Liu et al., SC'23) keeps, per micro-batch in
flight, the activations of all stages except the last on the first rank, and of all stages on the last rank; this is
exact where there are no more micro-batches than ranks.
"""

from __future__ import annotations

import numpy as np

from partool.cost.case import SCHEDULES, Column, Layouts


def in_flight(layouts: Layouts, rank: Column) -> Column:
    """Return the maximum number of activations in flight on ``rank``; each belongs to one stage and one micro-batch."""
    pp, m, chunks = layouts.pp, layouts.accumulation, layouts.chunks
    one = np.minimum(m, pp - rank)
    warm_up = 2 * (pp - rank - 1) + (chunks - 1) * pp + 1
    interleaved = np.minimum(m * chunks, warm_up)
    schedule = layouts.schedule
    found = np.where(schedule == SCHEDULES.index("interleaved"), interleaved, one * chunks)
    found = np.where(schedule == SCHEDULES.index("zb-h1"), np.minimum(m, pp) * chunks, found)
    found = np.where(schedule == SCHEDULES.index("gpipe"), m * chunks, found)
    under_way = np.minimum(np.minimum(m, pp), np.where(layouts.in_flight > 0, layouts.in_flight, pp))
    found = np.where(schedule == SCHEDULES.index("zb-v"), under_way * chunks, found)
    folded = np.where(rank == pp - 1, under_way * chunks, under_way * (chunks - 1) + 1)
    found = np.where(schedule == SCHEDULES.index("hanayo"), folded, found)
    return np.where(pp == 1, chunks, found)
