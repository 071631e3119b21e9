"""Find the kernel, the configuration and the time of each matrix product and of each fused part of a plan.

Products come from the layout (:mod:`partool.layout.gemms`), configurations from the registry of kernels, times from the
cost model, or from a table if the same product was measured on the same device.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from partool.catalog.lookup import table
from partool.cost.time.gemm import matmul_s, streamed_s, tiled_s
from partool.plan.types import Plan
from partool.planner.kernels.parts import parts
from partool.planner.kernels.requests import KernelUse, asked
from partool.spec.hardware import Devices
from partool.strategies.jobs import JOBS
from partool.work.blocks import divided_model
from partool.work.evaluation import forward_only
from partool.work.stacks import stack_of
from partool.work.training import TrainingWork
from partool_kernels.registry import KERNELS, SOURCES, Choice, Config, Request, Source
from partool_kernels.registry.distance import MODELLED
from partool_kernels.registry.look_up import Registry

State = Literal["tuned", "nearest", "untuned", "library"]
STATES: tuple[State, ...] = ("tuned", "nearest", "untuned", "library")
_STATE: dict[Source, State] = {
    "exact": "tuned", "rows": "nearest", "shape": "nearest", "device": "nearest", "modelled": "untuned",
    "heuristic": "untuned",
}  # fmt: skip
_FASTER, _SLOWER, _SHORTEST_S = 20.0, 200.0, 1e-5
"""A measured time is credible if it is at least 1/20 of the predicted time, and at most 200 times the predicted time or
200 times 1e-5 s (a short launch), whichever is larger."""
_FEWEST = 3
"""Minimum number of measured entries for predicting the gain of tuning from their median gain; with fewer entries, the
tile model predicts the gain."""


@dataclass(frozen=True, slots=True)
class KernelLine:
    """A matrix product or a fused kernel, with its configuration from the registry."""

    asked: KernelUse
    choice: Choice | None
    """Configuration in the registry of kernels, even if a library of torch is used instead; None if there is none."""
    call_s: float
    """Seconds of one call: measured if ``measured``, else ``modelled_s``."""
    modelled_s: float
    """Seconds of one call as predicted by the cost model, which assumes good tiles."""
    measured: bool
    lost_s: float
    """Seconds by which a call takes longer than with a configuration that is tuned for the call."""
    step_s: float
    """Predicted seconds of the whole step."""

    @property
    def tabled(self) -> bool:
        """True if a tunable kernel (partool's or another engine's) computes the product, not a library of torch."""
        return self.choice is not None and not (self.asked.library and self.choice.implementation == "triton")

    @property
    def state(self) -> State:
        """State of the configuration.

        tuned: measured for this shape on this device; nearest: measured for a similar shape or device; untuned: not
        measured; library: a library of torch computes the product and chooses the configuration.
        """
        return _STATE[self.choice.source] if self.choice is not None and self.tabled else "library"

    @property
    def total_s(self) -> float:
        """Seconds of all calls in a step."""
        return self.asked.calls * self.call_s

    @property
    def share(self) -> float:
        """Share of the step's time that all calls of this product or fused kernel take."""
        return self.total_s / self.step_s

    @property
    def total_lost_s(self) -> float:
        """Seconds by which all calls in a step take longer than with a tuned configuration."""
        return self.asked.calls * self.lost_s


@dataclass(frozen=True)
class Coverage:
    """All matrix products and fused kernels of a plan, each as a :class:`KernelLine`."""

    architecture: str
    step_s: float
    lines: tuple[KernelLine, ...]
    doubts: tuple[str, ...] = ()
    """Messages about implausible measured times in tables; predictions do not use the implausible times."""

    @cached_property
    def share(self) -> dict[State, float]:
        """State of a configuration → share of the step's time that calls with configurations of this state take."""
        return {state: sum(line.share for line in self.lines if line.state == state) for state in STATES}

    @cached_property
    def lost_s(self) -> float:
        """Seconds that untuned configurations add to the predicted step time."""
        return sum(line.total_lost_s for line in self.lines)

    @property
    def measured_step_s(self) -> float:
        """Predicted seconds of the step, with measured times from tables in place of the cost model's times."""
        changed = (line.asked.calls * (line.call_s - line.modelled_s) for line in self.lines if line.measured)
        return self.step_s + sum(changed)

    @property
    def worst(self) -> Source | None:
        """Least certain source among the configurations of all products; None if libraries compute all products."""
        return min((choice.source for _, choice in self._products()), key=SOURCES.index, default=None)

    def below(self, level: Source) -> list[KernelLine]:
        """Return the products whose configuration comes from a source that is less certain than ``level``."""
        least = SOURCES.index(level)
        return [line for line, choice in self._products() if SOURCES.index(choice.source) < least]

    def _products(self) -> Iterator[tuple[KernelLine, Choice]]:
        """Yield (product, the registry's configuration) for each ``tabled`` product that has one in the registry."""
        for line in self.lines:
            if line.asked.product and line.choice is not None and line.tabled:
                yield line, line.choice

    @property
    def untuned(self) -> list[str]:
        """Names of the kernels that tuning could improve, sorted by lost time, largest first."""
        lost: dict[str, float] = {}
        for line in self.lines:
            if line.state in ("nearest", "untuned") and not line.asked.library:
                name = line.asked.kernel
                lost[name] = lost.get(name, 0.0) + line.total_lost_s
        return sorted(lost, key=lambda name: (-lost[name], name))


