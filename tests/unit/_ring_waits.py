"""A model of ranks that send weights round a ring, and whose hosts may wait until their devices are idle.

The runtime's own classes run for every rank; their lanes and wires only record what each operation waits for. A stream
executes its operations in order, and so does a communicator on each of its ranks. A transfer completes once both ends
have started. A host that waits for its device goes on once all that it gave the device is complete; otherwise no host
waits, so what a rank records does not depend on other ranks. Ranks are stuck where operations wait in a circle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable
from types import SimpleNamespace
from typing import Any

import torch

from partool.schedule import COMPUTE, Action, Schedule, peer
from partool.schedule.actions import Order
from partool.schedule.weipipe import room
from partool_runtime.parallel.weipipe import shifts
from partool_runtime.parallel.weipipe.program import Compute, ShiftGroup, compile_program
from partool_runtime.parallel.weipipe.ring import PipelineRing

Waits = Callable[[int, int], bool]
"""Function of a rank and the number of a step of its host: does the host wait for its device before this step? A step
computes a pass, or posts one end of a transfer."""
_CPU = torch.device("cpu")


class Operations:
    """Operations of all ranks, each with the operations that it waits for."""

    def __init__(self) -> None:
        self.needs: list[list[int]] = []

    def add(self, *needs: int) -> int:
        """Add an operation that waits for ``needs``; return its number."""
        self.needs.append(list(needs))
        return len(self.needs) - 1

    def complete(self) -> Collection[int]:
        """Return the operations that complete: those that do not wait in a circle, or for one."""
        left = [len(needs) for needs in self.needs]
        later: defaultdict[int, list[int]] = defaultdict(list)
        for number, needs in enumerate(self.needs):
            for need in needs:
                later[need].append(number)
        found = [number for number, count in enumerate(left) if not count]
        for number in found:
            for after in later[number]:
                left[after] -= 1
                if not left[after]:
                    found.append(after)
        return set(found)


class Recorder:
    """One rank's host, streams and communicators."""

    def __init__(self, operations: Operations, rank: int, waits: Waits) -> None:
        self._operations, self.rank, self._waits = operations, rank, waits
        self._last: dict[str, int] = {}
        """Latest operation of each stream and each communicator."""
        self._host = operations.add()
        self.stream = "compute"
        """Stream to which the host gives operations now."""
        self.steps = 0
        """Number of the host's steps so far."""
        self.starts: dict[Hashable, int] = {}
        """Start of this rank's end of each transfer."""
        self.completions: dict[Hashable, int] = {}

    def step(self) -> int:
        """Return the host's next step."""
        given = self._last.values() if self._waits(self.rank, self.steps) else ()
        self._host = self._operations.add(self._host, *given)
        self.steps += 1
        return self._host

    def last(self, stream: str) -> int:
        """Return the latest operation of a stream."""
        return self._last.get(stream, self._host)

    def queue(self, stream: str, *needs: int) -> int:
        """Give a stream an operation; return it."""
        self._last[stream] = self._operations.add(self.last(stream), *needs)
        return self._last[stream]

    def compute(self) -> None:
        """Give the device a pass."""
        self.queue("compute", self.step())

    def post(self, group: str, action: Hashable) -> int:
        """Post an end of a transfer after what the current stream was given; return the transfer's completion."""
        self.starts[action] = self._operations.add(self.step(), self.last(self.stream), self.last(group))
        self.completions[action] = self.queue(group, self.starts[action])
        return self.completions[action]

    def finish(self) -> int:
        """Let the host wait until its device is idle; return this step."""
        return self._operations.add(self._host, *self._last.values())


