"""Numbers of ranks that share experts, and of ranks that hold parts of each: those to try, and rules about pinned ones.

A *form* is (``parallel.expert``, ``parallel.expert_tensor``); with one rank that shares experts, the form is (1, 1) and
tensor ranks cut the inner width of each expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import BY_NODE, DIRECT, EXCHANGES, NODE_FIRST, Column, Layouts
from partool.cost.time.experts import exchange_s
from partool.diagnostics.record import Diagnostic
from partool.layout.mesh import all_have_rows, fill_nodes
from partool.planner.cost_job import cost_job
from partool.planner.problem import Problem, divisors, nearest

Form = tuple[int, int]
_BY_NODE = tuple(EXCHANGES[index] for index in BY_NODE)


def forms(problem: Problem, tensor: int, ranks: int) -> list[Form]:
    """Return the forms to try on ``tensor`` tensor ranks; the product of each divides ``ranks``, those of a stage.

    If the spec leaves the number of parts open, experts are whole unless each rank has a single one: each row travels
    to all parts, so that parts cost more than further ranks with other experts.
    """
    parallel, moe = problem.spec.parallel, problem.model.moe
    pinned, parts = parallel.expert, parallel.expert_tensor
    # One degree divides the experts of all layers.
    fewest, narrowest = gcd(*problem.model.expert_numbers) or 1, gcd(*problem.model.expert_widths)
    degrees = [pinned] if pinned != "auto" else divisors(fewest)
    every_form = []
    for expert in degrees:
        if expert == 1:
            every_form += [(1, 1)] if moe is None or parts in ("auto", tensor) else []
        elif parts != "auto":
            every_form.append((expert, parts))
        elif moe is not None and expert == fewest:
            every_form += [(expert, n) for n in divisors(narrowest) if n == 1 or expert * n <= problem.domain]
        else:
            every_form.append((expert, 1))
    asked = parallel.expert_exchange
    by_node = asked in _BY_NODE
    return [
        form
        for form in every_form
        if ranks % prod(form) == 0 and (not by_node or fill_nodes(prod(form), problem.domain))
    ]


def exchange_of(problem: Problem, groups: Layouts) -> Any:
    """Return, for each group, how tokens travel to their experts, as an index of :data:`EXCHANGES`.

    The spec sets the exchange. For ``auto``, tokens cross to each node once where this is faster: the links inside of
    nodes are. Their results then return one by one, so that values do not depend on the machines.
    """
    asked = problem.spec.parallel.expert_exchange
    able = np.asarray(groups.ep) > 1
    if asked in ("auto", *_BY_NODE):
        able = able & fill_nodes(np.asarray(groups.expert_ranks), problem.domain)
    if asked != "auto":
        return np.where(able, EXCHANGES.index(asked), DIRECT)
    if problem.engine.stack is not None or not np.any(able):
        return np.where(able, DIRECT, DIRECT)
    job = cost_job(problem)
    direct_s, first_s = (
        exchange_s(job, groups.with_columns(expert_exchange=np.where(able, index, DIRECT)))
        for index in (DIRECT, NODE_FIRST)
    )
    return np.where(able & (first_s < direct_s), NODE_FIRST, DIRECT)


def experts_on_tensor_ranks(problem: Problem, tensor: int) -> bool:
    """Return True if ``tensor`` tensor ranks, without data-parallel ones, may share whole experts of the model."""
    return tensor > 1 and problem.model.moe is not None and problem.spec.parallel.expert != 1


def shared(sharers: Column, zero: Column, ranks: Column) -> NDArray[np.bool_]:
    """Return a mask of layouts in which ``ranks`` ranks can share experts, of ``sharers`` with one copy of the state.

    Ranks with the same experts share these experts' state; its copies are those of the other parameters.
    """
    mask: NDArray[np.bool_] = np.asarray((ranks == 1) | ((zero > 0) & (sharers % ranks == 0)))
    return mask


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the spec sets numbers of ranks that cannot share the model's experts, or parts of them."""
    broken_rule = next(_of_model(problem), None) or next(_of_ranks(problem), None)
    if broken_rule is not None:
        name, message, help = broken_rule
        yield Diagnostic("PT266", message, path=("parallel", name), help=help)
        return
    parallel = problem.spec.parallel
    if parallel.expert_exchange != "padded" and parallel.expert_rank_capacity != "auto":
        message = f"expert_rank_capacity: {parallel.expert_rank_capacity:g} limits the rows of expert_exchange: padded"
        message += f", and expert_exchange is {parallel.expert_exchange}"
        help = "write expert_exchange: padded, or leave expert_rank_capacity out"
        yield Diagnostic("PT438", message, path=("parallel", "expert_rank_capacity"), help=help)
    for message, help in _of_exchange(problem):
        yield Diagnostic("PT438", message, path=("parallel", "expert_exchange"), help=help)


