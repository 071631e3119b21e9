"""Which rank is the furthest behind, on one node or on several."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a rank has come, in a form that agents can send each other."""

    rank: int
    step: int
    """Completed steps."""
    at: float
    """Unix time of the rank's last progress. The clocks of nodes may differ by a few milliseconds."""
    stopped: bool = False
    """True if a signal has stopped the process (state ``T`` of proc(5))."""
    where: str = ""
    """Text that names the rank's node, such as `` on node 1 (host)``; empty in a run on one node."""

    @property
    def order(self) -> tuple[bool, int, float]:
        """Key that sorts the rank that holds the others up to the front.

        A stopped process comes first. Otherwise the rank that holds the others up was the first to make no progress:
        the others went on until they had to wait for it.
        """
        return not self.stopped, self.step, self.at
