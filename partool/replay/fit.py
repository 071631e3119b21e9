"""Scalars of time and memory per device and code base, from rows that leave no setting open."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from partool.catalog.profile_file import (
    PROFILE_FILE,
    MachineId,
    MeasuredFigures,
    Profile,
    Scalar,
    StackScalars,
    load_profile,
)
from partool.plan.run_fit import scalar
from partool.replay.audit import Metric, PricedRow
from partool.strategies.engines import ENGINES

LEAST_ROWS = 3
"""Rows from which on a scalar is fitted: one odd row does not move the median of three."""


@dataclass(frozen=True)
class Fitted:
    """Scalars of one code base on one device."""

    accelerator: str
    stack: str
    time: Scalar | None
    """None with too few rows."""
    memory: Scalar | None
    rows: int
    """Rows that leave no setting open."""
    open_rows: int
    """Rows that were not used, as they leave settings open."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Training systems whose plans these scalars change (``engine`` of a spec)."""
        return tuple(name for name, record in ENGINES.items() if self.stack in record.code_bases)

    @property
    def usable(self) -> bool:
        """True if there is a scalar, and a plan can use it."""
        return bool(self.engines) and (self.time is not None or self.memory is not None)


def fitted(rows: Iterable[PricedRow]) -> list[Fitted]:
    """Return the scalars by device and code base: medians of measured over predicted, as ``partool calibrate``'s."""
    groups: dict[tuple[str, str], list[PricedRow]] = {}
    for row in rows:
        groups.setdefault((row.accelerator, row.stack), []).append(row)
    return [_fitted(accelerator, stack, each) for (accelerator, stack), each in sorted(groups.items())]


def _fitted(accelerator: str, stack: str, rows: list[PricedRow]) -> Fitted:
    sound = [row for row in rows if not row.open]
    lines, open_lines = ({row.line for row in rows if bool(row.open) is open} for open in (False, True))
    return Fitted(accelerator, stack, _scalar(sound, "time"), _scalar(sound, "memory"), len(lines), len(open_lines))


def _scalar(rows: list[PricedRow], metric: Metric) -> Scalar | None:
    ratios = [row.measured / row.result.predicted for row in rows if row.metric == metric]
    return scalar(ratios) if len(ratios) >= LEAST_ROWS else None


def profiles(fits: Iterable[Fitted], folder: Path, *, version: str, created: str) -> dict[Path, Profile]:
    """Return the calibrations with the usable scalars put in, by their path in ``folder``.

    The rows were predicted with the catalog's figures. So the scalars of a device go into ``calibration.json`` only if
    that is a calibration of this device without measured figures, or missing and this is the only device; otherwise
    they go into ``calibration-DEVICE.json``, which a spec can name. Scalars of other code bases stay as they are.
    Raises :class:`partool.catalog.profile_file.ProfileError` for a calibration that cannot be read.
    """
    by: dict[str, list[Fitted]] = {}
    for one in fits:
        if one.usable:
            by.setdefault(one.accelerator, []).append(one)
    shared = folder / PROFILE_FILE
    profile = load_profile(shared) if shared.exists() else None
    return dict(_profile(accelerator, each, shared, profile, sole=len(by) == 1, version=version, created=created)
                for accelerator, each in by.items())  # fmt: skip


def _profile(
    accelerator: str,
    fits: list[Fitted],
    shared: Path,
    shared_profile: Profile | None,
    *,
    sole: bool,
    version: str,
    created: str,
) -> tuple[Path, Profile]:
    if shared_profile is None:
        path = shared if sole else _device_file(shared, accelerator)
    else:
        alike = shared_profile.machine.accelerator == accelerator and shared_profile.figures == MeasuredFigures()
        path = shared if alike else _device_file(shared, accelerator)
    old = shared_profile if path == shared else load_profile(path) if path.exists() else None
    if old is None:
        machine = MachineId(accelerator=accelerator)
        old = Profile(partool_version=version, created=created, sizes="none", complete=True, machine=machine)
    new = {one.stack: one for one in fits}
    scalars = [_updated(old.scalar(name), new.get(name)) for name in sorted({*new, *(s.stack for s in old.scalars)})]
    return path, old.model_copy(update={"scalars": tuple(scalars), "partool_version": version, "created": created})


def _device_file(shared: Path, accelerator: str) -> Path:
    return shared.with_name(f"{shared.stem}-{accelerator}{shared.suffix}")


def _updated(old: StackScalars, new: Fitted | None) -> StackScalars:
    if new is None:
        return old
    return StackScalars(stack=old.stack, time=new.time or old.time, memory=new.memory or old.memory)
