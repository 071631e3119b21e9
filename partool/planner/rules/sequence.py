"""Rules of sequence parallelism that need the resolved model or the degrees of other kinds of parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from partool.diagnostics.record import Diagnostic
from partool.planner.forms.sequence_rules import (
    inner_sizes,
    layers_problem,
    least_heads,
    may_balance,
    method_problem,
    methods,
    team_sizes,
    windowed,
)
from partool.planner.problem import Problem, divisors, nearest
from partool.spec.sequence_checks import methods_of
from partool.strategies.schedules import MOVING_WEIGHTS
from partool.strategies.sequence import IN_GROUPS, IN_TEAMS, METHODS, ON_GRIDS

_PATH = ("parallel", "sequence")


def check_sequence(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about methods that cannot cut the model, sizes that do not divide the ranks, and conflicts."""
    sequence = problem.spec.parallel.sequence
    if sequence.degree == 1:
        return
    yield from _layers(problem)
    if sequence.degree == "auto":
        return
    findings = [finding for rule in (_tokens, _teams, _inner) for finding in rule(problem, sequence.degree)]
    yield from findings
    yield from _beside(problem, sequence.degree)
    if not findings:
        yield from _heads(problem, sequence.degree)


def _layers(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the model's kinds of attention do not allow the method or the order of tokens in the spec."""
    model, sequence = problem.model, problem.spec.parallel.sequence
    allowed_methods = methods_of(sequence)
    if allowed_methods and problem.described is not None and problem.described.method_problem(allowed_methods[0]):
        return  # reported in hf.py
    is_partool_decoder = problem.described is None
    whys = [
        method_problem(problem, method) if is_partool_decoder else layers_problem(model, method)
        for method in allowed_methods
    ]
    if whys and all(whys):
        why = whys[0] or ""
        path = (*_PATH, "method") if sequence.method != "auto" else _PATH
        yield Diagnostic("PT469", why, path=path, help="use method: ulysses, or auto")
    elif sequence.order == "zigzag" and windowed(problem):
        message = "order: zigzag gives ranks two stretches, and each needs the window before it from another rank"
        mixed = may_balance(problem)
        message += (
            "; it balances layers that see much only" if mixed else "; it balances full layers, of which there is none"
        )
        help = "order: auto takes what is faster" if mixed else "use order: contiguous or auto, or method: ulysses"
        yield Diagnostic("PT468", message, "warning" if mixed else "error", (*_PATH, "order"), help=help)


def _tokens(problem: Problem, degree: int) -> Iterator[Diagnostic]:
    length, grid = problem.spec.training.sequence_length, problem.model.grid
    path = (*_PATH, "degree")
    if degree > length:
        message = f"a sequence of {length} tokens leaves some of the {degree} ranks of sequence.degree without any"
        yield Diagnostic("PT265", message, path=path, help=f"use at most {length}")
    elif _all(methods(problem), ON_GRIDS) and grid is not None and degree > min(grid):
        message = (
            f"{grid[0]} rows and {grid[1]} columns leave some of the {degree} ranks of sequence.degree without any"
        )
        yield Diagnostic("PT265", message, path=path, help=f"use at most {min(grid)}, or method: ulysses")


def _teams(problem: Problem, degree: int) -> Iterator[Diagnostic]:
    """Yield a finding if the square of the size of StarTrail teams does not divide the number of sequence ranks."""
    teams = problem.spec.parallel.sequence.teams
    if not _all(methods(problem), IN_TEAMS) or (teams in team_sizes(degree) if teams != "auto" else team_sizes(degree)):
        return
    legal = team_sizes(degree)
    if teams == 1:
        message = "a team of one rank meets all keys by itself, which is a plain ring"
    elif teams == "auto":
        message = f"no square of a team's size divides sequence.degree: {degree}"
    else:
        name = methods(problem)[0]
        message = f"{name} has teams · teams rings: {teams} · {teams} = {teams**2} does not divide {degree} ranks"
    if legal:
        help = f"use teams: {nearest(0 if teams == 'auto' else teams, legal)}, or method: ring"
    else:
        able = [n for n in divisors(problem.world_size) if team_sizes(n)]
        help = f"use degree: {nearest(degree, able)}, or method: ring" if able else "use method: ring"
    yield Diagnostic("PT466", message, path=(*_PATH, "degree" if teams == "auto" else "teams"), help=help)


def _inner(problem: Problem, degree: int) -> Iterator[Diagnostic]:
    """Yield a finding if USP's Ulysses groups do not divide the ranks, or make USP the same as a ring or Ulysses."""
    inner = problem.spec.parallel.sequence.ulysses
    if not _all(methods(problem), IN_GROUPS):
        return
    legal = inner_sizes(degree)
    if legal and (inner == "auto" or inner in legal):
        return
    if not legal:
        message = f"{degree} ranks cannot be groups of several that form a ring of several"
        help = "use method: ulysses or ring" + ("" if degree < 4 else ", or a degree that is no prime")
        yield Diagnostic("PT467", message, path=(*_PATH, "degree"), help=help)
        return
    message = f"ulysses: {inner} does not divide the {degree} ranks of sequence.degree"
    if inner in (1, degree):
        message = f"ulysses: {inner} of {degree} ranks is method: {'ring' if inner == 1 else 'ulysses'} by itself"
    help = f"use {nearest(inner if inner != 'auto' else 0, legal)}, or auto"
    yield Diagnostic("PT467", message, path=(*_PATH, "ulysses"), help=help)


def _heads(problem: Problem, degree: int) -> Iterator[Diagnostic]:
    """Yield a warning if some ranks have no attention head under Ulysses and therefore idle during attention."""
    sequence = problem.spec.parallel.sequence
    tensor = 1 if problem.tensor_degree == "auto" else problem.tensor_degree
    heads = least_heads(problem, tensor)
    traded = METHODS[sequence.method].heads if sequence.method != "auto" else "own"
    inner = sequence.ulysses if traded == "groups" and sequence.ulysses != "auto" else degree
    if traded == "own" or inner <= heads or (traded == "groups" and inner == degree):
        return
    beside = "" if tensor == 1 else f" of each of {tensor} tensor ranks"
    few = f"{heads} attention heads{beside} leave" if heads > 1 else f"one attention head{beside} leaves"
    message = f"{few} {inner - heads} of {inner} ranks idle while the others attend"
    field = "degree" if traded == "all" else "ulysses"
    less = f"use {field}: {heads}{' or less' * (heads > 1)}"
    help = f"{less}, or method: {'ring or usp' if field == 'degree' else 'ring'}"
    yield Diagnostic("PT470", message, severity="warning", path=(*_PATH, field), help=help)


def _all(names: tuple[str, ...], kind: tuple[str, ...]) -> bool:
    """Return True if ``names`` has at least one method and ``kind`` contains all of them."""
    return bool(names) and set(names) <= set(kind)


def _beside(problem: Problem, degree: int) -> Iterator[Diagnostic]:
    """Yield a finding if the pipeline schedule needs whole sequences on each rank, but ranks share sequences."""
    pipeline = problem.spec.parallel.pipeline
    schedule, stages = pipeline.schedule, pipeline.stages
    path = (*_PATH, "degree")
    if schedule in MOVING_WEIGHTS and stages != 1:
        message = (
            f"schedule: {schedule} moves weights round ranks that each hold whole sequences, not shares of {degree}"
        )
        yield Diagnostic("PT471", message, path=path, help="use schedule: 1f1b or auto, or sequence: 1")
