"""The format of tables of configurations, and functions that check, read, merge and write tables.

Each kernel and architecture has a JSON file, ``tuned/<kernel>/<architecture>.json``. An entry is for the exact widths,
types and flags of a request, for a bucket of rows, and for one device; ``look_up`` defines which other requests use the
entry.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from partool_kernels.registry.feasible import obstacle
from partool_kernels.registry.types import Config, Kernel, Request

TUNED = Path(__file__).parents[1] / "tuned"
"""Folder of the tables that are installed with the package."""

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Version = Annotated[str, Field(pattern=r"^\d+\.\d+$")]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TableError(ValueError):
    """A file cannot be read, is not a table, or holds invalid values."""

    def __init__(self, path: Path | str, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)
        self.problem = problem


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Settings(_Part):
    """A :class:`Config` as stored in a table."""

    blocks: dict[str, int] = {}
    num_warps: Positive = 4
    num_stages: Positive = 2
    waves_per_eu: NonNegative = 0
    matrix_instr_nonkdim: NonNegative = 0

    @staticmethod
    def of(config: Config) -> Settings:
        """Return ``config`` in the form that tables store."""
        return Settings(blocks=config.constants, **{name: getattr(config, name) for name in _OPTIONS})

    @property
    def config(self) -> Config:
        """The configuration that kernels take."""
        return Config(tuple(self.blocks.items()), **{name: getattr(self, name) for name in _OPTIONS})


_OPTIONS = ("num_warps", "num_stages", "waves_per_eu", "matrix_instr_nonkdim")


class Resources(_Part):
    """Resources that a version of the compiler reported for the kernel."""

    shared_bytes: NonNegative
    registers: NonNegative
    spilled_bytes: NonNegative
    """Bytes per thread; tests fail if a later compilation spills more than recorded here."""


class Measured(_Part):
    """Times of the entry's configuration, the rule's configuration and the reference, from one run on a device."""

    time_s: Seconds
    """Median seconds of a call with cold caches."""
    default_s: Seconds
    """Median seconds of the rule's configuration; another configuration is kept only if it is at least 3 % faster."""
    reference_s: Seconds
    reference: str
    """Torch code of the reference that was timed."""
    error: Annotated[float, Field(ge=0, le=1)]
    """Largest error of the results, divided by the largest allowed error; see ``cases.excess``."""
    repeats: Positive
    tried: Positive
    """Number of configurations that were timed."""
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    driver: str
    torch: str
    triton: str
    """Full version of Triton."""


class Entry(_Part):
    """A configuration and the request that it was found for."""

    dtypes: tuple[str, ...]
    shape: dict[str, Positive]
    """Widths by name, in the kernel's order."""
    rows: Positive
    """Largest number of rows in the bucket, a power of two; the bucket begins above half of this number."""
    flags: tuple[str, ...] = ()
    device: str = ""
    """Device's name, as the driver reports it; empty in modelled entries, which hold for the whole architecture."""
    units: NonNegative = 0
    """Number of multiprocessors or compute units."""
    triton: Version
    """Major and minor version of the Triton with which the configuration was found."""
    source_hash: str
    """Hash of the kernel's code, see :func:`~partool_kernels.registry.source.source_hash`; once the code has changed, a
    measurement is only a guess."""
    status: Literal["measured", "modelled"]
    config: Settings
    resources: dict[Version, Resources] = {}
    """Needed resources by Triton's major and minor version; different versions need very different resources."""
    measured: Measured | None = None

    @model_validator(mode="after")
    def _agrees(self) -> Entry:
        if (self.status == "measured") != (self.measured is not None):
            raise ValueError("measured entries hold a measurement, and modelled ones none")
        if self.status == "measured" and not (self.device and self.units):
            raise ValueError("measured entries name the device and its number of units")
        if self.rows != bucket(self.rows):
            raise ValueError(f"rows {self.rows} is no power of two")
        return self

    @property
    def key(self) -> Key:
        """Key of the entry, unique in the table."""
        width = tuple(self.shape.items())
        return Key(self.dtypes, width, self.flags, self.rows, self.device, self.units, self.triton)

    def request(self, kernel: str, architecture: str) -> Request:
        """Return the request that the entry answers exactly."""
        dtypes, shape, flags, rows, device, units, triton = self.key
        return Request(kernel, architecture, dtypes, shape, rows, flags, device, units, triton)

    def shared_bytes(self, triton: str) -> int:
        """Return the shared memory that version ``triton`` reported, in bytes.

        Without a report of this version return the largest report of any version, or 0 if there are no reports.
        """
        resources = self.resources
        return max(
            (each.shared_bytes for name, each in resources.items() if name == triton or triton not in resources),
            default=0,
        )


