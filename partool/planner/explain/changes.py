"""Changes that would make an impossible spec possible; each is proposed only if a search finds a layout with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, takewhile

from partool.catalog.hardware import resolve_hardware
from partool.catalog.lookup import table
from partool.diagnostics.record import Diagnostic
from partool.planner.explain.summary import summary
from partool.planner.problem import Problem
from partool.planner.rules.table import check
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.price import Priced, host_limit
from partool.planner.search.solve import Solution, may_fit, solve
from partool.spec.numbers import GIB

_PROPOSED = 5
_DOUBLINGS = 8
_ACCELERATORS = 2
_NAMED = "hardware: {accelerator: h100-sxm, nodes: 1, per_node: 8}"
"""Example of machines that a spec for another machine names."""
_SHORTEST = 256
_MOST_ROWS = 1_000_000
"""No further changes are tried after so many rows (see :class:`partool.planner.problem.SearchBudget`)."""


@dataclass(frozen=True)
class Change:
    """A change of one field, and the best layout after the change (None if no layout fits)."""

    problem: Problem
    best: Priced | None


def does_not_fit(solution: Solution) -> Diagnostic:
    """Return the finding that no layout fits; it lists helpful changes, and the smallest layout's memory terms."""
    least = smallest(solution)
    memory = least.memory
    largest = sorted(memory.terms_bytes.items(), key=lambda item: -item[1])[:3]
    terms = ", ".join(f"{name} {size / GIB:.1f}" for name, size in largest)
    message = (
        f"no layout fits: the smallest ({summary(least.layout)}) needs {memory.total_bytes / GIB:.1f} GiB "
        f"per rank, {memory.capacity_bytes / GIB:.1f} GiB are there (GiB: {terms})"
    )
    if least.memory.total_bytes <= memory.capacity_bytes:
        have = host_limit(solution.problem) / GIB
        message = (
            f"no layout fits: {summary(least.layout)} needs {least.host_bytes / GIB:.0f} GiB of host memory "
            f"per node, {have:.0f} GiB may be used"
        )
    ways = sorted(
        (changed.best.time.step_time_s * changed.problem.world_size, text)
        for text, changed in single_changes(solution.problem)
        if changed.best is not None
    )
    help = "; or ".join(text for _, text in ways[:_PROPOSED]) or "use a smaller model, or devices with more memory"
    if solution.problem.spec.hardware.accelerator == "auto" and solution.problem.devices.backend == "cpu":
        help += f"; or name the devices that will train, as this machine has none: {_NAMED}"
    return Diagnostic("PT301", message, path=("hardware",), help=help)


def no_layout(solution: Solution) -> Diagnostic:
    """Return the finding that no layout meets all constraints; it gives the main reasons and helpful changes."""
    pruned = sorted(solution.space.pruned.items(), key=lambda item: -item[1])
    why = "; ".join(reason for reason, _ in pruned[:3]) or "the pinned values contradict each other"
    message = f"no layout of {solution.problem.world_size} devices meets all constraints: {why}"
    ways = [text for text, changed in single_changes(solution.problem) if changed.best is not None]
    help = "; or ".join(ways[:_PROPOSED]) or "leave more of the parallel section to auto"
    return Diagnostic("PT273", message, path=("parallel",), help=help)


def single_changes(problem: Problem) -> Iterator[tuple[str, Change]]:
    """Yield each change of one field with which a layout fits, as text (``key: value (cost)``) and as a ``Change``."""
    budget = problem.budget
    budget.limit_rows = budget.rows + _MOST_ROWS
    for key, wanted, values in _proposals(problem):
        tried = takewhile(lambda _: budget.rows < budget.limit_rows, values)
        priced_changes = ((value, changed, _best(changed)) for value, changed in tried)
        for value, changed, best in islice((one for one in priced_changes if one[2] is not None), wanted):
            assert best is not None
            yield f"{key}: {value} ({_cost(changed, best)})", Change(changed, best)


def _best(problem: Problem) -> Priced | None:
    if any(finding.severity == "error" for finding in check(problem, None)) or not may_fit(problem):
        return None
    return solve(problem).chosen


def _cost(problem: Problem, best: Priced) -> str:
    tokens = best.time.tokens_per_s / problem.world_size
    return f"{best.time.step_time_s:.3g} s per step, {tokens:.0f} tokens/s per device"


Values = Iterator[tuple[object, Problem]]
"""Values of one field in the order in which they are tried, each with the changed problem."""


