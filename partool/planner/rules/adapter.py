"""Checks of the section ``adapter`` against the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase

from partool.diagnostics.record import Diagnostic
from partool.layout.adapters import SHORT, Short, is_adapter, is_target, train_patterns, unmatched_targets
from partool.layout.parameters import is_frozen, parameters, projection_of
from partool.layout.tensor import Structure
from partool.layout.tensor.adapters import projections, shapes, short_names, without_adapters
from partool.layout.tensor.cutting import collapsed_name
from partool.planner.described import Description
from partool.planner.problem import Problem
from partool.spec.adapter import AdapterSpec

_PATH = "adapter"


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about an adapter that the model cannot have, or that would train nothing."""
    adapter = problem.spec.adapter
    if adapter is None:
        return
    if problem.described is not None:
        yield from _of_other_code(problem, adapter, problem.described)
        return
    infos = [info for info in parameters(problem.model) if not is_adapter(info.name)]
    matrices = {name: info for info in infos if (name := projection_of(info)) is not None}
    yield from _targets(adapter, matrices)
    yield from _train(adapter, [info.name for info in infos], SHORT)
    stacked = [name for name, info in matrices.items() if info.kind == "expert" and is_target(adapter, name)]
    if adapter.dropout and stacked:
        message = f"dropout: {adapter.dropout:g} is not for adapters of experts, such as {stacked[0]}"
        help = "use dropout: 0, or name other targets"
        yield Diagnostic("PT294", message, path=(_PATH, "dropout"), help=help)
    if adapter.kind == "dora" and stacked:
        message = f"kind: dora is not for adapters of experts, such as {stacked[0]}"
        help = "use kind: lora, or name other targets, such as targets: [q, k, v, o]"
        yield Diagnostic("PT407", message, path=(_PATH, "kind"), help=help)
    if problem.trained == 0:
        yield _nothing_trained()


def _nothing_trained() -> Diagnostic:
    message = "model.frozen: the patterns match the adapter, too: nothing would be trained"
    return Diagnostic("PT623", message, path=("model", "frozen"), help="drop a pattern")


def _of_other_code(problem: Problem, adapter: AdapterSpec, described: Description) -> Iterator[Diagnostic]:
    """Yield findings about an adapter of a model that transformers or the user's code builds."""
    if described.is_module:
        message = "an adapter is a part of decoders of partool and of transformers, and your code builds this model"
        help = "write model: {config: FOLDER} or {hf: FOLDER}"
        yield Diagnostic("PT292", message, path=(_PATH,), help=help)
        return
    structure = described.structure
    linear, others = projections(structure), without_adapters(structure)
    names = list(shapes(structure, adapter.form))
    yield from _without(adapter, structure, linear, others)
    yield from _train(adapter, [name for name in names if not is_adapter(name)], short_names(structure))
    if linear and all(is_frozen(name, problem.frozen) for name in names):
        yield _nothing_trained()


def _without(
    adapter: AdapterSpec, structure: Structure, linear: Collection[str], others: list[str]
) -> Iterator[Diagnostic]:
    """Yield findings about targets that are no linear modules, and about matrices that get no adapter."""
    last = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    help = f"name linear modules: targets: [{last}]" if linear else "train all weights, or write model.config"
    if adapter.targets == "all-linear" and others:
        collapsed = list(dict.fromkeys(map(collapsed_name, others)))
        message = f"{structure.architecture}: {', '.join(collapsed[:3])} get no adapter, as they are no linear modules"
        yield Diagnostic("PT408", message, "warning" if linear else "error", (_PATH, "targets"), help=help)
    for pattern in unmatched_targets(adapter, linear):
        index = list(adapter.targets).index(pattern)
        only = adapter.form.model_copy(update={"targets": (pattern,)})
        match = next((name for name in others if is_target(only, name)), None)
        if match is not None:
            message = f"adapter.targets: {pattern!r} is {collapsed_name(match)}, which is no linear module"
            yield Diagnostic("PT408", message, path=(_PATH, "targets", index), help=help)
        else:
            yield _unmatched("targets", index, pattern, "linear module", {name.rpartition(".")[2] for name in linear})


def _targets(adapter: AdapterSpec, projections: Collection[str]) -> Iterator[Diagnostic]:
    for pattern in unmatched_targets(adapter, projections):
        last = {name.rpartition(".")[2] for name in projections}
        yield _unmatched("targets", list(adapter.targets).index(pattern), pattern, "projection", last)


def _train(adapter: AdapterSpec, names: list[str], short: Short) -> Iterator[Diagnostic]:
    for index, (entry, patterns) in enumerate(train_patterns(adapter.train, short)):
        if not any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
            names_of_kind = set(short) | {collapsed_name(name) for name in names}
            yield _unmatched("train", index, entry, "parameter", names_of_kind)


def _unmatched(field: str, index: int, pattern: str, what: str, names_of_kind: set[str]) -> Diagnostic:
    near = get_close_matches(pattern, sorted(names_of_kind), 3, 0.5) or sorted(names_of_kind)[:6]
    message = f"adapter.{field}: {pattern!r} matches no {what} of the model"
    return Diagnostic("PT293", message, path=(_PATH, field, index), help=f"names are {', '.join(near)}")
