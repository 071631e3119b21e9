"""From a request to a configuration.

Entries of the tables are tried from the most certain source to the least: ``exact``, ``rows``, ``shape``, ``device``,
``modelled``, and last the kernel's rule; within a source the nearest first, and of equals those of the user's tables.
What cannot run for the request (see ``feasible``) is passed over. The distance is a sum:

* 1 for each octave between the numbers of rows,
* 2 for each octave between a width of the request and of the entry; more than one octave apart it is not used,
* 4 for another device of the architecture, and 1 for each octave between the numbers of their units,
* 1 for each minor version between those of Triton, 8 for another major one,
* 2 for a change of the kernel's code since, which makes a measurement a guess,
* 8 for an entry that was not measured, 16 for the kernel's rule.

An entry that was not measured is what the rule says of its request, known to compile: for others the rule is asked.

Types, flags and the architecture have to be the request's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from partool_kernels.registry.feasible import obstacle
from partool_kernels.registry.kernels import KERNELS
from partool_kernels.registry.types import SOURCES, Choice, Request, Source

if TYPE_CHECKING:
    from partool_kernels.registry.tables import Entry, Table

ROWS, WIDTH, MINOR, MAJOR, STALE, DEVICE, MODELLED, HEURISTIC = 1.0, 2.0, 1.0, 8.0, 2.0, 4.0, 8.0, 16.0
"""Distances, as above."""
_VENDORS = ("nvidia ", "amd ", "instinct ", "radeon ")


class Reader(Protocol):
    """Another tool's files of configurations."""

    def choices(self, request: Request) -> Iterable[Choice]:
        """Yield what they hold for one of partool's kernels, the nearest first."""
        ...

    def coverage(self, request: Request) -> Iterable[Choice]:
        """Yield what they hold for the other tool's own kernel of the same computation."""
        ...


class Registry:
    """Tables to look configurations up in: the user's, then those that are installed with partool."""

    def __init__(
        self, paths: Sequence[str | Path] = (), folder: Path | None = None, *, expert_width: int | None = None
    ) -> None:
        """Take files or folders of the user's, partool's tables, aiter's or vLLM's, and the folder of installed ones.

        ``expert_width``: inner width of an expert on the rank, where it is known: vLLM's files are by that.
        Raises :class:`TableError` where a path is none of them.
        """
        from partool_kernels.registry.extra import load

        self._user, self._readers = load([Path(path) for path in paths], expert_width)
        self._folder = folder
        self._tables: dict[tuple[str, str], list[tuple[str, Table]]] = {}

    @property
    def doubts(self) -> list[str]:
        """What was left out of other tools' files as it cannot be true, in words."""
        return [doubt for reader in self._readers for doubt in getattr(reader, "doubts", ())]

    def get(self, request: Request) -> Choice:
        """Return the best known configuration for a request; raises KeyError for an unknown kernel or architecture."""
        return next(iter(self.choices(request)))

    def coverage(self, request: Request) -> Choice:
        """Return the most certain of what partool's kernel and other tools' kernels have for a request.

        Such a tool is the choice's ``implementation``. What it calls tuned counts as ``exact``.
        """
        other = self.others(request)
        return min([self.get(request), *([other] if other else [])], key=_order)

    def others(self, request: Request) -> Choice | None:
        """Return the same of other tools' kernels alone, or None where they have none; any name of a kernel will do."""
        found = (choice for reader in self._readers for choice in reader.coverage(request))
        return min(found, key=_order, default=None)

    def choices(self, request: Request) -> list[Choice]:
        """Return all that can run for a request, the best first; the last one is the kernel's rule."""
        rule = Choice("triton", KERNELS[request.kernel].default(request), "heuristic", HEURISTIC)
        read = (choice for reader in self._readers for choice in reader.choices(request))
        found = [*self._of_tables(request), *(c for c in read if obstacle(request, c.config) is None)]
        return [*sorted(found, key=_order), rule]

    def tables(self, kernel: str, architecture: str) -> list[tuple[str, Table]]:
        """Return the tables of a kernel on an architecture with the files that hold them, the user's first."""
        key = (kernel, architecture)
        if key not in self._tables:
            from partool_kernels.registry import tables

            path = tables.path_of(kernel, architecture, self._folder or tables.TUNED)
            installed = [(str(path), tables.read(path))] if path.is_file() else []
            own = [(place, table) for place, table in self._user if (table.kernel, table.architecture) == key]
            self._tables[key] = own + installed
        return self._tables[key]

    def _of_tables(self, request: Request) -> Iterator[Choice]:
        for place, table in self.tables(request.kernel, request.architecture):
            for entry in table.entries:
                choice = judge(request, entry, place)
                # What the compiler said of the blocks holds for other widths too.
                if choice and obstacle(request, choice.config, entry.shared_bytes(request.triton)) is None:
                    yield choice


def judge(request: Request, entry: Entry, place: str = "") -> Choice | None:
    """Return what an entry is worth for a request, or None where it is of no use."""
    from partool_kernels.registry.source import source_hash
    from partool_kernels.registry.tables import bucket

    if entry.dtypes != request.dtypes or entry.flags != request.flags:
        return None
    apart = [abs(math.log2(entry.shape[name] / max(width, 1))) for name, width in request.shape]
    rows = abs(math.log2(entry.rows / bucket(request.rows)))
    if max(apart, default=0.0) > 1.0 or (entry.measured is None and (any(apart) or rows)):
        return None
    here = same_device(entry.device, request.device) and (not request.units or entry.units == request.units)
    stale = entry.source_hash != source_hash(request.kernel)
    source: Source = "shape" if any(apart) else "rows" if rows else "exact"
    if entry.measured is None or stale:
        source = "modelled"
    elif not here:
        source = "device"
    distance = WIDTH * sum(apart) + ROWS * rows + _versions(entry.triton, request.triton)
    distance += STALE * stale + MODELLED * (entry.measured is None)
    if entry.device and not here:
        distance += DEVICE + _octaves(entry.units, request.units)
    known = entry.measured if source == "exact" else None
    return Choice(
        "triton",
        entry.config.config,
        source,
        distance,
        time_s=known.time_s if known else None,
        reference_s=known.reference_s if known else None,
        table=place,
    )


def same_device(first: str, second: str) -> bool:
    """Tell whether two names are of the same device, however it is spelt: ``NVIDIA H200`` and ``h200``."""
    return _plain(first) == _plain(second)


def _plain(name: str) -> str:
    plain = name.casefold().replace("_", " ").replace("-", " ").strip()
    for vendor in _VENDORS:
        plain = plain.removeprefix(vendor)
    return plain


def _octaves(first: int, second: int) -> float:
    return abs(math.log2(first / second)) if first and second else 0.0


def _versions(first: str, second: str) -> float:
    """Return the distance of two versions of Triton, 0 where the second is of no interest."""
    if not second:
        return 0.0
    (major, minor), (other, another) = (map(int, version.split(".")[:2]) for version in (first, second))
    return MAJOR * abs(major - other) if major != other else MINOR * abs(minor - another)


def _order(choice: Choice) -> tuple[int, float]:
    return -SOURCES.index(choice.source), choice.distance


_current: list[Registry] = []


def use(paths: Sequence[str | Path]) -> None:
    """Let :func:`get` look in the user's tables too, in all of this process; raises :class:`TableError`.

    Kernels remember what they were told: call :func:`partool_kernels.device.use_tables` where kernels run.
    """
    _current[:] = [Registry(paths)]


def get(request: Request) -> Choice:
    """Return the best known configuration for a request; raises KeyError for an unknown kernel."""
    if not _current:
        use(())
    return _current[0].get(request)