def coverage(plan: Plan, registry: Registry | None = None) -> Coverage:
    """Return a plan's products and fused kernels with the registry's configurations.

    Raises ``TableError`` if a table of the user cannot be read.

    Counts and times are means over pipeline ranks. Without kernels for the accelerator, libraries compute all
    products. If other engines have to run the plan, kernels of these engines count if their tables are given.
    """
    names = _device_names(plan.devices)
    uses = _uses(plan, names[0])
    registry = registry or Registry(plan.kernels.tuned, expert_width=_expert_width(uses))
    tables = _Tables(registry, names, others=not plan.runnable)
    job, step_s = workload_of(plan), plan.prediction.time.step_time_s
    lines = tuple(_line(job, one, tables, step_s) for one in uses)
    doubts = dict.fromkeys([*registry.doubts, *tables.doubts])
    return Coverage(plan.devices.architecture, step_s, lines, tuple(doubts))


def _uses(plan: Plan, device: str) -> tuple[KernelUse, ...]:
    """Return the products and fused kernels of a plan in the passes that its job has."""
    uses = (*asked(plan, device), *parts(plan, device))
    return uses if JOBS[plan.job].backward else tuple(one for one in uses if one.part in ("forward", "both"))


def _expert_width(uses: Sequence[KernelUse]) -> int | None:
    """Return the inner width of an expert on a rank (K of the down-projection); None without experts."""
    forward = (one for one in uses if one.name == "moe.experts.down" and one.part == "forward")
    return next((one.sides[2] for one in forward), None)


def requests(plan: Plan, kernels: Sequence[str] = ()) -> list[Request]:
    """Return the kernel requests that are worth measuring for a plan, without duplicates.

    ``kernels`` lists the kernels to measure; by default, those that the plan uses. Kernels for products that a library
    of torch computes may be listed, and are then compared with the library.
    """
    name, *_ = _device_names(plan.devices)
    uses = _uses(plan, name)
    wanted = [
        one.request
        for one in uses
        if one.request is not None
        and one.request.kernel in KERNELS
        and (one.request.kernel in kernels if kernels else not one.library)
    ]
    return list(dict.fromkeys(wanted))


def workload_of(plan: Plan) -> TrainingWork:
    """Return the input of the cost functions that a plan's products were priced with."""
    training, layout = plan.training, plan.layout
    work = TrainingWork(
        model=divided_model(plan.model),
        devices=plan.devices,
        sequence_length=training.sequence_length,
        global_batch=training.global_batch,
        precision=training.precision,
        stack=stack_of(plan.engine, plan.devices.backend, layout.compile, layout.derived.fused),
        time_scalar=plan.prediction.time_scalar,
        expert_rank_capacity=plan.layout.expert_rank_capacity,
    )
    return work if JOBS[plan.job].backward else forward_only(work)


def _device_names(devices: Devices) -> list[str]:
    """Return the names from the catalog that drivers report for the accelerator; each variant has another name."""
    entry = table("accelerators").get(devices.accelerator)
    return list(entry["match"]) or [devices.accelerator] if entry else [devices.accelerator]


