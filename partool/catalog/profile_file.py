"""The file ``calibration.json`` with the results of ``partool calibrate``."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from partool.diagnostics.record import CodedError

PROFILE_VERSION = 1
PROFILE_FILE = "calibration.json"
RUNS_FILE = "measured_runs.csv"


def home() -> Path:
    """Return the folder that holds runs and the calibration: ``PARTOOL_HOME``, by default ``./.partool``."""
    return Path(os.environ.get("PARTOOL_HOME", ".partool")).absolute()


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


class Figure(_Part):
    """Result of repeated measurements of one quantity."""

    value: PositiveFloat
    unit: str
    n: PositiveInt
    """Number of samples."""
    mad: NonNegativeFloat
    """Median absolute deviation of the samples, in the unit of ``value``."""


class StartTime(Figure):
    """A measured start time of an operation; 0 if the time is too short to be measured."""

    value: NonNegativeFloat


class CollectiveTime(_Part):
    """Parameters of a collective's time, ``latency_s + whole * (ranks - 1) / ranks / bytes_per_s``.

    ``whole`` is the number of bytes of the full tensor.
    """

    latency_s: StartTime
    bytes_per_s: Figure


class ProductTime(_Part):
    """Parameters of a matrix product's time on a CPU, ``flops / flops_per_s + elements * element_s``.

    ``elements`` is the number of elements that the product reads and writes.
    """

    flops_per_s: Figure
    element_s: Figure


class MeasuredFigures(_Part):
    """Figures of one rank, measured while all ranks work; None for a figure that was not measured."""

    achievable_flops: dict[str, Figure] = {}
    """Precision → FLOP/s of matrix products."""
    products: dict[str, ProductTime] = {}
    """Precision → time of matrix products by shape on a CPU; lacks precisions whose times fit no such line, and is
    empty in calibrations before the figure existed."""
    attention_flops: dict[str, Figure] = {}
    """Precision → FLOP/s of fused causal attention, forward and backward together, with heads of width 128."""
    attention_by_length: dict[str, dict[PositiveInt, Figure]] = {}
    """Precision → sequence length → FLOP/s of attention on a CPU, if several lengths were measured; empty in
    calibrations before the figure existed."""
    stream_bytes_per_s: Figure | None = None
    """Bytes of memory that copies and element-wise operators read and write per second."""
    fresh_bytes_per_s: Figure | None = None
    """Bytes written per second to memory that a CPU rank has not used before; None in calibrations before the figure
    existed."""
    operator_s: Figure | None = None
    collectives: dict[str, CollectiveTime] = {}
    host_link_bytes_per_s: Figure | None = None
    """Bytes per second of copies between device and pinned host memory, in the slower direction."""
    adam_parameters_per_s: Figure | None = None
    """Parameters that a fused AdamW on the host updates per second."""
    storage_bytes_per_s: Figure | None = None
    """Bytes per second that all ranks together write to the file system of runs; None in calibrations before the figure
    existed."""

    @model_serializer(mode="wrap")
    def _only_measured(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out newer figures that were not measured, so that older calibrations keep their hash."""
        fields: dict[str, Any] = dump(self)
        for name in ("products", "attention_by_length", "fresh_bytes_per_s", "storage_bytes_per_s"):
            if not getattr(self, name):
                fields.pop(name, None)
        return fields


class MachineId(_Part):
    """Identity of the machine that was measured."""

    accelerator: str
    """Catalog name, or ``cpu``."""
    device_name: str = ""
    """Name of the device, as the driver reports it."""
    processor: str = ""
    cores: NonNegativeInt = 0
    """0 if not known: the runs of the calibration were on machines elsewhere."""
    devices: int = 0
    ranks: PositiveInt = 1
    """Number of ranks that worked at the same time during the measurement."""
    threads_per_rank: int = 0
    torch: str = ""
    backend: str = ""
    """Backend of torch: cpu, cuda or rocm; empty if nothing was measured."""


class Scalar(_Part):
    """Statistics of the ratios of measured to predicted values in finished runs."""

    value: PositiveFloat
    """Median of the ratios."""
    n: PositiveInt
    """Number of finished runs."""
    spread: NonNegativeFloat
    """Estimated relative standard deviation: 1.4826 times the median absolute deviation of the ratios' logarithms."""


class StackScalars(_Part):
    """Ratios of measured to predicted time and memory for one code base (``stack``) on this machine."""

    stack: str
    time: Scalar | None = None
    memory: Scalar | None = None


class Measurement(_Part):
    """One measurement of a calibration; plans read those that have ``sides``."""

    kind: str
    name: str
    precision: str
    work: float
    work_unit: str
    elements: NonNegativeFloat = 0.0
    """Number of elements that a matrix product reads and writes; 0 for other work."""
    length: NonNegativeInt = 0
    """Sequence length of attention; 0 for other work."""
    sides: tuple[PositiveInt, ...] = ()
    """Sizes of a row that takes the place of prices: (m, n, k) of a matrix product, (batch, heads, length, width) of
    attention, (bytes of the whole tensor,) of a collective, whose name begins with the operation; empty for other work
    and in calibrations before the field existed."""
    seconds: float
    """Median time in seconds."""
    mad_s: float
    n: int


class Profile(_Part):
    """Content of ``calibration.json``."""

    profile_version: Literal[1] = 1
    partool_version: str
    created: str
    """ISO date and time (UTC) at which the profile was created."""
    sizes: str = "full"
    complete: bool
    """False if the calibration was interrupted."""
    machine: MachineId
    figures: MeasuredFigures = MeasuredFigures()
    scalars: tuple[StackScalars, ...] = ()
    measurements: tuple[Measurement, ...] = Field(default=(), repr=False)

    @property
    def figures_hash(self) -> str:
        """Return the SHA-256 of the figures, the rows and the machine; empty if the profile has no figures.

        Only predictions made with equal hashes are comparable. Calibrations without rows keep the hash that they had
        before rows existed.
        """
        if self.figures == MeasuredFigures():
            return ""
        kept = self.model_dump(mode="json", include={"figures", "machine"})
        if rows := [[one.kind, one.name, one.precision, one.seconds] for one in self.measurements if one.sides]:
            kept["rows"] = rows
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    @property
    def scalars_hash(self) -> str:
        """Return the SHA-256 of the scalars of all stacks."""
        kept = self.model_dump(mode="json", include={"scalars"})
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    def scalar(self, stack: str) -> StackScalars:
        """Return the ratios of one code base (``stack``); both are None if it has no finished runs."""
        return next((scalars for scalars in self.scalars if scalars.stack == stack), StackScalars(stack=stack))


class ProfileError(CodedError):
    """Raised if a profile cannot be used; ``code`` is PT280 or PT281."""


def load_profile(path: Path) -> Profile:
    """Read a profile; raises ProfileError if it cannot be read, is malformed, or has another version."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        raise ProfileError("PT280", f"the calibration {path} cannot be read: {reason}") from None
    version = content.get("profile_version") if isinstance(content, dict) else None
    if version != PROFILE_VERSION:
        message = f"the calibration {path} has version {version!r}, this partool reads {PROFILE_VERSION}"
        raise ProfileError("PT281", message)
    try:
        return Profile.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ProfileError("PT280", f"the calibration {path} is damaged: {where}: {first['msg']}") from None


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile atomically; raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(json.dumps(profile.model_dump(mode="json"), indent=1) + "\n")
    Path(name).chmod(0o644)
    Path(name).replace(path)
