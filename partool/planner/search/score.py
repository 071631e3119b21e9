"""The order of layouts: the predicted step time, raised by what the prediction may err and by the risk to run out.

The score of a layout is ``t * (1 + sum(p) + KAPPA * P + s + EMPTY * f)`` seconds, and the layout with the least score
is taken. ``t`` is the predicted step time. ``p`` is the paired error of one mechanism that the layout uses and the spec
does not ask for: by this share predicted ratios between layouts with and without the mechanism err
(:func:`partool.cost.evidence.pair_error`). Only data parallelism with ZeRO has none. ``P`` is the probability that
the layout does not fit into the device's memory, ``s`` a small price of complexity, ``f`` the filled share of memory.

No term depends on the device's memory except ``P`` and ``f``, which fall with it. A layout that fits also fits into a
larger memory. So the least score of layouts that can run does not rise with memory; the step time may, where a risk
is bought off. Where no layout that can run fits, a layout that only plans may have the better score.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from partool.cost.case import SCHEDULES, SEQUENCE_METHODS, Column, Layouts, among
from partool.cost.evidence import PAIRED_FLOOR, pair_error, uses
from partool.planner.problem import Problem, Relaxation
from partool.planner.search.policies import Policies
from partool.strategies.sequence import METHODS, PREFERENCE

KAPPA = 0.25
"""Share of the step time that a layout which surely does not fit would be charged: a plan may be tighter by ten percent
in probability where it is faster by more than 2.5 %. A stated constant; runs do not say what a failed start costs."""
EMPTY = 2e-3
"""Share of the step time that a completely filled device is charged: of equally fast layouts the smallest is taken."""
SMALL = 5e-4
"""Share of the step time that one more kind of parallelism is charged, and a fifth of it one more setting: of equally
fast layouts the simpler is taken."""
UNFIT_BELOW = 1e-3
"""Probability of not fitting below which layouts count as sure to fit in bounds."""
_SETTINGS: tuple[Relaxation, ...] = ("gathers", "tiles", "disks")
"""Relaxed constraints that stand for settings without measured pairs; each is charged the stated floor."""
_RARE = tuple(index for index, name in enumerate(SEQUENCE_METHODS) if name in METHODS and not METHODS[name].common)
"""Sequence methods that hardly any published run uses; each is charged the floor beside the error of all methods."""
_1F1B = SCHEDULES.index("1f1b")


@dataclass(frozen=True)
class ScoreWeights:
    """Shares of the step time that the score adds for what groups and policies use, without the risk to run out."""

    group: NDArray[np.float64]
    policy: NDArray[np.float64]

    @classmethod
    def of(
        cls, problem: Problem, groups: Layouts, size: int, policies: Policies, *, proven: bool = True
    ) -> ScoreWeights:
        """Return the weights of a space's groups and policies; without ``proven``, mechanisms have no errors."""
        moved = policies.rows
        return cls(
            np.broadcast_to(_shares(problem, groups, proven=proven) + _complexity(problem, groups), size),
            np.broadcast_to(_mechanisms(problem, moved, proven=proven) + _movement(moved), len(policies)),
        )


def risk_of(problem: Problem, layouts: Layouts) -> Column:
    """Return the sum of the errors of all mechanisms that layouts use and the spec does not ask for."""
    return _shares(problem, layouts, proven=True)


def complexity_of(problem: Problem, layouts: Layouts) -> Column:
    """Return the small share of the step time that the settings of layouts are charged."""
    recomputed = 0.2 * SMALL * (np.asarray(layouts.recompute) > 0) * np.asarray(layouts.recompute_share)
    return np.asarray(_complexity(problem, layouts) + _movement(layouts) + recomputed)


def fill_share(total_bytes: Column, unfit: Column, memory_bytes: float) -> Column:
    """Return the share of the step time that a layout is charged for filled memory and for the risk to run out.

    ``unfit`` is the probability that the layout does not fit.
    """
    return np.asarray(KAPPA * unfit + EMPTY * np.asarray(total_bytes) / memory_bytes)