def _proposals(problem: Problem) -> Iterator[tuple[str, int, Values]]:
    """Yield each field to change, the maximum number of values to propose for the field, and the values to try.

    Fields that the spec sets come first, with ``auto`` as the value to try; sizes and devices follow.
    """
    for key, changed in _freed(problem):
        yield key, 1, iter([("auto", changed)])
    yield "parallel.offload", 1, _disks(problem)
    yield "training.global_batch", 2, _batches(problem)
    yield "training.sequence_length", 1, _shorter(problem)
    yield "hardware.nodes", 1, _more_nodes(problem)
    yield "hardware.slice", 1, _larger_slices(problem)
    yield "hardware.accelerator", _ACCELERATORS, _accelerators(problem)


def _freed(problem: Problem) -> Iterator[tuple[str, Problem]]:
    parallel = problem.spec.parallel
    for name in ("recompute", "micro_batch", "expert", "expert_tensor", "expert_exchange"):
        if getattr(parallel, name) != "auto":
            yield f"parallel.{name}", problem.with_parallel(**{name: "auto"})
    for section, name in (
        ("data", "zero"),
        ("data", "shard"),
        ("tensor", "degree"),
        ("pipeline", "stages"),
        ("pipeline", "schedule"),
        ("sequence", "degree"),
        ("sequence", "method"),
        ("offload", "optimizer"),
        ("offload", "parameters"),
        ("offload", "activations"),
    ):
        settings = getattr(parallel, section)
        if getattr(settings, name) != "auto":
            freed = problem.with_parallel(**{section: settings.model_copy(update={name: "auto"})})
            yield f"parallel.{section}.{name}", freed


def _disks(problem: Problem) -> Values:
    """Yield the change that moves the optimizer's state to files, if allowed; the user has to name a folder."""
    offload = problem.spec.parallel.offload
    if offload.optimizer in ("auto", "cpu") and offload.dir is None and problem.host_link:
        changed = offload.model_copy(update={"optimizer": "nvme", "dir": "/FOLDER"})
        yield "{optimizer: nvme, dir: /FOLDER}", problem.with_parallel(offload=changed)


def _batches(problem: Problem) -> Values:
    """Yield the nearest smaller and the nearest larger global batch that all devices can share evenly."""
    batch, world = problem.spec.training.global_batch, problem.world_size
    if batch % world:
        for size in sorted({batch - batch % world, batch - batch % world + world} - {0}):
            yield size, problem.with_training(global_batch=size)


def _shorter(problem: Problem) -> Values:
    length = problem.spec.training.sequence_length // 2
    while length >= _SHORTEST:
        yield length, problem.with_training(sequence_length=length)
        length //= 2


def _more_nodes(problem: Problem) -> Values:
    for doubling in range(1, _DOUBLINGS + 1):
        nodes = problem.devices.nodes << doubling
        yield nodes, problem.on(nodes=nodes)


def _accelerators(problem: Problem) -> Values:
    """Yield accelerators with more memory than the spec's, smallest memory first, for the same number of devices."""
    if problem.devices.backend == "cpu":
        return
    hardware, larger = problem.spec.hardware, []
    for name in table("accelerators"):
        other = hardware.model_copy(
            update={"accelerator": name, "per_node": problem.devices.per_node, "memory_gib": None, "peak_tflops": None}
        )
        devices = resolve_hardware(other, problem.spec.training.precision).devices
        if devices is not None and devices.memory_bytes > problem.devices.memory_bytes:
            larger.append((devices.memory_bytes, name, devices.model_copy(update={"nodes": problem.devices.nodes})))
    for _, name, devices in sorted(larger, key=lambda item: item[:2]):
        yield name, replace(problem, devices=devices)


def _larger_slices(problem: Problem) -> Values:
    """Yield larger slices of the spec's accelerator, and at last the whole device (null)."""
    if not problem.devices.slice:
        return
    profiles = table("accelerators")[problem.devices.accelerator]["slices"]["usable_gib"]
    for profile in (*sorted(profiles, key=profiles.__getitem__), None):
        other = problem.spec.hardware.model_copy(update={"slice": profile, "per_node": 1})
        devices = resolve_hardware(other, problem.spec.training.precision).devices
        if devices is not None and devices.memory_bytes > problem.devices.memory_bytes:
            yield "null" if profile is None else profile, replace(problem, devices=devices)


def smallest(solution: Solution) -> Priced:
    """Return the exact price of the layout that needs least memory."""
    search: Search = solution.search
    group, policy = search.smallest()
    return search.price(group, policy)
