"""Pipeline schedules as data (one list of actions per rank); pure functions check, simulate and measure schedules."""

from partool.schedule.actions import COMPUTE, Action, Order, Schedule, peer, with_transfers
from partool.schedule.begun import begun_by_ranks
from partool.schedule.faults import ScheduleFault
from partool.schedule.generators import check, generate, nearest, order, rank_of
from partool.schedule.makespan import followed, in_flight, layers_in_flight, makespan, span_s
from partool.schedule.posting import connected, posts
from partool.schedule.simulate import StageTimes, TimedAction, Timeline, simulate
from partool.schedule.text import (
    ScheduleTextError,
    cell,
    columns_of,
    diff,
    from_text,
    read_cell,
    rows_of,
    schedule_hash,
    to_text,
)
from partool.schedule.transform import Frontier, after, cut, forward_only, remap, without_backward
from partool.schedule.validate import problems, receive_depth, validate

__all__ = [
    "COMPUTE",
    "Action",
    "Frontier",
    "Order",
    "Schedule",
    "ScheduleFault",
    "ScheduleTextError",
    "StageTimes",
    "TimedAction",
    "Timeline",
    "after",
    "begun_by_ranks",
    "cell",
    "check",
    "columns_of",
    "connected",
    "cut",
    "diff",
    "followed",
    "forward_only",
    "from_text",
    "generate",
    "in_flight",
    "layers_in_flight",
    "makespan",
    "nearest",
    "order",
    "peer",
    "posts",
    "problems",
    "rank_of",
    "read_cell",
    "receive_depth",
    "remap",
    "rows_of",
    "schedule_hash",
    "simulate",
    "span_s",
    "to_text",
    "validate",
    "with_transfers",
    "without_backward",
]