def _line(job: TrainingWork, one: KernelUse, tables: _Tables, step_s: float) -> KernelLine:
    modelled_s = call_s = _modelled_s(job, one)
    choice = tables.credible(one, modelled_s)
    measured = choice is not None and choice.source == "exact" and choice.time_s is not None
    lost_s = 0.0
    if choice is not None and choice.time_s is not None and measured:
        call_s = choice.time_s
        if one.library and choice.reference_s is not None:
            call_s, lost_s = choice.reference_s, max(choice.reference_s - choice.time_s, 0.0)
    elif choice is not None and choice.source != "exact" and not one.library and choice.implementation == "triton":
        lost_s = call_s * tables.lost(job, one, choice)
    return KernelLine(one, choice, call_s, modelled_s, measured, lost_s, step_s)


def _modelled_s(job: TrainingWork, one: KernelUse) -> float:
    if one.moved_bytes is not None:
        return job.time_scalar * job.stack.derate * float(streamed_s(job, one.moved_bytes))
    m, n, k = one.sides
    seconds = matmul_s(job, m, n, k, wide=one.wide, batch=one.groups)
    return float(job.time_scalar * job.stack.derate * seconds)


class _Tables:
    """The registry's entries, and the gain of tuning, from measured entries or, if there are few, the tile model."""

    def __init__(self, registry: Registry, names: list[str], *, others: bool) -> None:
        self._registry = registry
        self._names = names
        self._others = others
        """True if other engines run the plan, so that kernels of these engines count."""
        self._measured: dict[tuple[str, str, tuple[str, ...]], float | None] = {}
        self.doubts: list[str] = []

    def credible(self, one: KernelUse, modelled_s: float) -> Choice | None:
        """Return the result of :meth:`choice`, marked as not measured if the measured time is implausible."""
        choice = self.choice(one)
        if choice is None or choice.time_s is None:
            return choice
        if modelled_s / _FASTER <= choice.time_s <= max(modelled_s, _SHORTEST_S) * _SLOWER:
            return choice
        m, n, k = one.sides
        self.doubts.append(
            f"{choice.table}: {choice.time_s:.3g} s for {m:.0f} × {n} × {k}, where {modelled_s:.3g} s are predicted: "
            "it is not used"
        )
        return replace(choice, source="modelled", distance=MODELLED, time_s=None, reference_s=None)

    def choice(self, one: KernelUse) -> Choice | None:
        """Return the registry's best configuration for a product; None if the registry has none."""
        if one.request is None:
            return None
        named = (self._named(replace(one.request, device=name)) for name in self._names)
        choices = [choice for choice in named if choice is not None]
        return max(choices, key=lambda choice: (SOURCES.index(choice.source), -choice.distance), default=None)

    def _named(self, request: Request) -> Choice | None:
        if request.kernel not in KERNELS:
            return self._registry.others(request) if self._others else None
        return self._registry.coverage(request) if self._others else self._registry.get(request)

    def lost(self, job: TrainingWork, one: KernelUse, choice: Choice) -> float:
        """Return the extra time of a configuration over the best configuration, as a share of the best time."""
        assert one.request is not None
        median = self._median(one.request)
        if median is not None and choice.source in ("heuristic", "modelled"):
            return median - 1.0
        chosen_s = _tiled_s(job, one, choice.config)
        if chosen_s is None:
            return 0.0
        others = (_tiled_s(job, one, config) for config in KERNELS[one.request.kernel].configs(one.request))
        best = min((seconds for seconds in others if seconds is not None), default=chosen_s)
        return max(chosen_s / best - 1.0, 0.0)

    def _median(self, request: Request) -> float | None:
        """Return the median of default time / tuned time over measured entries; None if there are too few entries."""
        key = (request.kernel, request.architecture, request.dtypes)
        if key not in self._measured:
            entries = [entry for _, table in self._registry.tables(*key[:2]) for entry in table.entries]
            gains = [
                max(one.measured.default_s / one.measured.time_s, 1.0)
                for one in entries
                if one.measured is not None and one.dtypes == request.dtypes
            ]
            self._measured[key] = statistics.median(gains) if len(gains) >= _FEWEST else None
        return self._measured[key]


def _tiled_s(job: TrainingWork, one: KernelUse, config: Config) -> float | None:
    """Return the predicted seconds of a product; None for a fused kernel, or if ``config`` has no tile sizes."""
    blocks = config.constants
    rows, columns = blocks.get("BLOCK_M", 0), blocks.get("BLOCK_N", 0)
    if not rows or not columns or not one.product:
        return None
    splits = max((size for name, size in blocks.items() if name.startswith("SPLIT")), default=1)
    return tiled_s(job, one.sides, (rows, columns), splits=max(splits, 1), batch=one.groups)
