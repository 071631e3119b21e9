"""Seconds of 10,000 simulations of pipelines with 8 ranks and 32 micro-batches; the goal is 5 s.

Each schedule alone, batched and one by one, with its lists and graph built anew ("cold") and cached; then all schedules
together as a planner prices them, 10,000 in all. Results are checked against the event simulation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from _record import write

from partool.schedule import StageTimes, generate, makespan, simulate, span_s
from partool.schedule.generators import order
from partool.schedule.graph import graph, graph_of, repeating
from partool.schedule.steps import steps_of
from partool.schedule.weipipe import weipipe
from partool.strategies.schedules import SCHEDULES

RANKS, MICRO_BATCHES, COUNT, ROUNDS = 8, 32, 10_000, 5
GOAL_S = 5.0
CHUNKS = {"interleaved": (2, 4), "zb-v": (2,), "hanayo": (2, 4), "weipipe": (1, 2)}


def shapes() -> list[tuple[str, int]]:
    """Return each schedule with its number of chunks."""
    return [(name, chunks) for name in SCHEDULES for chunks in CHUNKS.get(name, (1,))]


def cases(chunks: int, count: int) -> dict[str, Any]:
    """Return the given number of sets of uneven stage times."""
    rng = np.random.default_rng(1)
    backward = 2 + rng.random((count, RANKS * chunks))
    return {
        "forward_s": 1 + rng.random(backward.shape),
        "backward_s": backward,
        "weight_s": 0.4 * backward,
        "send_s": 0.1 * rng.random(count),
    }


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    start = time.perf_counter()
    found = run()
    return time.perf_counter() - start, found


def forget() -> None:
    """Clear the caches of lists and graphs."""
    for kept in (order, graph, graph_of, repeating, steps_of, weipipe):
        kept.cache_clear()


def one_shape(name: str, chunks: int) -> dict[str, float]:
    """Measure one schedule; raises ``AssertionError`` if a result differs from the event simulation's."""
    args = (name, RANKS, MICRO_BATCHES, chunks)
    many = cases(chunks, COUNT)
    few = {key: part[:200] for key, part in many.items()}
    forget()
    cold_s, found = timed(lambda: makespan(*args, **many))
    warm = [timed(lambda: makespan(*args, **many))[0] for _ in range(ROUNDS)]
    schedule = generate(*args)
    times = [
        StageTimes(*(list(few[key][row]) for key in ("forward_s", "backward_s", "weight_s")), float(few["send_s"][row]))
        for row in range(200)
    ]
    exact_s, exact = timed(lambda: simulate(schedule, times[7]).makespan_s)
    assert abs(found[7] - exact) <= 1e-9 * exact, (args, found[7], exact)
    single_s, _ = timed(lambda: [span_s(schedule, each) for each in times])
    return {
        "cold_s": cold_s,
        "warm_s": statistics.median(warm),
        "one_by_one_s": single_s / len(times) * COUNT,
        "timeline_s": exact_s,
    }


def mixed() -> float:
    """Return the seconds of 10,000 simulations spread over all schedules, with empty caches."""
    each = -(-COUNT // len(shapes()))
    sets = {chunks: cases(chunks, each) for _, chunks in shapes()}
    forget()
    return timed(lambda: [makespan(name, RANKS, MICRO_BATCHES, of, **sets[of]) for name, of in shapes()])[0]


def main() -> None:
    """Measure and write the result."""
    found = {f"{name} {chunks}": one_shape(name, chunks) for name, chunks in shapes()}
    all_s = mixed()
    for name, row in found.items():
        print(f"{name:16}" + "".join(f"{key} {value:9.4f}   " for key, value in row.items()))
    print(f"{COUNT} over all of them, cold: {all_s:.2f} s of {GOAL_S} s")
    write(
        "simulate_time",
        {
            "ranks": RANKS,
            "micro_batches": MICRO_BATCHES,
            "simulations": COUNT,
            "goal_s": GOAL_S,
            "mixed_cold_s": all_s,
            "shapes": found,
        },
        "numpy",
    )


if __name__ == "__main__":
    main()
