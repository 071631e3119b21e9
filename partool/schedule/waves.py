"""Schedules that fold back over the ranks: Hanayo's waves and ZB-V, found by event-driven list scheduling."""

from __future__ import annotations

from partool.schedule.actions import Action, Kind, Order


def wave_rank(stage: int, ranks: int) -> int:
    """Return the rank of a stage that goes to and fro over the ranks (Liu et al., Hanayo, SC'23, section 3)."""
    place = stage % (2 * ranks)
    return place if place < ranks else 2 * ranks - 1 - place


def hanayo(ranks: int, micro_batches: int, chunks: int, cap: int) -> Order:
    """Hanayo with ``chunks / 2`` waves (Liu et al., SC'23): each rank does next what can start first.

    Ties go to backward passes, then to the deepest stage, then to the lowest micro-batch. ``cap`` bounds the
    micro-batches under way; 0 sets no bound.
    """
    return _listed(ranks, micro_batches, chunks, cap or micro_batches, split=False)


def zb_v(ranks: int, micro_batches: int, chunks: int, cap: int) -> Order:
    """ZB-V (Qi et al., arXiv 2405.15362): two stages per rank in a V, weight gradients fill what would be idle."""
    return _listed(ranks, micro_batches, chunks, cap or ranks, split=True)


def _listed(ranks: int, micro_batches: int, chunks: int, cap: int, *, split: bool) -> Order:
    stages = ranks * chunks
    place = [wave_rank(stage, ranks) for stage in range(stages)]
    cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    back: Kind = "I" if split else "B"
    ready: list[dict[Action, float]] = [{} for _ in range(ranks)]
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    free = [0.0] * ranks
    admitted = done = 0
    while done < micro_batches * stages * (3 if split else 2):
        while admitted < micro_batches and admitted < cap + _finished(lists[0], back):
            ready[0][Action("F", 0, admitted)] = 0.0
            admitted += 1
        best = min(
            (max(when, free[rank]), action.kind == "W", action.kind == "F", -action.stage if action.kind == "F" else 0,
             action.micro_batch, -action.stage, rank, action)
            for rank in range(ranks) for action, when in ready[rank].items()
        )  # fmt: skip
        start, rank, action = best[0], best[-2], best[-1]
        del ready[rank][action]
        stop = free[rank] = start + cost[action.kind]
        lists[rank].append(action)
        done += 1
        kind, stage, batch = action
        if kind == "F" and stage < stages - 1:
            ready[place[stage + 1]][Action("F", stage + 1, batch)] = stop
        elif kind == "F":
            ready[rank][Action(back, stage, batch)] = stop
        elif kind == back:
            if stage:
                ready[place[stage - 1]][Action(back, stage - 1, batch)] = stop
            if split:
                ready[rank][Action("W", stage, batch)] = stop
    return tuple(tuple(actions) for actions in lists)


def _finished(actions: list[Action], back: str) -> int:
    return sum(action.kind == back and action.stage == 0 for action in actions)
