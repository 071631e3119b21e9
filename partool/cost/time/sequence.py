"""Seconds of what sequence parallelism sends around one attention layer, and what of it compute hides."""

from __future__ import annotations

import numpy as np

from partool.cost.case import Layouts, TrainingJob
from partool.cost.kinds import Kind
from partool.cost.sequence.types import PRICED, ExchangeTime, SequencePass, price_of


def exchange(job: TrainingJob, layouts: Layouts, kind: Kind, *, backward: bool) -> ExchangeTime:
    """Return what ranks that share a sequence send for one layer."""
    found, several = ExchangeTime(), np.asarray(layouts.cp) > 1
    if not np.any(several):
        return found
    one, method = SequencePass(job, layouts, kind, backward), np.asarray(layouts.sequence_method)
    for index, name in PRICED:
        there = several & (method == index)
        if np.any(there):
            found.add(there, price_of(name).exchange(one))
    return found
