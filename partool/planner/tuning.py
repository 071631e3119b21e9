"""``adapter: auto``: the best way to tune a model on given machines, of those that fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from partool.diagnostics.record import Diagnostic
from partool.planner.explain.summary import short_time
from partool.planner.problem import Problem
from partool.spec.adapter import AdapterSpec, Base
from partool.spec.numbers import GIB
from partool.spec.spec import Spec

if TYPE_CHECKING:
    from partool.planner.search.solve import Solution

_BASES: tuple[Base, ...] = ("bf16", "int8", "nf4")


@dataclass(frozen=True, slots=True)
class TuningWay:
    """A way to tune a model."""

    name: str
    adapter: AdapterSpec | None
    """The section of the spec; None trains all weights."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A way whose layouts were searched."""

    way: TuningWay
    need_bytes: int
    """Bytes per rank of the layout that was taken, or of the smallest one where none fits."""
    capacity_bytes: int
    """Bytes per rank that may be used."""
    step_s: float | None
    """Seconds of a step of the layout that was taken; None where none fits."""

    @property
    def need_gib(self) -> str:
        """What it needs, in GiB."""
        return f"{self.need_bytes / GIB:.1f}"


def ways(adapter: AdapterSpec) -> Iterator[TuningWay]:
    """Yield the ways to tune in the order of preference: all weights, then adapters beside ever smaller bases.

    An adapter to start from excludes training all weights, and a base that the spec names excludes the others.
    """
    if adapter.weights is None:
        yield TuningWay("full fine-tuning", None)
    for base in (adapter.base,) if "base" in adapter.model_fields_set else _BASES:
        yield TuningWay(f"LoRA with a base in {base}", adapter.model_copy(update={"kind": "lora", "base": base}))


def with_way(spec: Spec, way: TuningWay) -> Spec:
    """Return the spec with the section ``adapter`` of a way."""
    return spec.model_copy(update={"adapter": way.adapter})


def tried(way: TuningWay, problem: Problem, solution: Solution) -> Tried | None:
    """Return what the search of a way's layouts showed; None if no layout meets the spec's constraints at all."""
    from partool.planner.explain.changes import smallest

    best = solution.chosen
    if best is None and not solution.space.size:
        return None
    priced = smallest(solution) if best is None else best
    step_s = None if best is None else best.time.step_time_s
    return Tried(way, priced.memory.total_bytes, problem.capacity_bytes, step_s)


def reason(before: Sequence[Tried], taken: Tried) -> str:
    """Return the sentence on why a way was taken."""
    assert taken.step_s is not None, "it does not fit"
    sizes = f"{taken.need_gib} of {taken.capacity_bytes / GIB:.1f} GiB per rank, {short_time(taken.step_s)} per step"
    sentence = f"adapter: auto takes {taken.way.name} ({sizes})"
    return f"{sentence}; {_listed(before)}." if before else f"{sentence}."


def nothing_fits(every: Sequence[Tried]) -> Diagnostic:
    """Return the finding that no way to tune the model fits."""
    capacity = every[-1].capacity_bytes / GIB
    message = f"adapter: auto: nothing fits {capacity:.1f} GiB per rank: {_listed(every)}"
    help = "use more devices, devices with more memory, or a smaller model; adapter.targets can name fewer projections"
    return Diagnostic("PT298", message, path=("adapter",), help=help)


def _listed(every: Sequence[Tried]) -> str:
    """Return ways that do not fit, with the memory of the smallest layout of each."""
    return ", ".join(f"{each.way.name} needs at least {each.need_gib} GiB" for each in every)