class RecordedLane:
    """A lane of a GPU that only records."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def submit(self, job: Callable[[], Any]) -> Any:
        """Run a job at once, on a stream that waits for what the current stream was given."""
        one = self._recorder
        one.queue(self._name, one.last(one.stream))
        before, one.stream = one.stream, self._name
        found, one.stream = job(), before
        event = one.last(self._name)

        def wait() -> Any:
            one.queue(one.stream, event)
            return found

        return SimpleNamespace(wait=wait, ended=True)


class RecordedWire:
    """A wire that only records."""

    def __init__(self, recorder: Recorder, ring: PipelineRing) -> None:
        self._recorder, self.ring, self.timeout_s = recorder, ring, 0.0

    def send(self, buffer: Any, flat: torch.Tensor, group: str, action: Action, peer: int) -> None:
        """See :class:`shifts.Wire`."""
        buffer.leaving.append(self._recorder.post(group, action))

    def receive(self, flat: torch.Tensor, group: str, action: Action, peer: int) -> Callable[[], object]:
        """See :class:`shifts.Wire`."""
        completion = self._recorder.post(group, action)
        return lambda: self._recorder.queue(self._recorder.stream, completion)

    def settle(self, buffer: Any) -> None:
        """See :class:`shifts.Wire`."""
        while buffer.leaving:
            self._recorder.queue(self._recorder.stream, buffer.leaving.pop(0))


def stuck(schedule: Schedule, waits: Waits) -> list[int]:
    """Return the ranks that wait for ever; empty if all lists end."""
    operations = Operations()
    ranks = [record(schedule, Recorder(operations, rank, waits)) for rank in range(schedule.ranks)]
    for one in ranks:
        for action, completion in one.completions.items():
            assert isinstance(action, Action)
            there, other = peer(schedule, one.rank, action)
            operations.needs[completion].append(ranks[there].starts[other])
    ends = [one.finish() for one in ranks]
    complete = operations.complete()
    return [rank for rank, end in enumerate(ends) if end not in complete]


def steps(schedule: Schedule) -> list[tuple[int, int]]:
    """Return (rank, number) of each step of each host."""
    ranks = [record(schedule, Recorder(Operations(), rank, lambda *_: False)) for rank in range(schedule.ranks)]
    return [(one.rank, number) for one in ranks for number in range(one.steps)]


def record(schedule: Schedule, one: Recorder) -> Recorder:
    """Record a rank's part of a schedule, as ``WeiPipePasses`` executes it; return the recorder."""
    ring: Any = PipelineRing(one.rank, schedule.ranks, "relay", "deal", "gradients", "home")  # type: ignore[arg-type]
    wire: Any = RecordedWire(one, ring)
    trained = [int(stage >= schedule.trained_from) for stage in range(schedule.stages)]
    chunks: Any = [SimpleNamespace(weight_elements=1, gradient_elements=count) for count in trained]
    own = {stage: shifts.Buffer(torch.empty(1)) for stage in schedule.on_rank(one.rank)}
    pool = shifts.LentBuffers(room(schedule, one.rank).weights, 1, torch.float32, _CPU)
    lanes: Any = [RecordedLane(one, f"partool-{name}") for name in ("weights", "gradients")]
    weights = shifts.TravellingWeights(wire, chunks, own, pool, lanes[0])
    gradients = shifts.Gradients(wire, chunks, {stage: torch.empty(1) for stage in own}, lanes[1])
    for step in compile_program(schedule, one.rank):
        if isinstance(step, ShiftGroup):
            weights.move(step.shifts, step.releases)
        elif isinstance(step, Compute):
            kind, stage, _ = step.action
            if kind != "W":
                weights.of(stage)
            into = gradients.room() if kind in ("B", "W") and trained[stage] else None
            one.compute()
            if into is not None:
                gradients.add(stage, into)
            if step.releases:
                weights.release(stage)
        else:
            gradients.shift(step.action, step.peer)
    return one


def sent_ahead(schedule: Schedule, passes: int) -> Order:
    """Return the lists with each send from an owner to rank 0 so many passes of the owner earlier."""
    found = []
    for rank, actions in enumerate(schedule.lists):
        computed, placed = 0, []
        for action in actions:
            early = action.kind in ("SEND_FW", "SEND_BW") and peer(schedule, rank, action)[0] == 0
            placed.append((max(0, computed - passes) if early else computed, not early, action))
            computed += action.kind in COMPUTE
        found.append(tuple(action for *_, action in sorted(placed, key=lambda one: one[:2])))
    return tuple(found)
