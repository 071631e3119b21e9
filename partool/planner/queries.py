"""Queries besides the plan: smallest cluster; largest batch, sequence or model; combinations of what-ifs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from partool.planner.findings.offload_room import check_layout
from partool.planner.problem import Problem
from partool.planner.resolve import resolve
from partool.planner.rules.tensor_cuts import partition
from partool.planner.search.branch_and_bound import Search
from partool.planner.search.enumeration import build
from partool.planner.search.solve import harder_ones, solve
from partool.spec.numbers import MOST_LAYERS
from partool.spec.spec import Spec

Largest = Literal["micro_batch", "sequence_length", "global_batch", "model"]
LARGEST: tuple[Largest, ...] = get_args(Largest)
LENGTH = "training.sequence_length"
_SHORT = {"hardware": "hardware.accelerator", "sequence_length": LENGTH}
"""Full names of what-if keys, by their short forms without a section."""
_MOST_NODES = 2**17
_GRAIN = 256
"""Number of tokens; only multiples of this number are tried as sequence lengths."""
_MOST = 2**24
_EXACT_DEVICES = 4
"""Maximum number of devices on which the largest model is found by making plans, as plans on more devices take long."""


def smallest_cluster(spec: Spec, base_dir: Path) -> list[str] | None:
    """Return overrides that set the fewest devices on which a layout is sure to fit; None if no number is enough.

    The number of nodes is doubled until a layout fits, then bisected; if one node suffices, parts of a node are tried.
    A number of devices that cannot share the batch evenly counts as too small, so the answer is the least
    sufficient number among the numbers that were tried.
    """
    problem = resolve(spec, base_dir).problem
    if problem is None:
        return None
    per_node = problem.devices.per_node

    def nodes_fit(nodes: int) -> bool:
        return fits(problem.on(nodes=nodes))

    if nodes_fit(1):
        sizes = [size for size in range(1, per_node + 1) if per_node % size == 0]
        size = next(size for size in sizes if fits(_part_of_node(problem, size)))
        return ["hardware.nodes=1", f"hardware.per_node={size}"]
    nodes = _first(nodes_fit, 1, _MOST_NODES)
    return None if nodes is None else [f"hardware.nodes={nodes}", f"hardware.per_node={per_node}"]


def _part_of_node(problem: Problem, size: int) -> Problem:
    """Return the problem on some devices of one node, with their share of the node's memory and cores."""
    devices = problem.devices
    share = size / devices.per_node
    memory = None if devices.host_memory_bytes is None else int(devices.host_memory_bytes * share)
    if devices.backend == "cpu":
        return problem.on(nodes=1, per_node=size)
    return problem.on(nodes=1, per_node=size, host_memory_bytes=memory, host_cores=int(devices.host_cores * share))


