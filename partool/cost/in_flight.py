"""Micro-batches whose activations exist at once, in closed form; ``partool.schedule`` counts them from action lists.

1F1B: Narayanan et al. (arXiv 2006.09503); interleaved: Narayanan et al. (arXiv 2104.04473, section 2.2), as Megatron-LM
orders it; ZB-H1: Qi et al. (arXiv 2401.10241), which keeps activations until the weights' half of the backward pass has
read them, on every rank as many as 1F1B keeps on its first.
"""

from __future__ import annotations

import numpy as np

from partool.cost.case import SCHEDULES, Column, Layouts


def in_flight(layouts: Layouts, rank: Column) -> Column:
    """Return the most micro-batches of one chunk that a pipeline rank (a column) has in flight."""
    pp, m, chunks = layouts.pp, layouts.accumulation, layouts.chunks
    one = np.minimum(m, pp - rank)
    warm_up = 2 * (pp - rank - 1) + (chunks - 1) * pp + 1
    interleaved = np.minimum(m * chunks, warm_up)
    schedule = layouts.schedule
    found = np.where(schedule == SCHEDULES.index("interleaved"), interleaved, one * chunks)
    found = np.where(schedule == SCHEDULES.index("zb-h1"), np.minimum(m, pp) * chunks, found)
    found = np.where(schedule == SCHEDULES.index("gpipe"), m * chunks, found)
    return np.where(pp == 1, chunks, found)
