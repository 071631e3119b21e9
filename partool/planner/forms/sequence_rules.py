"""Sequence-parallel methods that can cut a model, and their forms, which set group sizes and each rank's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from partool.cost.case import INSIDES, ORDERS, SEQUENCE_METHODS
from partool.layout import startrail
from partool.planner.problem import Problem, divisors
from partool.spec.model import ModelConfig
from partool.spec.sequence_checks import methods_of
from partool.strategies.sequence import (
    ANY_ORDER,
    BY_GRAPH,
    IN_GROUPS,
    IN_TEAMS,
    METHODS,
    ON_GRIDS,
    PREFERENCE,
    WHOLE_AXES,
)

AXES = ("row", "column")
"""Kinds of attention along one axis of a grid."""


class SequenceForm(NamedTuple):
    """A form of sequence parallelism; its fields are columns of :class:`partool.cost.case.Layouts`."""

    method: int = 0
    order: int = 0
    inner: int = 1
    teams: int = 1
    inside: int = 0

    @property
    def name(self) -> str:
        """The method's name."""
        return SEQUENCE_METHODS[self.method]


def kinds_of(model: ModelConfig) -> frozenset[str]:
    """Return the kinds of attention that a model's layers have."""
    return frozenset(model.layer_types) or frozenset({"full"})


def windowed(problem: Problem) -> bool:
    """Return True if some layers attend within a window shorter than the sequence."""
    window = problem.model.window or 0
    return "sliding" in kinds_of(problem.model) and window < problem.spec.training.sequence_length


def may_balance(problem: Problem) -> bool:
    """Return True if two spans per rank (zigzag) may be faster: some layers have full attention or wide windows."""
    wide = 4 * (problem.model.window or 0) > problem.spec.training.sequence_length
    return "full" in kinds_of(problem.model) or wide


def orders_of(problem: Problem, method: str) -> tuple[str, ...]:
    """Return the orders of tokens over ranks to try: the spec's order; for ``auto``, orders that balance the layers.

    Full causal attention is balanced if each rank holds one span from the first half of the sequence and one span from
    the second half. Windowed attention is balanced if each rank holds one span, and fetches the window before the span
    from earlier ranks (two spans fetch two windows). For models with both kinds of layers, or with wide windows, both
    orders are tried.
    """
    if method in ON_GRIDS:
        return ("grid",)
    if method not in ANY_ORDER:
        return ("contiguous",)
    pinned = problem.spec.parallel.sequence.order
    if pinned != "auto":
        return (pinned,)
    if not windowed(problem):
        return ("zigzag",)
    return ("contiguous", "zigzag") if may_balance(problem) else ("contiguous",)


def method_problem(problem: Problem, method: str) -> str | None:
    """Return why a method cannot be used with the model at any degree; None if it can."""
    if problem.described is not None and (why := problem.described.method_problem(method)):
        return why
    if problem.described is None and method in BY_GRAPH:
        return f"{method} is for models of transformers; partool's own decoder has ulysses, which sends the same"
    return layers_problem(problem.model, method)


def layers_problem(model: ModelConfig, method: str) -> str | None:
    """Return why a method does not support the model's kinds of attention; None if it does."""
    kinds = kinds_of(model)
    along = sorted(kinds & set(AXES))
    if method in ON_GRIDS and kinds - set(AXES):
        return f"{method} changes between the axes of a grid, and {_layers(kinds - set(AXES))} attend along none"
    if along and method not in WHOLE_AXES:
        return f"{method} knows full and sliding layers, not {_layers(along)}"
    return None


def methods(problem: Problem) -> tuple[str, ...]:
    """Return the methods that the spec allows and the model's layers support."""
    lacks = problem.engine.lacks
    names = tuple(name for name in methods_of(problem.spec.parallel.sequence) if f"sequence {name}" not in lacks)
    # A graph is the last resort: a model whose attention can be replaced has methods with less waiting.
    asked = problem.spec.parallel.sequence.method != "auto"
    seams = problem.described is None or not problem.described.attention_problem
    names = tuple(name for name in names if asked or not seams or name not in BY_GRAPH)
    return tuple(name for name in names if method_problem(problem, name) is None)


def least_heads(problem: Problem, tensor: int) -> int:
    """Return the smallest number of query heads on any tensor rank."""
    return problem.model.heads // tensor


def all_forms(problem: Problem, ranks: int, tensor: int) -> Iterator[SequenceForm]:
    """Yield every form for ``ranks`` sequence ranks and ``tensor`` tensor ranks, preferred forms first.

    Forms of Ulysses that leave ranks without a head are left out unless the spec sets them, as such ranks would idle.
    """
    pinned = problem.spec.parallel.sequence
    if ranks == 1:
        yield SequenceForm()
        return
    starts = (
        (name, SequenceForm(SEQUENCE_METHODS.index(name), ORDERS.index(order)))
        for name in sorted(methods(problem), key=PREFERENCE.index)
        for order in orders_of(problem, name)
    )
    for name, form in starts:
        heads = ranks * tensor if pinned.method == name else least_heads(problem, tensor)
        record = METHODS[name]
        if record.heads == "groups":
            sizes = inner_sizes(ranks) if pinned.ulysses == "auto" else [pinned.ulysses]
            yield from (
                form._replace(inner=n) for n in sizes if n in inner_sizes(ranks) and (n <= heads or pinned.ulysses == n)
            )
        elif record.keys == "teams":
            sizes = team_sizes(ranks) if pinned.teams == "auto" else [pinned.teams]
            sides = INSIDES if pinned.inside == "auto" else (pinned.inside,)
            yield from (
                form._replace(teams=n, inside=INSIDES.index(side))
                for n in sizes
                if n in team_sizes(ranks)
                # With rings of one rank, both values of `inside` are the same.
                for side in (sides if n * n < ranks else sides[:1])
            )
        elif record.on_grids:
            if problem.model.grid is not None and ranks <= min(problem.model.grid):
                yield form
        elif record.heads != "all" or ranks <= heads:
            yield form


def why_none(problem: Problem, method: str, ranks: int, tensor: int) -> str:
    """Return why a method that the spec allows has no form for ``ranks`` ranks; empty if the method has a form."""
    if any(form.name == method for form in all_forms(problem, ranks, tensor)):
        return ""
    if problem_of_layers := method_problem(problem, method):
        return problem_of_layers
    heads, grid = least_heads(problem, tensor), problem.model.grid
    if method in IN_TEAMS:
        return f"{ranks} ranks divide by no square of a team's size"
    if method in IN_GROUPS and not inner_sizes(ranks):
        return f"{ranks} ranks are not several groups of several"
    if method in ON_GRIDS and grid is not None:
        return f"{ranks} ranks are more than the {min(grid)} {'rows' if grid[0] <= grid[1] else 'columns'}"
    each = "" if tensor == 1 else " on a tensor rank"
    return f"{heads} head{'s' * (heads != 1)}{each} are too few"


def inner_sizes(ranks: int) -> list[int]:
    """Return the possible sizes of USP's Ulysses groups: each group and each ring must have several ranks."""
    return [n for n in divisors(ranks) if 1 < n < ranks]


def team_sizes(ranks: int) -> list[int]:
    """Return the possible sizes of StarTrail's teams, without 1, as teams of one rank would be an ordinary ring."""
    return [n for n in divisors(ranks) if n > 1 and startrail.fits(ranks, n)]


def _layers(kinds: frozenset[str] | list[str]) -> str:
    return f"{' and '.join(sorted(kinds))} layers"
