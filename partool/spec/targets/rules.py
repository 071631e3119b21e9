"""Rules about ``launch`` that depend on the target: the base class, and look-up of a target's rules."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from partool.diagnostics.record import Diagnostic
from partool.spec.hardware import Devices
from partool.spec.launch import LaunchSpec
from partool.strategies.targets import SECTIONS


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predictions of a run with which rules about time limits and stops compare."""

    total_s: float
    """Seconds of training."""
    stop_s: int
    """Seconds between a request to stop and the end of the checkpoint that follows."""
    window_s: int
    """``stop_s`` with the room that a plan adds."""
    stop_words: str
    """The parts of ``stop_s`` in words."""
    saves: bool
    """Whether checkpoints are written before the end of the run."""
    loss: str
    """In words, what a run loses at most if it ends without a new checkpoint."""


class TargetRules:
    """Rules of a target without a section; targets with a section override these methods."""

    def section(self, launch: LaunchSpec) -> Iterable[Diagnostic]:
        """Return the findings about the target's section; they are reported even if the run uses another target."""
        return ()

    def files(self, launch: LaunchSpec) -> Iterable[tuple[tuple[str, ...], str]]:
        """Return (keys of the field below ``launch``, file path) for each file path in the target's section."""
        return ()

    def errors(self, launch: LaunchSpec) -> Iterable[Diagnostic]:
        """Return the errors in a ``launch`` section that uses this target."""
        return ()

    def warnings(self, launch: LaunchSpec) -> Iterable[Diagnostic]:
        """Return the warnings about a ``launch`` section that uses this target."""
        return ()

    def on_machines(self, launch: LaunchSpec, devices: Devices) -> Iterable[Diagnostic]:
        """Return the findings about the section that depend on the machines (``devices``)."""
        return ()

    def about_duration(self, launch: LaunchSpec, expected: Forecast) -> Iterable[Diagnostic]:
        """Return the findings about the section's time limits, and about the time that runs get to stop."""
        return ()

    def memory_limit(self, launch: LaunchSpec) -> tuple[tuple[str, ...], str, float] | None:
        """Return (keys of the field, value, bytes) if the section limits a node's memory for the ranks, else None."""
        return None

    def memory_beside_ranks(self, launch: LaunchSpec, devices: Devices) -> float:
        """Return the bytes that count against a node's memory limit in addition to the ranks' own memory."""
        return 0.0

    def fabric_field(self, launch: LaunchSpec) -> tuple[str, ...] | None:
        """Return the keys of the field that would give the ranks their nodes' network adapters; None if they have them.

        Ranks without these adapters communicate over the network that the target makes for containers.
        """
        return None

    def cores(self, launch: LaunchSpec, devices: Devices) -> float | None:
        """Return the number of cores that the ranks of a node get; None if the section does not limit them."""
        return None

    def longest_window_s(self, launch: LaunchSpec) -> int | None:
        """Return the longest time for a checkpoint that the target can give after a stop signal; None without limit."""
        return None

    def contained(self, launch: LaunchSpec) -> bool:
        """Return True if the ranks run in a container."""
        return False

    def own_mounts(self, launch: LaunchSpec) -> dict[str, str]:
        """Return the mounts that the section itself adds to the container: folder inside → source."""
        return {}

    def hides(self, folder: str) -> bool:
        """Return True if a mount at this folder would hide files that partool or the scheduler puts there."""
        return False

    def architecture(self, launch: LaunchSpec) -> tuple[tuple[str, ...], str] | None:
        """Return (keys of the field, architecture) if the section requires a processor architecture, else None."""
        return None


def rules_of(target: str) -> TargetRules:
    """Return the rules of a target: ``RULES`` of ``partool.spec.targets.<name>.rules``, if it has a section."""
    if target not in SECTIONS:
        return TargetRules()
    rules: TargetRules = importlib.import_module(f"partool.spec.targets.{target}.rules").RULES
    return rules


def of_all_sections(launch: LaunchSpec) -> Iterator[Diagnostic]:
    """Yield the findings about the sections of all targets, including targets that the run does not use."""
    for name in SECTIONS:
        yield from rules_of(name).section(launch)