def largest(spec: Spec, base_dir: Path, what: Largest) -> list[str] | None:
    """Return an override that sets the largest value with which a layout is sure to fit; None if no value fits.

    ``global_batch`` is the largest number of sequences per step with no more micro-batches than pipeline stages:
    without this limit any batch would fit. ``model`` changes the number of layers only; the result is None for a model
    whose layers are listed one by one, or that transformers builds.
    """
    problem = resolve(spec, base_dir).problem
    if problem is None:
        return None
    if what == "micro_batch":
        micro_batch = _last([n for n in _micro_batches(problem) if fits(problem.with_parallel(micro_batch=n))])
        return None if micro_batch is None else [f"parallel.micro_batch={micro_batch}"]
    if what == "global_batch":
        unit = problem.world_size

        def batch_fits(count: int) -> bool:
            return fits(problem.with_training(global_batch=count * unit), once=True)

        count = _most(batch_fits, _MOST // unit)
        return None if count is None else [f"training.global_batch={count * unit}"]
    if what == "model":
        return _largest_model(problem)
    limit = problem.model.max_position if problem.model.position == "learned" else _MOST

    def length_fits(count: int) -> bool:
        return fits(problem.with_training(sequence_length=count * _GRAIN))

    count = _most(length_fits, limit // _GRAIN)
    return None if count is None else [f"training.sequence_length={count * _GRAIN}"]


def _largest_model(problem: Problem) -> list[str] | None:
    """Return an override that sets the largest number of layers that fits; host memory and disks are used if allowed.

    On up to ``_EXACT_DEVICES`` devices the result is exact: with one more layer, there is no plan. On more devices,
    only the extreme policies are tried, and a few more layers may fit with other policies.
    """
    given = problem.spec.model.attention is not None and isinstance(problem.spec.model.attention.layer_types, list)
    if given or problem.described is not None or isinstance(problem.spec.parallel.recompute, list):
        return None
    least = 1 if problem.model.moe is None else problem.model.moe.first_dense_layers + 1

    def layers_fit(count: int) -> bool:
        return fits(problem.with_layers(least + count - 1))

    def layers_plan(count: int) -> bool:
        return plans(problem.with_layers(least + count - 1))

    count = _most(layers_fit, MOST_LAYERS - least + 1)
    if problem.world_size <= _EXACT_DEVICES:
        count = _pushed(layers_plan, count or 1, MOST_LAYERS - least + 1)
    return None if count is None else [f"model.layers={least + count - 1}"]


def plans(problem: Problem) -> bool:
    """Return True if a problem has a plan: a layout that is sure to fit and breaks no rule.

    This is exact, and slower than :func:`fits`, which checks extreme policies only.
    """
    best = solve(problem).chosen
    if best is None or not best.safe:
        return False
    findings = [*check_layout(problem, best), *partition(problem, best.layout).findings]
    return not any(finding.severity == "error" for finding in findings)


def fits(problem: Problem, *, once: bool = False) -> bool:
    """Return True if a layout is sure to fit; with ``once``, only layouts with at most one micro-batch per stage count.

    As in a plan, gathers that need least memory and tiles of sequences are tried if nothing else fits.
    """
    return any(_fits(one, once=once) for one in variants(problem))


def variants(problem: Problem) -> Iterator[Problem]:
    """Yield the problem, then the problem with more and more constraints relaxed to save memory at the cost of time."""
    yield problem
    yield from harder_ones(problem)


def _fits(problem: Problem, *, once: bool) -> bool:
    space = build(problem)
    mask = np.ones(space.size, dtype=bool)
    if once:
        mask = np.asarray(space.groups.accumulation <= space.groups.pp)
    if not mask.any():
        return False
    search = Search(problem, space, mask)
    group, policy = search.smallest()
    return search.price(group, policy).safe


def combinations(varied: list[str]) -> list[list[str]]:
    """Return a list of overrides for every combination of the values in ``key=a,b,c``.

    ``hardware`` stands for ``hardware.accelerator``, ``sequence_length`` for ``training.sequence_length``. Raises
    ``ValueError`` if there is no ``=``, or no value.
    """
    axes = []
    for text in varied:
        key, equals, values = text.partition("=")
        listed = [value.strip() for value in _split(values)]
        if not equals or not key.strip() or not all(listed):
            raise ValueError(f"{text!r} is not key=value,value,...")
        name = _SHORT.get(key.strip(), key.strip())
        axes.append([f"{name}={value}" for value in listed])
    return [list(row) for row in itertools.product(*axes)]


def _split(text: str) -> list[str]:
    """Split text at the commas that are outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _micro_batches(problem: Problem) -> list[int]:
    """Return the micro-batch sizes that layouts of the problem can have, in ascending order."""
    space = build(problem.with_parallel(micro_batch="auto"))
    return sorted({int(n) for n in np.unique(space.groups.micro_batch)})


def _first(fit: Callable[[int], bool], lower: int, most: int) -> int | None:
    """Return the least number that fits, or None; ``lower`` is too small and is doubled, then the range is bisected."""
    upper = 2 * lower
    while not fit(upper):
        lower, upper = upper, 2 * upper
        if upper > most:
            return None
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (lower, middle) if fit(middle) else (middle, upper)
    return upper


def _most(fit: Callable[[int], bool], most: int) -> int | None:
    """Return the largest number up to ``most`` that fits, by doubling and then bisecting; None if 1 does not fit."""
    if most < 1 or not fit(1):
        return None
    lower = 1
    while 2 * lower <= most and fit(2 * lower):
        lower *= 2
    upper = min(2 * lower, most + 1)
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if fit(middle) else (lower, middle)
    return lower


def _pushed(fit: Callable[[int], bool], guess: int, most: int) -> int | None:
    """Return the largest number up to ``most`` that fits, by bisecting after larger and larger steps up from ``guess``.

    If ``guess`` does not fit, the search bisects between 0 and ``guess``; None if no number fits.
    """
    if fit(guess):
        step = 1
        while guess + step <= most and fit(guess + step):
            guess, step = guess + step, 2 * step
        lower, upper = guess, min(guess + step, most + 1)
    else:
        lower, upper = 0, guess
    while upper - lower > 1:
        middle = (lower + upper) // 2
        lower, upper = (middle, upper) if fit(middle) else (lower, middle)
    return lower or None


def _last(values: list[int]) -> int | None:
    return values[-1] if values else None