def _of_exchange(problem: Problem) -> Iterator[tuple[str, str]]:
    """Yield a message and help if the spec wants an exchange that the ranks cannot make."""
    parallel, domain = problem.spec.parallel, problem.domain
    asked, help = parallel.expert_exchange, "use direct, or auto"
    if asked in ("auto", "direct"):
        return
    one = "node" if domain == problem.devices.per_node else "rack"
    if problem.model.moe is None or parallel.expert == 1:
        yield f"expert_exchange: {asked}, but no ranks share experts", help
        return
    if asked == "padded":
        return
    if domain == 1:
        yield f"expert_exchange: {asked} spreads tokens inside of {one}s, and each has one device", help
        return
    sharers, words = _sharers(problem)
    parts = 1 if parallel.expert_tensor == "auto" else parallel.expert_tensor
    legal = [n for n in _legal(problem, sharers) if fill_nodes(n * parts, domain) and sharers % (n * parts) == 0]
    if legal and (parallel.expert == "auto" or parallel.expert in legal):
        return
    if legal:
        help = f"use expert: {nearest(int(parallel.expert), legal)}, or expert_exchange: direct"
    ranks = "any number of expert ranks" if parallel.expert == "auto" else f"{parallel.expert * parts} expert ranks"
    yield f"{asked} needs expert ranks that fill two {one}s of {domain} or more; {ranks} of {words} do not", help


Finding = tuple[str, str, str]
"""Name of the field, message and help."""


def _of_model(problem: Problem) -> Iterator[Finding]:
    """Yield findings about the number of experts and their width."""
    parallel, moe = problem.spec.parallel, problem.model.moe
    for name, size in (("expert", parallel.expert), ("expert_tensor", parallel.expert_tensor)):
        if size not in ("auto", 1) and moe is None:
            yield name, f"{name}: {size}, but the model has no experts", "drop it, or choose a model with experts"
    expert, parts = parallel.expert, parallel.expert_tensor
    if moe is None:
        return
    for number in problem.model.expert_numbers:
        if expert != "auto" and number % expert:
            message = f"{number} experts cannot be split over expert: {expert}"
            yield "expert", message, f"use {nearest(expert, _legal(problem, _sharers(problem)[0]))}"
    for width in problem.model.expert_widths:
        if parts != "auto" and not all_have_rows(width, parts):
            message = f"expert_tensor: {parts} leaves ranks without a part of an expert's inner width of {width}"
            yield "expert_tensor", message, f"use {nearest(parts, divisors(gcd(*problem.model.expert_widths)))}"


def _of_ranks(problem: Problem) -> Iterator[Finding]:
    """Yield findings about the ranks that there are for the experts."""
    parallel, moe, tensor = problem.spec.parallel, problem.model.moe, problem.tensor_degree
    expert, parts = parallel.expert, parallel.expert_tensor
    if expert not in ("auto", 1) and parallel.data.zero == 0:
        message = f"expert: {expert} needs ZeRO 1, 2 or 3, and zero is 0"
        yield "expert", message, "use data: {zero: 1}, which sends as much"
    if expert == 1 and moe is not None and "auto" not in (parts, tensor) and parts != tensor:
        message = f"with expert: 1 the {tensor} tensor ranks hold the parts of experts, and expert_tensor is {parts}"
        yield "expert_tensor", message, f"use {tensor}, or expert: 2 or more"
    ranks, words = _sharers(problem)
    shared = 1 if expert == "auto" else expert
    cut = 1 if parts == "auto" else parts
    if ranks % shared:
        legal = _legal(problem, ranks)
        yield "expert", f"expert: {expert} does not divide {words}", f"use {nearest(shared, legal)}"
    elif ranks % (shared * cut):
        product = f"expert: {shared} × expert_tensor: {cut} = {shared * cut}"
        name = product if shared > 1 else f"expert_tensor: {cut}"
        legal = divisors(ranks // shared)
        yield "expert_tensor", f"{name} does not divide {words}", f"use {nearest(cut, legal)}"


def _legal(problem: Problem, ranks: int) -> list[int]:
    """Return the numbers of ranks, of ``ranks``, that can share the model's experts."""
    return [n for n in divisors(ranks) if all(number % n == 0 for number in problem.model.expert_numbers)]


def _sharers(problem: Problem) -> tuple[int, str]:
    """Return the number of ranks over which the spec lets experts be spread, with words for these ranks."""
    world, pinned = problem.world_size, problem.pinned_degrees
    shard, tensor, sequence = problem.spec.parallel.data.shard, pinned.get("tensor"), pinned.get("sequence.degree")
    stages = pinned.get("pipeline.stages", 1)
    if world % prod(pinned.values()):  # another rule's finding
        return world, f"the {world} devices"
    if shard != "auto" and tensor and sequence and world % (shard * prod(pinned.values())) == 0:
        ranks = shard * tensor * sequence
        return ranks, f"the {ranks} ranks that share one copy of the training state"
    if stages > 1:
        return world // stages, f"the {world // stages} devices of a pipeline stage"
    return world, f"the {world} devices"
