"""Pipeline schedules as data: lists of actions per rank, checked, timed and counted by pure functions."""

from partool.schedule.actions import Action, Schedule
from partool.schedule.generators import SCHEDULES, check, generate, order
from partool.schedule.makespan import in_flight, makespan
from partool.schedule.simulate import Event, StageTimes, Timeline, simulate
from partool.schedule.validate import validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Event",
    "Schedule",
    "StageTimes",
    "Timeline",
    "check",
    "generate",
    "in_flight",
    "makespan",
    "order",
    "simulate",
    "validate",
]
