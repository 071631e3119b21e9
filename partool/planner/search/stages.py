"""Parts of a space that a search looks at first: a good layout that is known early leaves little of the rest.

Bounds are closest where little is open: layouts without pipeline ranks, and common schedules, that offload nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import SCHEDULES, among
from partool.planner.search.space import Space

_COMMON = (SCHEDULES.index("1f1b"), SCHEDULES.index("interleaved"))
_LEAST = 1024
"""Number of groups up to which a space is searched at once."""


def stages(space: Space, groups: Any, policies: Any) -> Iterator[tuple[NDArray[np.intp], NDArray[np.bool_]]]:
    """Yield places in ``groups``, and a mask of ``policies``, of each part to search before all of them.

    Layouts without pipeline ranks come first without offload, then with it; then common schedules without offload.
    """
    if len(groups) <= _LEAST:
        return
    pp, schedule, in_flight = (
        np.broadcast_to(np.asarray(column), space.size)[groups]
        for column in (space.groups.pp, space.groups.schedule, space.groups.in_flight)
    )
    table = space.policies
    moved = (1.0 - table.gpu_fraction + table.parameters + table.activations)[policies]
    every = np.ones(len(policies), dtype=bool)
    stays = moved == moved.min()
    alone = pp == 1
    common = ~alone & np.asarray(among(schedule, _COMMON)) & (in_flight == 0)
    for some, few in ((alone, stays), (alone, every), (common, stays)):
        if 0 < int(some.sum()) < len(groups) or not few.all():
            yield np.flatnonzero(some), few
