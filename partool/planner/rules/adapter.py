"""Checks of the section ``adapter`` against the model."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from partool.diagnostics.record import Diagnostic
from partool.layout.adapters import is_adapter, is_target, train_patterns, unmatched_targets
from partool.layout.parameters import ParameterInfo, parameters, projection_of
from partool.layout.tensor.cutting import collapsed_name
from partool.planner.problem import Problem

_PATH = "adapter"


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about an adapter that the model cannot have, or that would train nothing."""
    adapter = problem.spec.adapter
    if adapter is None:
        return
    if problem.described is not None:
        message = "an adapter is a part of partool's own decoder, and other code builds this model"
        help = "write model: {config: FOLDER, weights: {source: hf, path: FOLDER}} for a type that partool reads"
        yield Diagnostic("PT292", message, path=(_PATH,), help=help)
        return
    infos = [info for info in parameters(problem.model) if not is_adapter(info.name)]
    projections = {name: info for info in infos if (name := projection_of(info)) is not None}
    yield from _targets(problem, projections)
    yield from _train(problem, [info.name for info in infos])
    stacked = [name for name, info in projections.items() if info.kind == "expert" and is_target(adapter, name)]
    if adapter.dropout and stacked:
        message = f"dropout: {adapter.dropout:g} is not for adapters of experts, such as {stacked[0]}"
        help = "use dropout: 0, or name other targets"
        yield Diagnostic("PT294", message, path=(_PATH, "dropout"), help=help)
    if adapter.kind == "dora" and stacked:
        message = f"kind: dora is not for adapters of experts, such as {stacked[0]}"
        help = "use kind: lora, or name other targets, such as targets: [q, k, v, o]"
        yield Diagnostic("PT407", message, path=(_PATH, "kind"), help=help)
    if problem.trained == 0:
        message = "model.frozen: the patterns match the adapter, too: nothing would be trained"
        yield Diagnostic("PT623", message, path=("model", "frozen"), help="drop a pattern")


def _targets(problem: Problem, projections: dict[str, ParameterInfo]) -> Iterator[Diagnostic]:
    adapter = problem.spec.adapter
    assert adapter is not None, "no adapter"
    for pattern in unmatched_targets(adapter, projections):
        last = {name.rpartition(".")[2] for name in projections}
        yield _unmatched("targets", list(adapter.targets).index(pattern), pattern, "projection", last)


def _train(problem: Problem, names: list[str]) -> Iterator[Diagnostic]:
    adapter = problem.spec.adapter
    assert adapter is not None, "no adapter"
    for index, (entry, patterns) in enumerate(train_patterns(adapter.train)):
        if not any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            names_of_kind = {"embed", "head", "norms"} | {collapsed_name(name) for name in names}
            yield _unmatched("train", index, entry, "parameter", names_of_kind)


def _unmatched(field: str, index: int, pattern: str, what: str, names_of_kind: set[str]) -> Diagnostic:
    near = get_close_matches(pattern, sorted(names_of_kind), 3, 0.5) or sorted(names_of_kind)[:6]
    message = f"adapter.{field}: {pattern!r} matches no {what} of the model"
    return Diagnostic("PT293", message, path=(_PATH, field, index), help=f"names are {', '.join(near)}")
