"""Read the parts of a plan that all versions store alike, to list, follow and cancel runs of older versions."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from partool.plan.moved import with_moved_keys
from partool.plan.run import LOGS, SPEC_FILE, STATUS_FILE
from partool.plan.types import PLAN_VERSION
from partool.spec.launch import LaunchSpec


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)


class _Training(_Part):
    steps: int


class _Devices(_Part):
    nodes: int
    per_node: int


class Outline(_Part):
    """Parts of a plan that plans of every version have: steps, machines and target."""

    plan_version: int
    name: str = ""
    job: str = "train"
    training: _Training
    devices: _Devices
    launch: LaunchSpec

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.devices.nodes * self.devices.per_node


def outline(file: Path) -> Outline:
    """Return the outline of the plan in a file; raises ``OSError`` or ``ValueError``."""
    return Outline.model_validate_json(with_moved_keys(file.read_text(encoding="utf-8")))


def other_version(file: Path) -> tuple[str, str] | None:
    """Return two messages for a plan of another version: its version, and what to do; None for a current plan."""
    try:
        version = outline(file).plan_version
    except (OSError, ValueError):
        return None
    if version == PLAN_VERSION:
        return None
    message = f"{file} is a plan of version {version}, and this partool reads version {PLAN_VERSION}"
    copy, run = file.parent / SPEC_FILE, file.parent
    if version > PLAN_VERSION:
        return message, "use the partool that made it, or a newer one: pip install --upgrade partool"
    if not any((run / name).exists() for name in (STATUS_FILE, LOGS, SPEC_FILE)):
        return message, "make it again from its spec: partool plan SPEC --out FILE"
    where = f"{copy} is a copy of that spec" if copy.is_file() else f"{file} holds that spec under `spec`"
    return message, (
        f"plan its spec anew, and the run goes on from its checkpoint: partool launch SPEC --resume {run.name}; "
        f"{where}, whose relative paths begin at the folder of the original"
    )
