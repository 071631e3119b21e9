"""The planner: turns a Spec into a Plan."""

from partool.planner.make import PlanResult, check_rest, make_plan

__all__ = ["PlanResult", "check_rest", "make_plan"]
