"""Reasons for a form of sequence parallelism, from a comparison with other methods and each rank's tokens and heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from partool.cost.codec import decode, encode, lists_of
from partool.layout.sequence import deal_heads, even
from partool.plan.layout import Layout
from partool.planner.described import Description
from partool.planner.forms.sequence_rules import SequenceForm, all_forms, kinds_of, why_none, windowed
from partool.planner.problem import Problem
from partool.planner.search.price import TIE, Priced
from partool.planner.search.sequence_forms import seconds
from partool.spec.numbers import GIB
from partool.spec.parallel import Sequence
from partool.spec.sequence_checks import methods_of
from partool.strategies.sequence import ANY_ORDER, BY_GRAPH, METHODS, ON_GRIDS, PREFERENCE

_CLOSE = 5e-4
"""Share of the step time below which a difference is not reported."""


def sequence_reasons(problem: Problem, best: Priced) -> Iterator[str]:
    """Yield one sentence per decision about sequence parallelism."""
    layout = best.layout
    if problem.spec.data.attend == "document":
        yield "Attention is priced as if documents in a sequence saw each other: short ones take less."
    if layout.mesh.cp == 1:
        return
    asked = ", as the spec asks" if problem.spec.parallel.sequence.method != "auto" else ""
    sent = best.time.traffic_bytes.get("sequence", 0)
    waits = best.terms_s.get("sequence_parallel", 0.0) / best.step_time_s
    words = METHODS[layout.sequence.method].words
    yield (
        f"Sequence by {layout.sequence.form}{asked}: {words}. A rank sends {_size(sent)} per "
        f"step for it, and waits {waits:.1%} of the step."
    )
    if problem.described is not None and layout.sequence.method in BY_GRAPH:
        yield from _graph(problem.described)
    yield from _others(problem, best)
    yield from _order(problem, layout)
    yield from _heads(problem, layout)
    yield from _tokens(problem, layout)


def formed(layout: Layout, form: SequenceForm) -> Layout:
    """Return the layout with ``form`` in place of its form of sequence parallelism."""
    row = replace(
        encode(layout),
        sequence_method=form.method,
        sequence_order=form.order,
        sequence_inner=form.inner,
        sequence_teams=form.teams,
        sequence_inside=form.inside,
    )
    return decode(row, lists_of(layout))


def rivals(problem: Problem, layout: Layout) -> list[Priced]:
    """Return ``layout`` with each other method, in the fastest form of that method; results are sorted by step time."""
    ranks, tensor = layout.mesh.cp, layout.mesh.tp
    free = problem.with_parallel(sequence=Sequence(degree=ranks))
    forms = [form for form in all_forms(free, ranks, tensor) if form.name != layout.sequence.method]
    if not forms:
        return []
    times = seconds(problem, [(ranks, tensor, *form) for form in forms], layout.micro_batch)
    least: dict[str, SequenceForm] = {}
    for at in np.argsort(times, kind="stable"):
        least.setdefault(forms[at].name, forms[at])
    priced = [Priced(problem, formed(layout, form)) for form in least.values()]
    return sorted(priced, key=lambda one: one.step_time_s)


def _others(problem: Problem, best: Priced) -> Iterator[str]:
    """Yield sentences on the cost of other methods on the same mesh, and on methods that the mesh does not allow."""
    layout = best.layout
    others = rivals(problem, layout)
    texts = [f"{one.layout.sequence.form} {_against(best, one)}" for one in others]
    if texts:
        alike = any(abs(one.step_time_s / best.step_time_s - 1.0) <= TIE for one in others)
        names = ", ".join(PREFERENCE)
        rule = f" Of those within {TIE:.1%} and that fit, the first of {names} is taken." if alike else ""
        yield f"Other methods on this mesh: {'; '.join(texts)}.{rule}"
    free = problem.with_parallel(sequence=Sequence(degree=layout.mesh.cp))
    wanted = [name for name in methods_of(free.spec.parallel.sequence) if name != layout.sequence.method]
    whys: dict[str, list[str]] = {}
    for name in wanted:
        why = why_none(free, name, layout.mesh.cp, layout.mesh.tp).removeprefix(f"{name} ")
        # Methods for grids are mentioned only if the model has a grid, and graphs only if nothing else serves.
        fits = problem.described is not None and bool(problem.described.attention_problem)
        if why and (name not in ON_GRIDS or problem.model.grid) and (name not in BY_GRAPH or fits):
            whys.setdefault(why, []).append(name)
    if whys:
        excluded = [f"{', '.join(names)} ({why})" for why, names in whys.items()]
        yield f"Not here: {'; '.join(excluded)}."


def _graph(described: Description) -> Iterator[str]:
    """Yield a sentence on the attention that the graph of the model's forward pass holds."""
    alike: dict[str, list[str]] = {}
    for node in described.graph_attention:
        keys = f", {node.key_heads} of keys" if node.key_heads != node.heads else ""
        form = f"{node.heads} heads of {node.head_dim}{keys}, to {node.sees}"
        alike.setdefault(form, []).append(node.module)
    texts = [
        f"{len(modules)} × {form} ({modules[0]}{f' to {modules[-1]}' if len(modules) > 1 else ''})"
        for form, modules in alike.items()
    ]
    if texts:
        yield f"Attention in the graph: {'; '.join(texts)}."


