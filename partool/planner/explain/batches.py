"""A finding about a global batch whose divisors leave no good layout, though a batch beside it does."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod

from partool.diagnostics.record import Diagnostic
from partool.planner.explain.front import least_bound
from partool.planner.explain.summary import summary
from partool.planner.problem import Problem, divisors
from partool.planner.search.price import Priced
from partool.planner.search.solve import Solution

_NEAR = 0.125
"""Largest change of the batch that is proposed, as a share of the batch."""
_WORTH = 0.05
"""Least share of the time per token that a proposed batch saves."""


def awkward_batch(problem: Problem, best: Priced, plain: Solution) -> Iterator[Diagnostic]:
    """Yield a finding if a batch beside that of the spec is predicted to take clearly less time per token.

    Data-parallel ranks have equal numbers of sequences. If the batch has few divisors in common with the ranks, the
    ranks have to share layers, matrices or sequences instead. Both batches are priced by the same short search, the
    other one on the meshes that the spec's batch rules out: on the rest, both take about as long per token.
    ``plain`` is the solution without relaxed constraints, whose bounds serve the spec's batch.
    """
    batch = problem.spec.training.global_batch
    ranks = problem.world_size // prod(problem.pinned_degrees.values())
    near = beside(batch, ranks)
    if not near or best.layout.mesh.dp < gcd(batch, ranks):  # the batch would allow more ranks than are taken
        return
    here = least_bound(problem, plain.search if plain.problem is problem else None)
    if here is None:
        return
    # A longer step saves less than what is worth a finding.
    longest = {other: (1.0 - _WORTH) * here.step_time_s * other / batch * (1.0 + 1e-9) for other in near}
    by_batch = {
        other: least_bound(
            problem.with_training(global_batch=other), longest_s=longest_s, takes=lambda ranks: batch % ranks != 0
        )
        for other, longest_s in longest.items()
    }
    faster = {
        other: priced
        for other, priced in by_batch.items()
        if priced is not None and priced.safe and _saved(here, batch, priced, other) >= _WORTH
    }
    if not faster:
        return
    other = max(faster, key=lambda one: _saved(here, batch, faster[one], one))
    shared = gcd(batch, ranks)
    message = (
        f"global_batch: {batch} divides among {shared} of the {ranks} ranks at most, so that the others share layers, "
        f"matrices or sequences: {summary(best.layout)}"
    )
    saved = _saved(here, batch, faster[other], other)
    help = f"global_batch: {other} would save {saved:.0%} of the time per token, with {summary(faster[other].layout)}"
    yield Diagnostic("PT463", message, "warning", ("training", "global_batch"), help=help)


def beside(batch: int, ranks: int) -> list[int]:
    """Return the nearest batches that divide among more of the ranks; empty if none is near."""
    shared = gcd(batch, ranks)
    for more in sorted(divisors(ranks), reverse=True):
        if more <= shared:
            break
        around = {batch - batch % more, batch - batch % more + more}
        if near := sorted(other for other in around if other > 0 and abs(other - batch) <= _NEAR * batch):
            return near
    return []


def _saved(here: Priced, batch: int, alternative: Priced, other: int) -> float:
    """Return the share of the time per token that another batch saves."""
    return 1.0 - (alternative.step_time_s / other) / (here.step_time_s / batch)
