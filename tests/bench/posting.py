"""What it costs that receives are posted in a safe order: makespans against receives posted without limit.

``python tests/bench/posting.py``: a receive's transfer begins once its send and its receive are both posted. The host
posts a receive when it has given the device the action before it, which is when that action starts. Stages take random
times, from half to one and a half times the mean; a transfer takes a tenth to twice the time of a forward pass.
"""

from __future__ import annotations

import random
import statistics

from _record import write

from partool.schedule import COMPUTE, Action, Schedule, generate, peer, posts
from partool.schedule.posting import Posts
from partool.schedule.steps import Needs

CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2), ("hanayo", 2))
SIZES = ((4, 8), (4, 32), (8, 16), (8, 64))
SAMPLES, SENDS = 10, (0.1, 0.5, 1.0, 2.0)


def makespan(
    schedule: Schedule, times: dict[tuple[str, int], float], send: float, found: tuple[Posts, ...] | None
) -> float:
    """Return the time of the last action; ``found`` are the posts, None for receives posted at the start."""
    needs, ranks = Needs(schedule), range(schedule.ranks)
    at, free, started = [0] * schedule.ranks, [0.0] * schedule.ranks, [0.0] * schedule.ranks
    inbound = {action for actions in schedule.lists for action in actions if action.kind in ("RECV_F", "RECV_B")}
    posted = {} if found is not None else dict.fromkeys(inbound, 0.0)
    sent: dict[Action, float] = {}

    def goes_on(rank: int) -> bool:
        if at[rank] == len(schedule.lists[rank]):
            return False
        for receive in found[rank].get(at[rank], ()) if found is not None else ():
            posted.setdefault(receive, started[rank])
        action = schedule.lists[rank][at[rank]]
        if action.kind in COMPUTE:
            needed = [need for need in needs.of(action) if need in inbound]
            if any(need not in sent or need not in posted for need in needed):
                return False
            arrivals = [max(sent[need], posted[need]) + send for need in needed]
            started[rank] = max([free[rank], *arrivals])
            free[rank] = started[rank] + times[action.kind, action.stage]
        elif action.kind.startswith("SEND"):
            sent[peer(schedule, rank, action)[1]] = free[rank]
        at[rank] += 1
        return True

    while any([goes_on(rank) for rank in ranks]):  # noqa: C419 - every rank goes on.
        pass
    assert all(place == len(actions) for place, actions in zip(at, schedule.lists, strict=True))
    return max(free)


def main() -> None:
    """Print and record the ratio of makespans, by schedule and size."""
    rows = []
    for name, chunks in CASES:
        schedules = [(generate(name, size, count, chunks)) for size, count in SIZES]
        known = [posts(schedule) for schedule in schedules]
        row: dict[str, object] = {"schedule": name, "chunks": chunks}
        for send in SENDS:
            rng = random.Random(f"{name}{chunks}{send}")
            ratios = []
            for schedule, found in zip(schedules, known, strict=True):
                for _ in range(SAMPLES):
                    each = {stage: rng.uniform(0.5, 1.5) / chunks for stage in range(schedule.stages)}
                    scale = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
                    times = {(kind, stage): scale[kind] * one for stage, one in each.items() for kind in scale}
                    ratios.append(makespan(schedule, times, send, found) / makespan(schedule, times, send, None))
            row[f"send {send}"] = [round(statistics.median(ratios), 4), round(max(ratios), 4)]
        rows.append(row)
        print(row)
    write("posting", {"what": "[median, largest] ratio of makespans", "samples": SAMPLES, "rows": rows})


if __name__ == "__main__":
    main()
