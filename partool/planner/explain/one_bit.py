"""What an optimizer exchanges in its steps, and what 0/1 Adam would gain where the network is slow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from partool.cost import collective
from partool.cost.memory.fit import GREEN
from partool.cost.training.traffic import exchanges
from partool.layout.one_bit import CHUNK
from partool.layout.parameters import count, parameters
from partool.planner.explain.summary import summary
from partool.planner.problem import Problem
from partool.planner.search.enumeration import build
from partool.planner.search.layouts import layout_of
from partool.planner.search.price import Priced
from partool.planner.search.prices import Prices
from partool.spec.checks import check_optimizer

NAME = "zero_one_adam"
LEAST_GAIN = 0.25
"""Share of the step from which the plan names what 0/1 Adam would save: less is within a prediction's error."""
_STATE = 7
"""Numbers of a master's size that a rank keeps per parameter at least: weight, gradient, two moments, error, moves, and
the weight of the last exchange. Tensor and pipeline ranks of a node may share them."""
_MIB = 2**20
_MOST_GROUPS, _GROUPS, _EXACT = 8192, 64, 8
"""Numbers of groups of layouts with 0/1 Adam whose memory is looked at, whose policies are priced, and of layouts that
are priced exactly."""


def one_bit_reasons(problem: Problem, best: Priced) -> list[str]:
    """Return a sentence on the exchanges of 0/1 Adam, or on what it would gain in place of AdamW."""
    return list(_kinds(best) if problem.one_bit else _gain(problem, best))


def _kinds(best: Priced) -> Iterator[str]:
    by_kind = exchanges(best.job, best.layout)
    full, bits, local = (by_kind[kind] for kind in ("full", "one_bit", "local"))
    yield (
        f"Exchanges: {full.steps:,} steps average gradients ({full.sent_bytes / _MIB:,.1f} MiB sent by a rank), "
        f"{bits.steps:,} send one bit per parameter ({bits.sent_bytes / _MIB:,.1f} MiB), {local.steps:,} send nothing; "
        "times and bytes per step are means over the run."
    )
    if best.layout.mesh.tp > 1:
        yield (
            f"Scales: one per {CHUNK:,} elements of the part of a matrix that a tensor rank holds. With another tensor "
            f"degree than {best.layout.mesh.tp} the scales are others, and losses differ a little."
        )


def _gain(problem: Problem, best: Priced) -> Iterator[str]:
    limit_s = (1.0 - LEAST_GAIN) * best.step_time_s
    priced = _priced(_with_bits(problem), limit_s) if _may_gain(problem, best) else []
    fast = [one for one in priced if one.step_time_s <= limit_s and one.safe]
    if not fast:
        return
    one_bit = min(fast, key=lambda one: one.step_time_s)
    gain = 1.0 - one_bit.step_time_s / best.step_time_s
    sent = one_bit.time.traffic_bytes["gradient_sync"] / _MIB
    yield (
        f"Slow links: optimizer: {{name: {NAME}}} would take {one_bit.step_time_s:.3g} s a step on average, {gain:.0%} "
        f"less, as {summary(one_bit.layout)}{_compared(len(priced))}; a rank would send {sent:,.1f} MiB a step to "
        "data-parallel ranks. The plan keeps adamw: fewer bits change how a model learns."
    )


def _compared(layouts: int) -> str:
    return f", the fastest of {layouts} layouts priced with it" if layouts > 1 else ", the one layout priced with it"


def _priced(problem: Problem, limit_s: float) -> list[Priced]:
    """Return exact prices of the layouts with the least bounds of time, none of them above ``limit_s``.

    A search would find the best layout; for a sentence on what the plan does not do, a few good ones are enough.
    """
    space = build(problem)
    able = bool(space.runnable.any() and space.runnable_policies.any())
    prices = Prices(problem, space, space.runnable, space.runnable_policies) if able else Prices(problem, space)
    least_s = prices.least_times() if len(prices.groups) and len(prices.policies) else np.zeros(0)
    order = np.argsort(least_s, kind="stable")
    near = prices.groups[order[least_s[order] <= limit_s]][:_MOST_GROUPS]
    near = near[prices.least_memory(near)[0] <= problem.capacity_bytes][:_GROUPS]
    group, policy = np.repeat(near, len(prices.policies)), np.tile(prices.policies, len(near))
    allowed = space.allowed(group, policy) if len(near) else np.zeros(0, dtype=bool)
    group, policy = group[allowed], policy[allowed]
    bound_s, _ = prices.columns(group, policy, GREEN)
    first = [at for at in np.argsort(bound_s, kind="stable")[:_EXACT] if bound_s[at] <= limit_s]
    return [Priced(problem, layout_of(problem, space.rows(int(group[at]), int(policy[at])))) for at in first]


def _may_gain(problem: Problem, best: Priced) -> bool:
    """Return False where a search for layouts of 0/1 Adam cannot find one that takes much less time and fits."""
    spec, job = problem.spec, best.job
    if spec.optimizer.name != "adamw" or spec.engine != "partool":
        return False
    if any(True for _ in check_optimizer(_with_bits(problem).spec)):
        return False
    elements = count(parameters(problem.model))
    whole_s = collective.all_reduce_s(
        job, np.float64(elements * job.master_bytes), collective.group(job, problem.world_size, 1)
    )
    state_bytes = _STATE * job.master_bytes * elements / problem.devices.per_node
    return bool(whole_s >= LEAST_GAIN * best.step_time_s and state_bytes < problem.devices.memory_bytes)


def _with_bits(problem: Problem) -> Problem:
    optimizer = problem.spec.optimizer.model_copy(update={"name": NAME})
    return replace(problem, spec=problem.spec.model_copy(update={"optimizer": optimizer}))
