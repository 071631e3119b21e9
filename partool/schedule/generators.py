"""Pure functions that return the ordered compute actions of each rank for given sizes of a schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from partool.schedule.actions import Action, Order, Schedule, with_transfers
from partool.schedule.waves import hanayo, wave_rank, zb_v
from partool.schedule.weipipe import order_of, owner, weipipe
from partool.strategies.schedules import MOVING_WEIGHTS, SCHEDULES, ScheduleRecord

Orderer = Callable[[int, int, int, int], Order]
"""Function of (ranks, micro_batches, chunks, cap) that returns the compute actions of each rank, in order."""


def gpipe(ranks: int, micro_batches: int, chunks: int, cap: int) -> Order:
    """Return all forward passes, then all backward passes (Huang et al., arXiv 1811.06965)."""
    batches = range(micro_batches)
    return tuple(
        tuple(Action("F", rank, batch) for batch in batches) + tuple(Action("B", rank, batch) for batch in batches)
        for rank in range(ranks)
    )


def one_forward_one_backward(ranks: int, micro_batches: int, chunks: int, cap: int) -> Order:
    """Return 1F1B, where a rank keeps at most ``ranks - rank`` micro-batches (Narayanan et al., arXiv 2006.09503)."""
    return tuple(_alternate(rank, min(ranks - 1 - rank, micro_batches), micro_batches) for rank in range(ranks))


def interleaved(ranks: int, micro_batches: int, chunks: int, cap: int) -> Order:
    """Return interleaved 1F1B, where each rank runs ``chunks`` stages that are not adjacent.

    Source: Narayanan et al., arXiv 2104.04473, section 2.2. Micro-batches go through the stages of a rank in groups of
    ``ranks``, so the number of micro-batches must be a multiple of ``ranks``. A rank warms up with
    ``2 (ranks - rank - 1) + (chunks - 1) ranks`` forward passes, each through one stage.
    """
    units = [
        (chunk, group + offset)
        for group in range(0, micro_batches, ranks)
        for chunk in range(chunks)
        for offset in range(ranks)
    ]
    back = [(chunks - 1 - chunk, batch) for chunk, batch in units]
    order = []
    for rank in range(ranks):
        warm = min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, len(units))
        forward = [Action("F", chunk * ranks + rank, batch) for chunk, batch in units]
        backward = [Action("B", chunk * ranks + rank, batch) for chunk, batch in back]
        order.append(_weave(forward, backward, warm))
    return tuple(order)


def zb_h1(ranks: int, micro_batches: int, chunks: int, cap: int) -> Order:
    """Return ZB-H1 (Qi et al., arXiv 2401.10241), which is 1F1B with postponed weight gradients in the same memory.

    Rank ``r`` may postpone ``r`` weight gradients in addition to its ``ranks - r`` micro-batches in flight. The
    postponed computations fill the time in which 1F1B waits for gradients of later stages.
    """
    return tuple(_put_off(rank, min(ranks - 1 - rank, micro_batches), micro_batches) for rank in range(ranks))


ORDERS: dict[str, Orderer] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "hanayo": hanayo,
    **{name: order_of(name) for name in MOVING_WEIGHTS},
}
"""Name of a schedule in specs → function that returns the schedule's compute actions. The names are those in
:data:`partool.strategies.schedules.SCHEDULES`."""


def rank_of(name: str, stage: int, ranks: int) -> int:
    """Return the pipeline rank of a stage; if weights are sent around a ring, the rank of the stage's owner."""
    record = SCHEDULES[name]
    if record.moves == "weights":
        return owner(stage, ranks)
    return wave_rank(stage, ranks) if record.folded else stage % ranks


