"""Rows that ranks exchange to bring tokens to their experts."""

from __future__ import annotations

import numpy as np

from partool.cost.case import PADDED, Column, Layouts
from partool.work.base import Workload


def rows_sent(job: Workload, layouts: Layouts) -> Column:
    """Return the rows that a rank sends or gets, relative to one for each choice of its tokens.

    Padded exchanges have rows of fixed number, others as many as the busiest rank's experts get (``job.load``).
    """
    padded = np.asarray(layouts.expert_exchange) == PADDED
    return np.where(padded, rank_capacity(job, layouts.expert_ranks), job.load)


def rows_here(job: Workload, layouts: Layouts) -> Column:
    """Return the rows that a rank's experts get, relative to its tokens' choices; 1 if the rank has all experts."""
    return np.where(np.asarray(layouts.ep) > 1, rows_sent(job, layouts), 1.0)


def rows_back(job: Workload, layouts: Layouts) -> Column:
    """Return the rows that come back to a rank's tokens, relative to their choices."""
    padded = np.asarray(layouts.expert_exchange) == PADDED
    return np.where(padded, rank_capacity(job, layouts.expert_ranks), 1.0)


def rank_capacity(job: Workload, ranks: Column) -> Column:
    """Return the rows of padded exchanges relative to an even share; at most all, one for each of ``ranks``."""
    return np.minimum(np.inf if job.expert_rank_capacity is None else job.expert_rank_capacity, ranks)
