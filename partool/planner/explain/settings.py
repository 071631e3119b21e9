"""Why settings of a layout were taken: the same layout with the next milder setting, priced exactly.

Each sentence comes from one such comparison, and carries the figure of the other layout beside the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from partool.planner.explain.summary import but, recompute, times
from partool.planner.forms.runnable import runnable
from partool.planner.search.price import Priced, host_limit, pinned_limit
from partool.planner.search.queue import Key
from partool.planner.search.solve import Solution
from partool.planner.search.space import GROUP_COLUMNS
from partool.spec.numbers import GIB


@dataclass(frozen=True)
class SettingComparison:
    """The plan's layout beside the same layout with one other setting."""

    name: str
    """The plan's setting, as in ``Recompute full``."""
    other_name: str
    """The other setting in a sentence, as in ``selective``."""
    other: Priced


def sentence(best: Priced, compared: SettingComparison) -> str:
    """Return a comparison in one sentence, with the figure that decides."""
    return f"{compared.name}: with {compared.other_name}, {beside(best, compared.other)}."


def beside(best: Priced, other: Priced) -> str:
    """Return what the same layout with another setting needs or takes, as the end of a sentence."""
    problem, memory = best.problem, other.memory
    if memory.total_bytes > memory.capacity_bytes:
        return f"this layout would need {memory.total_bytes / GIB:.1f} of {memory.capacity_bytes / GIB:.1f} GiB"
    if other.host_bytes > host_limit(problem):
        return f"it would need {other.host_bytes / GIB:.0f} of {host_limit(problem) / GIB:.0f} GiB of a node's memory"
    if not other.fits:
        pinned = sum(other.pinned_parts.values()) / GIB
        return f"a rank would pin {pinned:.1f} of {pinned_limit(problem) / GIB:.1f} GiB"
    takes = f"it takes {times(other, best)}"
    if runnable(problem, best.layout) and not runnable(other.problem, other.layout):
        return f"{takes}, but cannot run yet"
    if other.step_time_s > best.step_time_s:
        return takes
    return f"{takes}, but {but(best, other)}"


def milder_recompute(solution: Solution, best: Priced) -> SettingComparison | None:
    """Return the comparison with the best policy that recomputes less and offloads the same; None without one.

    Where none of these fits, it is the one that needs least memory.
    """
    key = _key(solution, best)
    if key is None:
        return None
    group, policy = key
    table, search = solution.space.policies, solution.search
    same = (table.gpu_fraction == table.gpu_fraction[policy]) & (table.parameters == table.parameters[policy])
    same &= table.activations == table.activations[policy]
    less = np.where(table.recompute == 0, 0.0, table.recompute + table.share)
    milder = np.flatnonzero(same & (less < less[policy]))
    groups = np.full(len(milder), group)
    allowed = solution.space.allowed(groups, milder)
    milder, groups = milder[allowed], groups[allowed]
    if not len(milder):
        return None
    bound_s, _ = search.columns(groups, milder)
    order = bound_s if np.isfinite(bound_s).any() else search.memory(groups, milder, exact=True)[0]
    other = search.price(group, int(milder[np.argmin(order)]))
    return SettingComparison(f"Recompute {recompute(best.layout)}", recompute(other.layout), other)


def lower_stage(solution: Solution, best: Priced) -> SettingComparison | None:
    """Return the comparison with the next lower ZeRO stage on the same mesh; None without one."""
    for zero in range(best.layout.data.zero - 1, -1, -1):
        loose = ("shards", "replicas") if zero == 0 else ()
        if (other := _sibling(solution, best, {"zero": zero}, loose)) is not None:
            return SettingComparison(f"ZeRO-{best.layout.data.zero}", f"stage {zero}", other)
    return None


def higher_stage(solution: Solution, best: Priced) -> SettingComparison | None:
    """Return the comparison of whole copies of the state with ZeRO-1 on the same mesh; None without one."""
    other = _sibling(solution, best, {"zero": 1}, ("shards", "replicas"))
    return None if other is None else SettingComparison("ZeRO-0", "stage 1", other)


def other_micro_batch(solution: Solution, best: Priced) -> SettingComparison | None:
    """Return the comparison with the next larger micro-batch, or else the next smaller one; None without one."""
    layout = best.layout
    share = layout.micro_batch * layout.derived.accumulation
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    at = sizes.index(layout.micro_batch)
    for size in (*sizes[at + 1 :], *reversed(sizes[:at])):
        changed = {"micro_batch": size, "accumulation": share // size}
        if (other := _sibling(solution, best, changed)) is not None:
            return SettingComparison(f"Micro-batch {layout.micro_batch}", str(size), other)
    return None


def compiled(solution: Solution, best: Priced) -> SettingComparison | None:
    """Return the comparison of a layout without compiled blocks with the same layout with them; None without one."""
    if best.layout.compile != "none":
        return None
    other = _sibling(solution, best, {"compiled": 1})
    return None if other is None else SettingComparison("Compile none", "block", other)


def _key(solution: Solution, best: Priced) -> Key | None:
    """Return group and policy of a layout that the search has priced."""
    return next((key for key, one in solution.search.exact.items() if one is best), None)


def _sibling(
    solution: Solution, best: Priced, changed: Mapping[str, int], loose: tuple[str, ...] = ()
) -> Priced | None:
    """Return the layout that has other values in the columns of ``changed``, and any in those of ``loose``."""
    key = _key(solution, best)
    if key is None:
        return None
    groups, space = solution.space.groups, solution.space
    index = np.arange(space.size)
    for name in (*GROUP_COLUMNS, "compiled"):
        if name not in loose:
            column = np.broadcast_to(getattr(groups, name), space.size)
            index = index[column[index] == changed.get(name, column[key[0]])]
    index = index[space.allowed(index, np.full(len(index), key[1]))]
    return solution.search.price(int(index[0]), key[1]) if len(index) else None