def _refused(record: ScheduleRecord, ranks: int, micro_batches: int, chunks: int) -> str | None:
    """Return the reason why a schedule cannot have these sizes (all at least 1); None if it can have them."""
    if record.stages == "1" and chunks > 1:
        return f"one stage per rank, not {chunks}"
    if record.stages == "2" and chunks != 2:
        return f"two stages per rank, not {chunks}"
    if record.stages == "2 per wave" and chunks % 2:
        return f"two stages per rank and wave, not {chunks} stages"
    if record.whole_rounds and micro_batches % ranks:
        return f"{micro_batches} micro-batches are no multiple of the {ranks} pipeline ranks"
    return None


def check(name: str, ranks: int, micro_batches: int, chunks: int, cap: int = 0) -> str | None:
    """Return the reason why a schedule of these sizes cannot be made; None if it can be made."""
    if name not in SCHEDULES:
        return f"there is no schedule {name!r}; known: {', '.join(SCHEDULES)}"
    if min(ranks, micro_batches, chunks) < 1:
        return "ranks, micro-batches and chunks must be at least 1"
    if cap and not SCHEDULES[name].capped:
        return f"{name}: the micro-batches in flight follow from the schedule and cannot be bounded"
    if cap < 0:
        return "the bound of micro-batches in flight must be at least 1 (0: none)"
    reason = _refused(SCHEDULES[name], ranks, micro_batches, chunks)
    return f"{name}: {reason}" if reason else None


def nearest(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> int | None:
    """Return the accepted number of micro-batches nearest to ``micro_batches``; of two at equal distance, the larger.

    Returns None if no number of micro-batches would be accepted because another size is wrong.
    """
    for away in range(max(micro_batches, ranks * chunks) + 1):
        for count in (micro_batches + away, micro_batches - away):
            if check(name, ranks, count, chunks) is None:
                return count
    return None


@lru_cache(maxsize=256)
def order(name: str, ranks: int, micro_batches: int, chunks: int = 1, cap: int = 0) -> Order:
    """Return the compute actions of each rank; raises ``ValueError`` if :func:`check` returns a reason.

    ``cap`` bounds the number of micro-batches in flight on a rank, over all its stages together; 0 sets no bound.
    """
    if reason := check(name, ranks, micro_batches, chunks, cap):
        raise ValueError(reason)
    return ORDERS[name](ranks, micro_batches, chunks, cap)


def generate(name: str, ranks: int, micro_batches: int, chunks: int = 1, cap: int = 0) -> Schedule:
    """Return a schedule with its transfers; raises ``ValueError`` if :func:`check` returns a reason."""
    lists = order(name, ranks, micro_batches, chunks, cap)
    if SCHEDULES[name].moves == "weights":
        return weipipe(name, ranks, micro_batches, chunks)
    placement = tuple(rank_of(name, stage, ranks) for stage in range(ranks * chunks))
    return Schedule(name, ranks, micro_batches, chunks, placement, with_transfers(lists, placement))


def _alternate(stage: int, warm: int, micro_batches: int) -> tuple[Action, ...]:
    forward = [Action("F", stage, batch) for batch in range(micro_batches)]
    backward = [Action("B", stage, batch) for batch in range(micro_batches)]
    return _weave(forward, backward, warm)


def _weave(forward: list[Action], backward: list[Action], warm: int) -> tuple[Action, ...]:
    """Return ``warm`` forward actions, then forward and backward actions alternately, then the remaining actions."""
    woven = list(forward[:warm])
    for ahead, behind in zip(forward[warm:], backward, strict=False):
        woven += [ahead, behind]
    return (*woven, *backward[len(forward) - warm :])


def _put_off(rank: int, warm: int, micro_batches: int) -> tuple[Action, ...]:
    actions: list[Action] = []
    pending: list[Action] = []
    for action in _alternate(rank, warm, micro_batches):
        if action.kind == "F":
            actions.append(action)
            continue
        actions.append(action._replace(kind="I"))
        pending.append(action._replace(kind="W"))
        if len(pending) > rank:
            actions.append(pending.pop(0))
    return (*actions, *pending)