def _against(best: Priced, other: Priced) -> str:
    """Return text that compares ``other`` with the chosen layout ``best`` in time, bytes sent and memory."""
    ratio = other.step_time_s / best.step_time_s - 1.0
    # Two digits near TIE show whether a difference is above or below it.
    share = f"{abs(ratio):.{2 if abs(ratio) < 5 * TIE else 1}%}"
    time = "as fast" if abs(ratio) < _CLOSE else f"{share} {'slower' if ratio > 0 else 'faster'}"
    parts = [time, f"{_size(other.time.traffic_bytes.get('sequence', 0))} sent"]
    more = other.memory.total_bytes - best.memory.total_bytes
    if abs(more) >= GIB / 100:
        parts.append(f"{_size(abs(more))} {'more' if more > 0 else 'less'} memory")
    if not other.fits:
        parts.append("too large")
    return ", ".join(parts)


def _order(problem: Problem, layout: Layout) -> Iterator[str]:
    """Yield a sentence on which tokens a rank has, and what this means for layers with full or windowed attention."""
    if layout.sequence.method not in ANY_ORDER:
        return
    mixed = windowed(problem) and "full" in kinds_of(problem.model)
    asked = ", as the spec asks" if problem.spec.parallel.sequence.order != "auto" else ""
    if layout.sequence.order == "zigzag":
        text = "a stretch from the front and one from the back, so that all have as much to attend to"
        text += "; windowed layers fetch two windows for it" if windowed(problem) else ""
    elif mixed:
        text = "one stretch each; balances windowed layers, full ones wait for the rank with most work"
    elif windowed(problem):
        text = "one stretch each; windows reach into earlier ranks"
    else:
        text = "one stretch each; all wait for the rank with most work"
    yield f"Tokens {layout.sequence.order}{asked}: {text}."


def _heads(problem: Problem, layout: Layout) -> Iterator[str]:
    """Yield sentences if heads are divided unevenly over ranks, or if several ranks need the same key head."""
    ranks = {"all": layout.mesh.cp, "groups": layout.sequence.ulysses}.get(METHODS[layout.sequence.method].heads, 1)
    model, tensor = problem.model, layout.mesh.tp
    if ranks == 1 or model.mla is not None:
        return
    queries, keys = -(-model.heads // tensor), max(1, -(-model.kv_heads // tensor))
    deals = deal_heads(queries, keys, ranks)
    sizes = [deal.queries[1] - deal.queries[0] for deal in deals]
    if len(set(sizes)) > 1:
        shown = ", ".join(map(str, sizes)) if ranks <= 8 else f"{sizes[0]} or {sizes[-1]}"
        yield f"Query heads per rank in attention: {shown}; all wait for the one that has most."
    key_heads_on_ranks = sum(deal.keys[1] - deal.keys[0] for deal in deals)
    if key_heads_on_ranks > keys:
        yield f"Keys and values: {keys} heads on {ranks} ranks; each goes to all whose queries read it."


def _tokens(problem: Problem, layout: Layout) -> Iterator[str]:
    """Yield a sentence if the ranks that share a sequence have different numbers of tokens."""
    length, ranks = problem.spec.training.sequence_length, layout.mesh.cp
    sizes = even(length, ranks)
    if layout.sequence.order != "grid" and sizes[0] != sizes[-1]:
        yield f"Tokens per rank: {sizes[0]:,} or {sizes[-1]:,}; a sequence of {length:,} does not divide by {ranks}."


def _size(bytes_: float) -> str:
    return f"{bytes_ / GIB:.2f} GiB" if bytes_ >= GIB / 10 else f"{bytes_ / 2**20:.3g} MiB"
