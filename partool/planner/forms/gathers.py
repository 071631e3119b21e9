"""Settings of ZeRO's all-gathers of parameters: values from the spec or from the planner, checks, and explanations.

By default the parameters of a layer are gathered in one message and prefetched one layer ahead: the fewest and largest
messages. Where layouts exceed the memory by little, the search is repeated with the gathers that need least memory: one
message per parameter and no prefetch. Vectors, of which a layer has many, then stay gathered and cost no messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import cast

from partool.cost.case import Layouts
from partool.cost.kinds import kinds
from partool.cost.training.gathers import kept_elements, messages_of_unit
from partool.cost.training.micro import layer_elements
from partool.diagnostics.record import Diagnostic
from partool.layout.parameters import parameters
from partool.plan.layout import DataLayout, Layout
from partool.planner.cost_job import cost_job
from partool.planner.problem import Problem
from partool.spec.numbers import MIB
from partool.spec.parallel import ZeroStage

_PATH = ("parallel", "data")
_CONTAINERS = ("ModuleList", "ModuleDict")


def under_pressure(problem: Problem) -> Problem | None:
    """Return the problem with the all-gathers that need least memory; None if this changes nothing."""
    if problem.engine.uniform:
        return None
    pressed = problem.relax("gathers")
    return pressed if pressed.controls != problem.controls and problem.world_size > 1 else None


def resolved(problem: Problem, row: Layouts) -> DataLayout:
    """Return how the ranks of a layout share the training state; fields without an effect keep their defaults."""
    zero, shard, chosen = cast("ZeroStage", int(row.zero)), int(row.shards), problem.controls
    named = leaves(problem) if row.dp > 1 else ()
    if zero == 0 or shard * row.cp == 1:
        return DataLayout(zero=zero, shard=shard, leaves=named)
    if zero < 3:
        return DataLayout(zero=zero, shard=shard, gather=chosen.gather, leaves=named)
    return DataLayout(
        zero=zero,
        shard=shard,
        gather=chosen.gather,
        prefetch=chosen.prefetch,
        persistent=chosen.persistent_elements,
        leaves=named,
    )


def leaves(problem: Problem) -> tuple[str, ...]:
    """Return patterns of the modules whose parameters are gathered as one unit.

    The patterns are the spec's; for ``auto``, the patterns match the modules that call experts one by one.

    Units are gathered whether their modules are used or not. Models that stack a layer's experts in one tensor, as most
    of transformers do, need no pattern: the stacked tensor always has a gradient.
    """
    pinned = problem.spec.parallel.data.leaves
    if pinned != "auto":
        return tuple(pinned)
    patterns: dict[str, None] = {}
    for module in problem.described.structure.modules if problem.described is not None else ():
        parts = module.name.split(".")
        at = parts.index("experts") if "experts" in parts else 0
        if at and at + 1 < len(parts) and parts[at + 1].isdigit():
            patterns[".".join("*" if part.isdigit() else part for part in parts[:at])] = None
    return tuple(patterns)


def check(problem: Problem) -> Iterator[Diagnostic]:
    """Yield findings about settings of all-gathers without an effect, and about impossible values of ``leaves``."""
    data = problem.spec.parallel.data
    for name, sense in (("prefetch", data.zero in ("auto", 3)), ("persistent", data.zero in ("auto", 3))):
        if getattr(data, name) != "auto" and not sense:
            message = f"{name}: {getattr(data, name)} is about parameters that ZeRO-3 gathers, and zero is {data.zero}"
            yield Diagnostic("PT460", message, severity="warning", path=(*_PATH, name), help="drop it, or use zero: 3")
    if data.gather == "sequential" and data.zero == 0:
        message = "gather: sequential, but zero: 0 gathers nothing"
        yield Diagnostic("PT460", message, severity="warning", path=(*_PATH, "gather"), help="drop it, or use zero: 3")
    if data.leaves != "auto" and data.leaves:
        yield from _leaves(problem, tuple(data.leaves))


def sharing_ranks(layout: Layout) -> int:
    """Return the number of ranks that share one copy of the parameters, including sequence-parallel ranks."""
    return layout.data.shard * layout.sequence.degree


def _leaves(problem: Problem, patterns: tuple[str, ...]) -> Iterator[Diagnostic]:
    path = (*_PATH, "leaves")
    if problem.spec.parallel.compile == "block":
        message = "leaves are gathered inside of blocks, and compile: block makes one program of a block"
        yield Diagnostic("PT462", message, path=path, help="use compile: none, or drop the leaves")
    names = _modules(problem)
    lists = {
        module.name
        for module in (problem.described.structure.modules if problem.described is not None else ())
        if module.class_name in _CONTAINERS
    }
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            message = f"leaves: no module of the model is called {pattern!r}"
            yield Diagnostic("PT461", message, path=path, help=f"modules of a layer are {_some(problem, names)}")
        elif container := next((name for name in sorted(lists) if fnmatchcase(name, pattern)), None):
            message = f"leaves: {container!r} is a container, which is never called itself"
            yield Diagnostic("PT461", message, path=path, help="name the module that calls what is in it")


def _modules(problem: Problem) -> set[str]:
    """Return the names of all modules that have parameters."""
    if problem.described is None:
        names = [info.name.split(".")[:-1] for info in parameters(problem.model)]
    else:
        names = [module.name.split(".") for module in problem.described.structure.modules if module.name]
    return {".".join(parts[:end]) for parts in names for end in range(1, len(parts) + 1)}


def _some(problem: Problem, names: set[str]) -> str:
    blocks = "layers" if problem.described is None else problem.described.structure.blocks
    start = f"{blocks}.0."
    first = sorted(name for name in names if name.startswith(start) and "." not in name[len(start) :])
    return ", ".join(first[:4])


def sentences(problem: Problem, layout: Layout) -> Iterator[str]:
    """Yield sentences on how parameters are gathered and why."""
    data = problem.spec.parallel.data
    if layout.data.zero > 0 and sharing_ranks(layout) > 1:
        yield _gather(problem, layout)
    if layout.data.zero == 3 and sharing_ranks(layout) > 1:
        if layout.data.gather != "coalesced" or layout.data.prefetch != 1 or data.prefetch != "auto":
            yield _prefetch(problem, layout)
        if layout.data.persistent or data.persistent != "auto":
            yield _persistent(problem, layout)
    if layout.data.leaves:
        why = "the spec asks for it" if data.leaves != "auto" else "a rank may send no token to an expert"
        yield f"Leaves {', '.join(layout.data.leaves)}: {why}; gathered as one, with zeros where there is no gradient."


def _gather(problem: Problem, layout: Layout) -> str:
    pinned = problem.spec.parallel.data.gather != "auto"
    if layout.data.gather == "coalesced":
        why = "the spec asks for it" if pinned else "the fewest messages"
        usual = layout.data.zero == 3 and layout.data.prefetch == 1 and problem.spec.parallel.data.prefetch == "auto"
        return f"Gather coalesced: {why}{_ahead(problem, layout) if usual else ''}."
    saved = cost_job(problem, layout.compile).compute_bytes * _layer_elements(problem, layout)
    count = messages_of_unit(problem.model, problem.controls, layout.data.zero)
    why = (
        "the spec asks for it"
        if pinned
        else "the best layout that gathers layers at once does not fit, is less sure to fit or slower"
    )
    return f"Gather sequential: {why}; {count} messages per layer, {saved / MIB:,.0f} MiB less for a moment."


def _prefetch(problem: Problem, layout: Layout) -> str:
    if problem.spec.parallel.data.prefetch != "auto":
        why = "the spec asks for it"
    elif layout.data.prefetch == 0:
        why = "memory is short, so each layer waits for its parameters"
    else:
        why = "the next layer travels while one computes"
    return f"Prefetch {layout.data.prefetch}: {why}{_ahead(problem, layout)}."


def _ahead(problem: Problem, layout: Layout) -> str:
    ahead = layout.data.prefetch * cost_job(problem, layout.compile).compute_bytes * _layer_elements(problem, layout)
    return f"; {ahead / MIB:,.0f} MiB gathered ahead"


def _persistent(problem: Problem, layout: Layout) -> str:
    most = layout.data.persistent
    kept = cost_job(problem, layout.compile).compute_bytes * kept_elements(problem.model, most)
    why = "the spec asks for it" if problem.spec.parallel.data.persistent != "auto" else "vectors cost no messages"
    return f"Persistent up to {most:,} elements: {why}; {kept / MIB:,.1f} MiB stay gathered."


def _layer_elements(problem: Problem, layout: Layout) -> int:
    """Return the number of parameters that a rank gathers of the model's largest layer."""
    experts = layout.expert_ranks if layout.expert > 1 else layout.mesh.tp
    sizes = (layer_elements(problem.model, kind) for kind in set(kinds(problem.model)))
    return max(shared // layout.mesh.tp + stacked // experts for shared, stacked in sizes)
