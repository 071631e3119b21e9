"""Which sequence-parallel methods can cut a model, and in which forms: sizes of groups, and who holds which tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from partool.cost.case import INSIDES, ORDERS, SEQUENCE_METHODS
from partool.layout import startrail
from partool.planner.problem import Problem, divisors
from partool.spec.model import ModelConfig
from partool.spec.sequence_checks import RINGS, methods_of

AXES = ("row", "column")
"""Kinds of attention along one axis of a grid."""
WHOLE = ("ulysses", "dsp")
"""Methods under which a layer that attends along an axis has all of it."""


class SequenceForm(NamedTuple):
    """A form of sequence parallelism, as columns of :class:`partool.cost.case.Layouts` have it."""

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


def windowed(model: ModelConfig) -> bool:
    """Return True if some layers see a window only."""
    return "sliding" in kinds_of(model)


def order_of(problem: Problem, method: str) -> str:
    """Return which tokens ranks hold: as pinned, else zigzag where keys travel and all layers see everything.

    A window's keys are few and near; ranks that hold one stretch fetch them from the rank before.
    """
    if method == "dsp":
        return "grid"
    if method not in RINGS:
        return "contiguous"
    pinned = problem.spec.parallel.sequence.order
    return pinned if pinned != "auto" else "contiguous" if windowed(problem.model) else "zigzag"


def method_problem(problem: Problem, method: str) -> str | None:
    """Return what keeps a method from the model's layers, whatever the degrees; None: nothing does."""
    kinds = kinds_of(problem.model)
    along = sorted(kinds & set(AXES))
    if method == "dsp" and kinds - set(AXES):
        return f"dsp switches between the axes of a grid, and {_layers(kinds - set(AXES))} attend along none"
    if along and method not in WHOLE:
        return f"{method} cuts the sequence that {_layers(along)} attend along; it knows full and sliding attention"
    if method == "startrail" and windowed(problem.model):
        return "the rings of startrail pass all keys, of which sliding layers see few"
    return None


def methods(problem: Problem) -> tuple[str, ...]:
    """Return the methods that the spec's fields leave and the model's layers allow."""
    found = methods_of(problem.spec.parallel.sequence)
    return tuple(name for name in found if method_problem(problem, name) is None)


def least_heads(problem: Problem, tensor: int) -> int:
    """Return the query heads of the tensor rank that has fewest."""
    return problem.model.heads // tensor


def all_forms(problem: Problem, ranks: int, tensor: int) -> Iterator[SequenceForm]:
    """Yield every form that so many sequence ranks may have beside so many tensor ranks.

    Ulysses leaves no rank without a head, unless the spec asks for it: they would wait for the others.
    """
    pinned = problem.spec.parallel.sequence
    if ranks == 1:
        yield SequenceForm()
        return
    for name in methods(problem):
        form = SequenceForm(SEQUENCE_METHODS.index(name), ORDERS.index(order_of(problem, name)))
        heads = ranks * tensor if pinned.method == name else least_heads(problem, tensor)
        if name == "usp":
            sizes = inner_sizes(ranks) if pinned.ulysses == "auto" else [pinned.ulysses]
            yield from (
                form._replace(inner=n) for n in sizes if n in inner_sizes(ranks) and (n <= heads or pinned.ulysses == n)
            )
        elif name == "startrail":
            sizes = team_sizes(ranks) if pinned.teams == "auto" else [pinned.teams]
            sides = INSIDES if pinned.inside == "auto" else (pinned.inside,)
            yield from (
                form._replace(teams=n, inside=INSIDES.index(side))
                for n in sizes
                if n in team_sizes(ranks)
                # A ring of one rank is one either way.
                for side in (sides if n * n < ranks else sides[:1])
            )
        elif name == "dsp":
            if problem.model.grid is not None and ranks <= min(problem.model.grid):
                yield form
        elif name != "ulysses" or ranks <= heads:
            yield form


def inner_sizes(ranks: int) -> list[int]:
    """Return the sizes of the groups that trade heads within a ring: those that leave both with several ranks."""
    return [n for n in divisors(ranks) if 1 < n < ranks]


def team_sizes(ranks: int) -> list[int]:
    """Return the sizes of StarTrail's teams; one rank alone would be a plain ring."""
    return [n for n in divisors(ranks) if n > 1 and startrail.fits(ranks, n)]


def _layers(kinds: frozenset[str] | list[str]) -> str:
    return f"{' and '.join(sorted(kinds))} layers"
