"""Reasons about expert parallelism: what the exchanges of tokens cost, and what another way to cross nodes would."""

from __future__ import annotations

from collections.abc import Iterator

from partool.cost.training.predict import time_terms
from partool.layout.mesh import fill_nodes
from partool.plan.layout import Layout
from partool.planner.search.price import Priced

_TERM = "expert_parallel"


def expert_reasons(best: Priced) -> Iterator[str]:
    """Yield the sentences on a layout whose ranks share experts; none for other layouts.

    Where ranks of several nodes share experts, the exchanges of the other kinds are priced beside the layout's.
    """
    layout, job = best.layout, best.job
    if layout.expert == 1 or job.model.moe is None:
        return
    waits_s = best.terms_s.get(_TERM, 0.0)
    ranks, parts = layout.expert_ranks, layout.expert_tensor
    domains = -(-ranks // job.domain)
    one, several = ("node", "nodes") if job.domain == job.devices.per_node else ("rack", "racks")
    where = f"inside one {one}" if domains == 1 else f"over {domains} {several}"
    numbers = " or ".join(str(number // layout.expert) for number in job.model.expert_numbers)
    experts_of_rank = f"{numbers} of a layer's experts"
    if parts > 1:
        experts_of_rank = f"one of {parts} parts of {experts_of_rank}"
    yield (
        f"Experts over {ranks} ranks, {where}: each rank holds {experts_of_rank}, and waits "
        f"{waits_s / best.step_time_s:.1%} of the step for tokens."
    )
    if parts > 1:
        yield f"Each token is sent to all {parts} parts of its experts, {parts} times the bytes of whole experts."
    if layout.expert_rank_capacity is not None:
        yield from _padded(layout, layout.expert_rank_capacity)
        return
    if domains == 1 or job.stack.sends_once:
        return
    if not fill_nodes(ranks, job.domain):
        yield f"Between {several} a token travels once per expert: these ranks do not fill {several}, as others need."
        return
    words = {
        "direct": f"a token travels once per expert between {several}",
        "node_first": f"a token crosses once to each {one} of its experts, and their results return one by one",
        "node_first_summed": f"a token crosses once to each {one} of its experts, which returns one sum",
    }
    times = {name: time_terms(job, layout.changed({"expert_exchange": name})).get(_TERM, 0.0) for name in words}
    chosen, other = layout.expert_exchange, "node_first" if layout.expert_exchange == "direct" else "direct"
    yield (
        f"expert_exchange: {chosen}: {words[chosen]}. Tokens take {times[chosen]:.3g} s of the step, with {other} "
        f"{times[other]:.3g} s."
    )
    if chosen != "node_first_summed":
        yield (
            f"With expert_exchange: node_first_summed, whose sums round in another order, they would take "
            f"{times['node_first_summed']:.3g} s."
        )


def _padded(layout: Layout, capacity: float) -> Iterator[str]:
    """Yield what rows of fixed number cost and save."""
    drops = "no choice is dropped" if capacity >= layout.expert_ranks else "choices beyond are dropped and counted"
    compiled = ", and layers of experts are compiled" if layout.compile == "block" else ""
    yield (
        f"expert_exchange: padded: each rank sends each {capacity:g} times an even share of rows; {drops}. "
        f"The host waits for no numbers{compiled}."
    )
