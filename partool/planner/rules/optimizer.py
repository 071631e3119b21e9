"""Check that every pattern of ``optimizer.groups`` applies to a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from partool.diagnostics.record import Diagnostic
from partool.layout.parameters import is_frozen, parameters
from partool.layout.tensor.adapters import shapes
from partool.layout.tensor.cutting import collapsed_name

if TYPE_CHECKING:
    from partool.planner.problem import Problem


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding for each pattern that applies to no parameter.

    A pattern does not apply to parameters that are frozen or that match an earlier pattern.
    """
    groups = problem.spec.optimizer.groups
    if not groups:
        return
    names = parameter_names(problem)
    unmatched = {name for name in names if not is_frozen(name, problem.frozen)}
    for pattern in groups:
        matched = {name for name in names if fnmatchcase(name, pattern)}
        if not matched & unmatched:
            yield _tied(problem, pattern) or _without_effect(pattern, matched, names, problem.frozen)
        unmatched -= matched


def _tied(problem: Problem, pattern: str) -> Diagnostic | None:
    """Return the finding for a pattern that matches only the second name of a tied matrix; None for other patterns."""
    if problem.described is not None:
        tied = dict(problem.described.structure.tied)
    else:
        tied = {"head.weight": "embed.weight"} if problem.model.tied_embeddings else {}
    second = next((name for name in tied if fnmatchcase(name, pattern)), None)
    if second is None or any(fnmatchcase(name, pattern) for name in parameter_names(problem)):
        return None
    message = f"optimizer.groups: {pattern!r} matches only {second}, which is {tied[second]} once more"
    path = ("optimizer", "groups", pattern)
    return Diagnostic("PT225", message, path=path, help=f"name {tied[second]}: a tied matrix has one set of states")


def _without_effect(pattern: str, matched: set[str], names: list[str], frozen: tuple[str, ...]) -> Diagnostic:
    if not matched:
        why, near = "matches no parameter", get_close_matches(pattern, sorted({*map(collapsed_name, names)}), 2, 0.5)
        help = f"nearest: {' or '.join(near)}" if near else f"names are {', '.join(names[:4])}, …"
    elif all(is_frozen(name, frozen) for name in matched):
        why, help = (
            "matches only parameters that model.frozen or an adapter keeps as they are",
            "drop it, or train some of them",
        )
    else:
        why, help = "matches no parameter that an earlier pattern does not", "move it up: the first that matches counts"
    message = f"optimizer.groups: {pattern!r} {why}"
    return Diagnostic("PT225", message, path=("optimizer", "groups", pattern), help=help)


def parameter_names(problem: Problem) -> list[str]:
    """Return the names of all parameters, in the model's order."""
    if problem.described is not None:
        adapter = problem.spec.adapter
        return list(shapes(problem.described.structure, None if adapter is None else adapter.form))
    return [info.name for info in parameters(problem.model)]
