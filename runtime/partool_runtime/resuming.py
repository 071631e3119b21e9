"""Whether a run whose newest checkpoint is damaged may go on from an older one without being asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from partool.strategies.targets import TARGETS

_AGENT_COUNT = "TORCHELASTIC_RESTART_COUNT"
"""Variable of a rank in which torch counts the restarts by the agent."""


def falls_back(setting: Literal["auto"] | bool, target: str, environment: Mapping[str, str]) -> bool:
    """Return whether this start may fall back, by ``resume.fallback``, the launch target and a rank's environment.

    With ``auto`` a start that a person made may not: the person can decide. A restart by the agent may, and so may a
    start by a scheduler, unless the scheduler counts its restarts and this start is the first of its job.
    """
    if setting != "auto":
        return setting
    if _counts(environment, _AGENT_COUNT):
        return True
    record = TARGETS[target]
    if record.starter != "scheduler":
        return False
    return not record.restart_count or _counts(environment, record.restart_count)


def _counts(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "0") not in ("", "0")