def errors(problem: Problem) -> dict[str, float]:
    """Return the error of each mechanism that the spec does not ask for; none with ``limits.prefer: fastest``."""
    if problem.spec.limits.prefer == "fastest":
        return {}
    return {name: error for name, error in _errors().items() if name not in problem.asked}


def charged(problem: Problem, layouts: Layouts) -> dict[str, float]:
    """Return the error of each mechanism that one layout (a single row) uses and the spec does not ask for."""
    masks = uses(layouts)
    return {name: error for name, error in errors(problem).items() if bool(masks[name])}


@cache
def _errors() -> dict[str, float]:
    names = uses(Layouts()).keys() - {"data", "zero3"}
    return {name: pair_error(name) for name in sorted(names)}


def _relaxed_share(problem: Problem) -> float:
    """Return the share that all layouts of a problem are charged for constraints that were relaxed."""
    if problem.spec.limits.prefer == "fastest":
        return 0.0
    return PAIRED_FLOOR * sum(name in problem.relaxed for name in _SETTINGS)


def _shares(problem: Problem, layouts: Layouts, *, proven: bool) -> Column:
    return _mechanisms(problem, layouts, proven=proven) + (_relaxed_share(problem) if proven else 0.0)


def _mechanisms(problem: Problem, layouts: Layouts, *, proven: bool) -> Column:
    """Return the sum of the errors of the mechanisms that layouts use; 0 without ``proven``."""
    counted = errors(problem) if proven else {}
    if not counted:
        return 0.0
    masks = uses(layouts)
    total: Any = sum(error * masks[name] for name, error in counted.items())
    if "sequence" in counted:
        total = total + PAIRED_FLOOR * ((np.asarray(layouts.cp) > 1) & among(layouts.sequence_method, _RARE))
    return np.asarray(total)


def _complexity(problem: Problem, groups: Layouts) -> Column:
    """Return the share that groups are charged for the kinds of parallelism and the settings that they have."""
    degrees = (groups.tp, groups.pp, groups.cp, groups.ep, groups.etp)
    kinds: Any = 1.0 * (np.asarray(groups.tp) > problem.domain)
    for degree in degrees:
        kinds = kinds + (np.asarray(degree) > 1)
    several = np.asarray(groups.pp) > 1
    settings: Any = several * (np.asarray(groups.schedule) != _1F1B) + several * np.log2(groups.chunks)
    settings = settings + (np.asarray(groups.in_flight) > 0) + 0.5 * np.asarray(groups.zero)
    settings = settings + ((np.asarray(groups.zero) > 0) & (np.asarray(groups.replicas) > 1))
    settings = settings + (np.asarray(groups.tensor_inner) > 1) + np.asarray(groups.sequence_norms)
    settings = settings + (np.asarray(groups.tensor_chunks) > 1)
    preferred = np.array([PREFERENCE.index(name) if name in PREFERENCE else 0 for name in SEQUENCE_METHODS])
    settings = settings + 0.1 * preferred[np.asarray(groups.sequence_method, dtype=int)] * (np.asarray(groups.cp) > 1)
    inside = (np.asarray(groups.sequence_inner) > 1) + 1.0 * (np.asarray(groups.sequence_teams) > 1)
    settings = settings + 0.05 * inside
    ranks: Any = sum(np.log2(degree) for degree in degrees) + np.log2(groups.accumulation)
    return np.asarray(SMALL * (kinds + 0.2 * settings + 0.01 * ranks))


def _movement(layouts: Layouts) -> Column:
    """Return the share that layouts are charged for each kind of offload."""
    moved: Any = (np.asarray(layouts.gpu_fraction) < 1.0) * (1.0 + 0.1 * np.asarray(layouts.gpu_fraction))
    return np.asarray(
        SMALL * (moved + np.asarray(layouts.offload_parameters) + np.asarray(layouts.offload_activations))
    )
