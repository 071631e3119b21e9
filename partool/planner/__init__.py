"""The planner: turns a Spec into a Plan."""

from partool.planner.make import PlanResult, make_plan

__all__ = ["PlanResult", "make_plan"]