class Key(NamedTuple):
    """Fields that identify an entry of a table; entries are sorted by their keys."""

    dtypes: tuple[str, ...]
    shape: tuple[tuple[str, int], ...]
    flags: tuple[str, ...]
    rows: int
    device: str
    units: int
    triton: str


class Table(_Part):
    """All entries of a kernel on an architecture."""

    format: Literal[1] = 1
    kernel: str
    architecture: str
    entries: tuple[Entry, ...] = ()

    def merged(self, entries: Iterable[Entry]) -> Table:
        """Return the table with entries added; an added entry replaces the old entry with an equal key.

        A modelled entry does not replace a measured entry.
        """
        kept = {entry.key: entry for entry in self.entries}
        for entry in entries:
            old = kept.get(entry.key)
            if old is None or entry.status == "measured" or old.status == "modelled":
                kept[entry.key] = entry
        return self.model_copy(update={"entries": tuple(kept[key] for key in sorted(kept))})


def bucket(rows: int) -> int:
    """Return the largest number of rows in the bucket that holds ``rows``: the next power of two."""
    return 1 << max(rows - 1, 0).bit_length()


def path_of(kernel: str, architecture: str, folder: Path = TUNED) -> Path:
    """Return the path of a table."""
    return folder / kernel / f"{architecture}.json"


def parse(text: str, path: Path | str) -> Table:
    """Return the table that a file's text holds; raises :class:`TableError` with the file and the error."""
    try:
        table = Table.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise TableError(path, f"{place + ': ' if place else ''}{first['msg']}") from None
    wrong = next(iter(problems(table)), None)
    if wrong:
        raise TableError(path, wrong)
    return table


def problems(table: Table) -> Iterable[str]:
    """Yield the invalid values of a well-formed table, in words."""
    from partool_kernels.registry.architectures import ARCHITECTURES
    from partool_kernels.registry.kernels import KERNELS

    if table.kernel not in KERNELS:
        yield f"there is no kernel {table.kernel!r}; there are {', '.join(sorted(KERNELS))}"
        return
    if table.architecture not in ARCHITECTURES:
        yield f"there is no architecture {table.architecture!r}; there are {', '.join(sorted(ARCHITECTURES))}"
        return
    seen: set[Key] = set()
    for place, entry in enumerate(table.entries):
        wrong = _problem(KERNELS[table.kernel], table, entry)
        if wrong is None and entry.key in seen:
            wrong = "the same device, widths, rows, types, flags and Triton as an earlier entry"
        seen.add(entry.key)
        if wrong:
            yield f"entries.{place}: {wrong}"


def _problem(kernel: Kernel, table: Table, entry: Entry) -> str | None:
    if tuple(entry.shape) != kernel.widths:
        return f"shape has {', '.join(entry.shape)}, but the kernel {', '.join(kernel.widths)}"
    request = entry.request(table.kernel, table.architecture)
    return obstacle(request, entry.config.config, entry.shared_bytes(entry.triton))


def json_object(path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds; raises :class:`TableError` if it cannot be read or holds no object."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TableError(path, str(error)) from None
    if not isinstance(body, dict):
        raise TableError(path, "no JSON object")
    return body


def read(path: Path) -> Table:
    """Return a file's table; raises :class:`TableError` where the file cannot be read or is not a table."""
    try:
        return parse(path.read_text(encoding="utf-8"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(path, str(error)) from None


def stored(kernel: str, architecture: str, folder: Path = TUNED) -> Iterator[tuple[Request, Config, Entry]]:
    """Yield (request, configuration, entry) for each entry of a folder's table; yield nothing without a table."""
    path = path_of(kernel, architecture, folder)
    for entry in read(path).entries if path.is_file() else ():
        yield entry.request(kernel, architecture), entry.config.config, entry


def add(kernel: str, architecture: str, entries: Iterable[Entry], folder: Path = TUNED) -> Path:
    """Merge entries into a folder's table and return the table's file, which is created if missing."""
    path = path_of(kernel, architecture, folder)
    old = read(path) if path.is_file() else Table(kernel=kernel, architecture=architecture)
    write(old.merged(entries), path)
    return path


def text_of(table: Table) -> str:
    """Return a table's text: one entry per line, so that diffs are readable."""
    head = {"format": table.format, "kernel": table.kernel, "architecture": table.architecture}
    rows = [json.dumps(entry.model_dump(mode="json", exclude_none=True)) for entry in table.entries]
    body = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    return "{\n" + body + '  "entries": [' + ",".join(f"\n    {row}" for row in rows) + "\n  ]\n}\n"


def write(table: Table, path: Path) -> None:
    """Write a table atomically; raises :class:`TableError` for a table with :func:`problems`."""
    text = text_of(table)
    parse(text, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
