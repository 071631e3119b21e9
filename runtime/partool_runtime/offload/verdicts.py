"""Whether it pays to speculate: how often a step's first guess was wrong of late."""

from __future__ import annotations

from collections import deque

WINDOW = 100
MOST_REJECTED = 0.05
"""Of the window. A rejected step costs a second pass over the states, a put-off one a pass that is not hidden."""


class Verdicts:
    """Watches the verdicts on steps; all ranks see the same ones and so agree."""

    def __init__(self, window: int = WINDOW, most_rejected: float = MOST_REJECTED) -> None:
        self._recent: deque[bool] = deque(maxlen=window)
        self._most = window * most_rejected
        self.rejected = 0
        """Speculated steps that had to be done again, so far."""
        self.speculated = 0
        """So far."""

    @property
    def speculates(self) -> bool:
        """Whether the next step should be."""
        return sum(self._recent) <= self._most

    def record(self, *, good: bool, speculated: bool) -> None:
        """Note whether a step's gradients could be used as they came, speculated on or not."""
        self._recent.append(not good)
        self.speculated += speculated
        self.rejected += speculated and not good
