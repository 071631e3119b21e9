"""Look-up of a configuration for a request.

Entries of the tables are tried from the most certain source to the least certain: ``exact``, ``rows``, ``shape``,
``device``, ``modelled``, and last the kernel's rule. Within a source the nearest entry comes first; if two entries are
equally near, the user's entry comes first. Entries that cannot run for the request (see ``feasible``) are skipped.
:mod:`partool_kernels.registry.distance` defines how near an entry is; entries with a width more than one octave away
are not used.

An unmeasured entry holds a configuration that is known to compile, usually the rule's. It is used only for the entry's
widths and rows; requests with other widths or rows use the rule.

An entry's types, flags and architecture must equal those of the request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from partool_kernels.registry.distance import (
    DEVICE,
    HEURISTIC,
    MODELLED,
    ROWS,
    STALE,
    WIDTH,
    octaves,
    same_device,
    versions_apart,
)
from partool_kernels.registry.feasible import obstacle
from partool_kernels.registry.kernels import KERNELS
from partool_kernels.registry.types import SOURCES, Choice, Request, Source

if TYPE_CHECKING:
    from partool_kernels.registry.tables import Entry, Table


class Registry:
    """Tables to look configurations up in: first the user's tables, then the tables installed with partool."""

    def __init__(
        self, paths: Sequence[str | Path] = (), folder: Path | None = None, *, expert_width: int | None = None
    ) -> None:
        """Load the user's files or folders (partool's tables, aiter's or vLLM's files), and the installed tables.

        ``expert_width``: inner width of an expert on the rank, where known, which selects among vLLM's files.
        Raises :class:`TableError` for a path in no known format.
        """
        from partool_kernels.registry.extra import load

        self._user, self._readers = load([Path(path) for path in paths], expert_width)
        self._folder = folder
        self._tables: dict[tuple[str, str], list[tuple[str, Table]]] = {}

    @property
    def doubts(self) -> list[str]:
        """Entries of other tools' files that were left out as invalid, in words."""
        return [doubt for reader in self._readers for doubt in getattr(reader, "doubts", ())]

    def get(self, request: Request) -> Choice:
        """Return the best known configuration for a request; raises KeyError for an unknown kernel or architecture."""
        return next(iter(self.choices(request)))

    def coverage(self, request: Request) -> Choice:
        """Return the most certain choice for a request, which may be partool's kernel or another tool's kernel.

        For another tool's kernel, ``implementation`` names the tool; an entry that the tool calls tuned has the source
        ``exact``.
        """
        other = self.others(request)
        return min([self.get(request), *([other] if other else [])], key=_order)

    def others(self, request: Request) -> Choice | None:
        """Return the best choice among other tools' kernels, or None; ``request.kernel`` may be any name."""
        candidates = (choice for reader in self._readers for choice in reader.coverage(request))
        return min(candidates, key=_order, default=None)

    def choices(self, request: Request) -> list[Choice]:
        """Return all choices that can run for a request, the best first and the kernel's rule last."""
        rule = Choice("triton", KERNELS[request.kernel].default(request), "heuristic", HEURISTIC)
        read = (choice for reader in self._readers for choice in reader.choices(request))
        candidates = [*self._of_tables(request), *(c for c in read if obstacle(request, c.config) is None)]
        return [*sorted(candidates, key=_order), rule]

    def tables(self, kernel: str, architecture: str) -> list[tuple[str, Table]]:
        """Return the tables of a kernel on an architecture, each with its file, the user's tables first."""
        key = (kernel, architecture)
        if key not in self._tables:
            from partool_kernels.registry import tables

            path = tables.path_of(kernel, architecture, self._folder or tables.TUNED)
            installed = [(str(path), tables.read(path))] if path.is_file() else []
            given = [(place, table) for place, table in self._user if (table.kernel, table.architecture) == key]
            self._tables[key] = given + installed
        return self._tables[key]

    def _of_tables(self, request: Request) -> Iterator[Choice]:
        for place, table in self.tables(request.kernel, request.architecture):
            for entry in table.entries:
                choice = judge(request, entry, place)
                # The shared memory that the compiler reported for an entry's blocks is the same for other widths.
                if choice and obstacle(request, choice.config, entry.shared_bytes(request.triton)) is None:
                    yield choice


def judge(request: Request, entry: Entry, place: str = "") -> Choice | None:
    """Return an entry as a choice for a request, or None if the entry cannot be used for the request."""
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
    distance = WIDTH * sum(apart) + ROWS * rows + versions_apart(entry.triton, request.triton)
    distance += STALE * stale + MODELLED * (entry.measured is None)
    if entry.device and not here:
        distance += DEVICE + octaves(entry.units, request.units)
    measured = entry.measured if source == "exact" else None
    return Choice(
        "triton",
        entry.config.config,
        source,
        distance,
        time_s=measured.time_s if measured else None,
        reference_s=measured.reference_s if measured else None,
        table=place,
    )


def _order(choice: Choice) -> tuple[int, float]:
    return -SOURCES.index(choice.source), choice.distance


_current: list[Registry] = []


def use(paths: Sequence[str | Path]) -> None:
    """Let :func:`get` search the user's tables too, in the whole process; raises :class:`TableError`.

    Kernels cache their look-ups: where kernels run, call :func:`partool_kernels.device.use_tables` instead.
    """
    _current[:] = [Registry(paths)]


def get(request: Request) -> Choice:
    """Return the best known configuration for a request; raises KeyError for an unknown kernel."""
    if not _current:
        use(())
    return _current[0].get(request)
