"""Reasons about expert parallelism: what the exchanges of tokens cost, and what another way to cross nodes would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partool.cost.training.predict import time_terms
from partool.planner.search.price import Priced
from partool.work.stacks import sending_once

_TERM = "expert_parallel"


def expert_reasons(best: Priced) -> Iterator[str]:
    """Yield the sentences on a layout whose ranks share experts; none for other layouts.

    The runtime sends a token once to each of its experts. In exchanges in two levels each node gets one copy, which
    travels on over the links inside of the node (DeepSeek-V3, arXiv 2412.19437, section 3.2.2); their number of copies
    is that of tokens whose experts are drawn at random.
    """
    layout, job = best.layout, best.job
    if layout.expert == 1 or job.model.moe is None:
        return
    waits_s = best.terms_s.get(_TERM, 0.0)
    ranks, parts = layout.expert_ranks, layout.expert_tensor
    domains = -(-ranks // job.domain)
    one, several = ("node", "nodes") if job.domain == job.devices.per_node else ("rack", "racks")
    where = f"inside one {one}" if domains == 1 else f"over {domains} {several}"
    experts_of_rank = f"{job.model.moe.experts // layout.expert} of a layer's experts"
    if parts > 1:
        experts_of_rank = f"one of {parts} parts of {experts_of_rank}"
    yield (
        f"Experts over {ranks} ranks, {where}: each rank holds {experts_of_rank}, and waits "
        f"{waits_s / best.step_time_s:.1%} of the step for tokens."
    )
    if parts > 1:
        yield f"Each token is sent to all {parts} parts of its experts, {parts} times the bytes of whole experts."
    if domains == 1 or job.stack.sends_once:
        return
    levels = time_terms(replace(job, stack=sending_once(job.stack)), layout)
    once_s, step_s = levels.get(_TERM, 0.0), sum(levels.values())
    yield (
        f"Between {several} a token travels once per expert. Sent once per {one} and forwarded inside of it, which the "
        f"runtime does not do, tokens would take {once_s:.3g} s instead of {waits_s:.3g} s, and the step "
        f"{1.0 - step_s / best.step_time_s:.1%} less."
    )
