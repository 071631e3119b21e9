"""What the actions of a schedule wait for."""

from __future__ import annotations

from collections.abc import Set

from partool.schedule.actions import Action, Kind, Schedule


class Needs:
    """The inputs of each compute action of a schedule, as the actions that make or bring them.

    ``before`` are compute actions done before the lists.
    """

    def __init__(self, schedule: Schedule, before: Set[Action] = frozenset()) -> None:
        self._stages = schedule.stages
        # Where weights travel, a micro-batch stays on its rank: no input of a stage comes from another one.
        self._placement = schedule.placement if schedule.moves == "activations" else (0,) * schedule.stages
        self._halved = {
            (stage, batch) for actions in (before, *schedule.lists) for kind, stage, batch in actions if kind == "I"
        }

    def of(self, action: Action) -> list[Action]:
        """Return what a compute action waits for: compute actions of its own rank, or receives."""
        kind, stage, batch = action
        if kind == "W":
            return [Action("I", stage, batch)]
        if kind == "F":
            return [self._beside(action, stage - 1)] if stage else []
        own = Action("F", stage, batch)
        return [own, self._beside(action, stage + 1)] if stage < self._stages - 1 else [own]

    def _beside(self, action: Action, there: int) -> Action:
        kind, stage, batch = action
        if self._placement[there] != self._placement[stage]:
            return Action("RECV_F" if kind == "F" else "RECV_B", stage, batch)
        return Action("F" if kind == "F" else self.backward(there, batch), there, batch)

    def backward(self, stage: int, batch: int) -> Kind:
        """Return the kind of the backward action that makes the gradients of a stage's inputs."""
        return "I" if (stage, batch) in self._halved else "B"
