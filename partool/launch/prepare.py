"""Prepares a plan for a target: findings about its launch, its plans for other numbers of nodes, its commands here."""

from __future__ import annotations

from partool.diagnostics.record import Diagnostic
from partool.plan.run import PLAN_FILE
from partool.plan.types import Plan
from partool.render.job import Rendered
from partool.strategies.targets import RESIZABLE


def aimed_at(plan: Plan, target: str | None) -> Plan:
    """Return the plan for a target; the plan itself for None, or if the target is its own."""
    if target is None or target == plan.launch.target:
        return plan
    return plan.model_copy(update={"launch": plan.launch.model_copy(update={"target": target})})


def about_launch(plan: Plan) -> list[Diagnostic]:
    """Return the planner's findings about ``plan.launch``, such as its target, machines and time limits."""
    from partool.planner.findings.stopping import check_duration, check_watchdog
    from partool.planner.rules.launching import check_launch
    from partool.planner.stopping import forecast

    findings = check_launch(plan.launch, plan.devices)
    findings += check_duration(plan.launch, forecast(plan))
    findings += check_watchdog(plan.launch, plan.prediction.upper_step_s)
    if _resizable(plan):
        from partool.planner.elastic import check_elastic  # prices layouts, which needs numpy

        findings += check_elastic(plan)
    return findings


def sizes_of(plan: Plan) -> dict[int, Plan]:
    """Return the plans of an elastic job for fewer nodes, by number of nodes; empty for other jobs."""
    if not _resizable(plan):
        return {}
    from partool.planner.elastic import sizes

    return sizes(plan)[0]


def commands_here(plan: Plan) -> Rendered:
    """Return the commands that a launch on this machine runs, and the plan."""
    from partool.launch.local.target import LocalTarget

    shown = LocalTarget().describe(plan, None, resume=False)
    return Rendered("commands.txt", {"commands.txt": shown + "\n", PLAN_FILE: plan.to_json()})


def _resizable(plan: Plan) -> bool:
    return plan.launch.min_nodes is not None and plan.launch.target in RESIZABLE
