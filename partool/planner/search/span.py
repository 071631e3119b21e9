"""Least duration of a pipeline schedule, from dependencies that every schedule of its kind has."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from partool.schedule import followed, in_flight, order
from partool.strategies.schedules import SCHEDULES

_ENDS = 4
"""Rounds of micro-batches after which the end of a schedule's action lists no longer changes."""
_STEADY = ("1f1b", "interleaved")
"""Schedules whose ranks keep few activations, and whose last action is a backward pass of their lowest stage."""
Sizes = tuple[str, int, int, int, int]
"""Schedule, ranks, chunks, the limit of micro-batches in flight, and :func:`listed` micro-batches."""


def listed(name: str, ranks: int, micro_batches: int) -> int:
    """Return the number of micro-batches of the action lists that bound a schedule; 0 if no lists are needed.

    The lists of zb-h1 for more micro-batches have the same end; lists that a search finds differ.
    """
    if not SCHEDULES[name].split:
        return 0
    return min(micro_batches, _ENDS * ranks) if SCHEDULES[name].repeats else micro_batches


@dataclass(frozen=True)
class StagePasses:
    """Seconds of each stage's passes over a micro-batch, as arrays [layouts, stages]."""

    forward_s: Any
    backward_s: Any
    weight_s: Any
    """Seconds of the weight gradients in ``backward_s``, which schedules that split the pass may postpone."""
    place: Any
    """Array [ranks, stages]: 1 where a rank has a stage, else 0."""

    def of_ranks(self, values: Any) -> Any:
        """Return an array [ranks, layouts] of the sums of ``values`` [layouts, stages] over each rank's stages."""
        return self.place @ values.T


def least_span_s(sizes: Sizes, m: Any, stages: StagePasses, send_s: Any) -> Any:
    """Return a lower bound of a schedule's duration for each layout; 0 where predictions extrapolate the schedule.

    ``m`` and ``send_s`` are arrays [layouts] of numbers of micro-batches and of seconds of a transfer.

    A rank starts once the first micro-batch has passed all stages before the rank's first stage. Its last action of
    some stage is followed by the same micro-batch's passes of all stages below. Between these it does all its work,
    except what its list puts after that action, and all its activations wait for their gradients, as many at once as
    the lists let wait.
    """
    name, ranks, chunks, *_ = sizes
    halved, forward, weight = SCHEDULES[name].split, stages.forward_s, stages.weight_s
    backward = stages.backward_s - weight if halved else stages.backward_s
    place = np.argmax(stages.place, axis=0)
    crossed = np.concatenate([[0], np.cumsum(place[1:] != place[:-1])])
    # Seconds from the first forward pass to a stage, and from a stage's backward pass to the last backward pass.
    to = np.cumsum(forward, axis=1) - forward + crossed * send_s[:, None]
    back = np.cumsum(backward, axis=1) - backward + crossed * send_s[:, None]
    work = m * stages.of_ranks(stages.forward_s + stages.backward_s)
    span = to[:, -1] + forward[:, -1] + backward[:, -1] + back[:, -1]
    if name == "gpipe":
        span = np.maximum(span, _phases_s(m, forward, backward, send_s))
    waiting = _waiting_s(sizes, m, stages, crossed * send_s[:, None]) if name in _STEADY and np.any(backward) else work
    for rank in range(ranks):
        lowest = int(np.flatnonzero(stages.place[rank])[0])
        start = to[:, lowest] + work[rank]
        if not halved:
            span = np.maximum(span, to[:, lowest] + np.maximum(work[rank], waiting[rank]) + back[:, lowest])
            continue
        span = np.maximum(span, start)
        for stage, after in _after(*sizes)[rank]:
            times = {"F": forward, "I": backward, "W": weight}
            later = sum(count * times[kind][:, other] for (kind, other), count in after)
            # The last micro-batch's weight gradients of the first stage follow, too.
            span = np.maximum(span, start - later + back[:, stage] + (weight[:, 0] if stage else 0.0))
    is_followed = {count: followed(name, ranks, count, chunks) for count in set(m.tolist())}
    return np.where([is_followed[count] for count in m.tolist()], span, 0.0)


def _waiting_s(sizes: Sizes, m: Any, stages: StagePasses, crossed_s: Any) -> Any:
    """Return an array [ranks, layouts] of the least seconds in which a rank's activations wait for their gradients.

    An activation waits for the passes of its own and all later stages; ``crossed_s`` [layouts, stages] are the seconds
    of transfers before a stage. The time of all of them together, over the number that waits at once, bounds the time
    from a rank's first forward to its last backward pass.
    """
    name, ranks, chunks, *_ = sizes
    both = stages.forward_s + stages.backward_s
    after = np.cumsum(both[:, ::-1], axis=1)[:, ::-1] + 2.0 * (crossed_s[:, -1:] - crossed_s)
    counts = m.astype(int).tolist()
    most = {count: in_flight(name, ranks, count, chunks) for count in set(counts)}
    return m * stages.of_ranks(after) / np.array([most[count] for count in counts]).T


def _phases_s(m: Any, forward: Any, backward: Any, send_s: Any) -> Any:
    """Return the least duration of GPipe: the last stage's first backward pass follows all its forward passes."""
    sent = (forward.shape[1] - 1) * send_s
    ways = [times.sum(axis=1) + (m - 1) * times.max(axis=1) + sent for times in (forward, backward)]
    return ways[0] + ways[1]


@lru_cache(maxsize=512)
def _after(name: str, ranks: int, chunks: int, cap: int, m: int) -> list[list[tuple[int, Any]]]:
    """Return by rank, for each of its stages, the actions that follow the stage's last gradient of inputs."""
    following: list[list[tuple[int, Any]]] = []
    for actions in order(name, ranks, m, chunks, cap):
        last = {action.stage: at for at, action in enumerate(actions) if action.kind == "I"}
        following.append(
            [
                (stage, tuple(Counter((one.kind, one.stage) for one in actions[at + 1 :]).items()))
                for stage, at in last.items()
            ]
        )
    return following
