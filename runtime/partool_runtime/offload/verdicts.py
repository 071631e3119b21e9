"""Decision whether to speculate, based on the share of rejected steps among recent steps."""

from __future__ import annotations

from collections import deque

WINDOW = 100
MOST_REJECTED = 0.05
"""Steps are speculated while at most this share of the recent steps was rejected. A rejected step costs a second
pass; a step that is not speculated costs a pass that does not overlap with compute.
"""


class Verdicts:
    """Record of accepted and rejected steps; it is the same on all ranks, so that all ranks make the same decision."""

    def __init__(self, window: int = WINDOW, most_rejected: float = MOST_REJECTED) -> None:
        self._recent: deque[bool] = deque(maxlen=window)
        self._most = window * most_rejected
        self.rejected = 0
        """Number of speculated steps so far that had to be recomputed."""
        self.speculated = 0
        """Number of speculated steps so far."""

    @property
    def speculates(self) -> bool:
        """True if the next step should speculate: update before the norm of all gradients is known."""
        return sum(self._recent) <= self._most

    def record(self, *, good: bool, speculated: bool) -> None:
        """Record a step; ``good`` means that its gradients were used with the expected scale."""
        self._recent.append(not good)
        self.speculated += speculated
        self.rejected += speculated and not good
