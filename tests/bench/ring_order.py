"""What it costs that WeiPipe's lists follow one order: makespans against weights sent to rank 0 far ahead.

``python tests/bench/ring_order.py``: all lists are simulated, so receives take no time. Stages take random times, from
half to one and a half times the mean; a backward pass with recomputation takes three times as long as a forward pass. A
transfer of weights takes 0.1 to 2 times the mean time of a forward pass, a transfer of gradients twice that.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace

from _record import write

from partool.schedule import COMPUTE, Schedule, StageTimes, peer, simulate
from partool.schedule.weipipe import VARIANTS, weipipe

SIZES = ((2, 2, 1), (4, 2, 1), (4, 8, 1), (8, 2, 1), (8, 8, 1), (8, 4, 2))
"""Ranks, rounds of micro-batches, stages per rank."""
SAMPLES, SENDS = 5, (0.1, 0.3, 0.5, 1.0, 2.0)


def ahead(schedule: Schedule) -> Schedule:
    """Return the schedule with weights sent from owners to rank 0 as many turns ahead as there are ranks."""
    lists = []
    for rank, actions in enumerate(schedule.lists):
        computed, placed = 0, []
        for action in actions:
            if action.kind in ("SEND_FW", "SEND_BW") and peer(schedule, rank, action)[0] == 0:
                placed.append((_passes(schedule, action.micro_batch - 1 - schedule.ranks), 1, action))
            else:
                placed.append((computed, 0 if action.kind.endswith("_G") else 2, action))
                computed += action.kind in COMPUTE
        lists.append(tuple(action for *_, action in sorted(placed, key=lambda one: one[:2])))
    return replace(schedule, lists=tuple(lists))


def _passes(schedule: Schedule, turns: int) -> int:
    """Return the number of a rank's passes in the first turns."""
    both = turns - schedule.stages if schedule.name == "weipipe" else 0
    return max(0, turns) + max(0, both)


def main() -> None:
    """Print and record the ratio of makespans, by schedule and transfer time."""
    rows = []
    for name in VARIANTS:
        schedules = [weipipe(name, ranks, ranks * rounds, chunks) for ranks, rounds, chunks in SIZES]
        row: dict[str, object] = {"schedule": name}
        for send in SENDS:
            rng = random.Random(f"{name}{send}")
            ratios = []
            for schedule in schedules:
                early = ahead(schedule)
                for _ in range(SAMPLES):
                    each = [rng.uniform(0.5, 1.5) for _ in range(schedule.stages)]
                    whole = [3 * one for one in each]
                    times = StageTimes(each, whole, each, send, [2 * one for one in each], gradient_send_s=2 * send)
                    ratios.append(simulate(schedule, times).makespan_s / simulate(early, times).makespan_s)
            row[f"send {send}"] = [round(statistics.median(ratios), 4), round(max(ratios), 4)]
        rows.append(row)
        print(row)
    write("ring_order", {"what": "[median, largest] ratio of makespans", "samples": SAMPLES, "rows": rows})


if __name__ == "__main__":
    main()
