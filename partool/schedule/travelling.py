"""Check schedules that send weights: ranks have the weights they use, and each gradient reaches its owner once."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

from partool.schedule.actions import COMPUTE, Action, Schedule, peer
from partool.schedule.text import cell

Fault = tuple[str, int, int]
"""Message of a fault, rank of the faulty action, and position of the action in the rank's list."""


def weights_missing(schedule: Schedule) -> Iterator[Fault]:
    """Yield a fault for each pass over a stage, or shift of its weights, on a rank that does not have the weights.

    A rank has the weights of a stage if it owns the stage or has received the weights.

    Weights do not change within a step, so received weights are valid until the step ends. The weight gradients of a
    split backward pass need no weights, as the inputs of a layer's products are kept.
    """
    for rank, actions in enumerate(schedule.lists):
        has = set(schedule.on_rank(rank))
        for at, action in enumerate(actions):
            if action.kind in ("RECV_FW", "RECV_BW"):
                has.add(action.stage)
            elif action.kind not in ("W", "SEND_G", "RECV_G") and action.stage not in has:
                yield f"rank {rank}: {cell(action)} without the weights of stage {action.stage}", rank, at


def gradients_lost(schedule: Schedule) -> Iterator[Fault]:
    """Yield the faults in the gradient sums of a schedule whose action lists are valid otherwise.

    A rank's sum for a stage includes its own micro-batches and the sums it receives, and is empty once it is sent. At
    the end the owner's sum has every micro-batch once, and no other rank has a sum.
    """
    sums: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    wires: defaultdict[tuple[int, int], deque[list[int]]] = defaultdict(deque)
    for rank, at, action in _in_order(schedule):
        kind, stage, batch = action
        if kind in ("B", "W"):
            sums[rank, stage].append(batch)
        elif kind == "SEND_G":
            if not (content := sums.pop((rank, stage), [])):
                yield f"rank {rank}: {cell(action)} without a gradient of stage {stage}", rank, at
            wires[rank, peer(schedule, rank, action)[0]].append(content)
        elif kind == "RECV_G":
            sums[rank, stage] += wires[peer(schedule, rank, action)[0], rank].popleft()
    for stage, home in enumerate(schedule.placement):
        wanted = list(range(schedule.micro_batches)) if stage >= schedule.trained_from else []
        if (got := sorted(sums.pop((home, stage), []))) != wanted:
            yield f"the owner of stage {stage} has gradients of micro-batches {got} in the end", home, -1
    for (rank, stage), batches in sorted(sums.items()):
        if batches:
            yield f"rank {rank} keeps gradients of stage {stage}, micro-batches {sorted(batches)}", rank, -1


def _in_order(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """Yield (rank, position, action) for all actions of lists that finish; each receive comes after its send."""
    at, sent = [0] * schedule.ranks, set[tuple[int, Action]]()
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.lists):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                if action.kind not in COMPUTE:
                    receiver, other = peer(schedule, rank, action)
                    if action.kind.startswith("SEND"):
                        sent.add((receiver, other))
                    elif (rank, action) not in sent:
                        break
                yield rank, at[rank], action
                at[rank] += 1
                moved = True
