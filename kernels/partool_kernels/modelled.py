"""Make unmeasured table entries for typical requests; each entry holds a configuration that is known to run.

These entries hold no time. They record the resources that the compiler reported, so that tests detect if a later
kernel or Triton needs more. The newest Triton chooses the configuration. Run this module with the newest Triton first;
runs with older versions add the resources that these versions need for the chosen configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from partool_kernels.compiled import Compiled
from partool_kernels.device import triton_version
from partool_kernels.proof import Proof, ProofJob, faults, program_of, prove, prove_all
from partool_kernels.registry import ARCHITECTURES, KERNELS, Request
from partool_kernels.registry.source import source_hash
from partool_kernels.registry.tables import Entry, Resources, Settings, Table, TableError, bucket, path_of, read, write

_TRIED = 24
"""Maximum number of other configurations to compile where the configuration from the kernel's rule has a fault."""
_Typical = tuple[tuple[str, ...], tuple[tuple[str, int], ...], tuple[str, ...], int]


class NothingRunsError(Exception):
    """No configuration of a kernel passes the proof on an architecture."""


def model(kernels: Iterable[str], architectures: Iterable[str], processes: int) -> Iterator[tuple[str, str, int]]:
    """Write the modelled entries of kernels on architectures; yield (kernel, architecture, number of entries).

    To entries that a newer Triton modelled, the resources needed with this Triton are added; other modelled entries are
    replaced. Measured entries stay. Raises :class:`NothingRunsError`.
    """
    places = [(kernel, architecture) for kernel in kernels for architecture in architectures]
    tables = {place: _table(*place) for place in places}
    same = {place: _same(table) for place, table in tables.items()}
    newer = {place: {key: e for key, e in entries.items() if _is_newer(e)} for place, entries in same.items()}
    work = []
    for place in places:
        for request in KERNELS[place[0]].examples(place[1]):
            entry = newer[place].get(_typical(request))
            work.append(ProofJob(request, entry.config.config if entry else KERNELS[place[0]].default(request)))
    modelled: dict[tuple[str, str], list[Entry]] = {place: [] for place in places}
    for proof in _proven(work, processes):
        place = (proof.job.request.kernel, proof.job.request.architecture)
        typical = _typical(proof.job.request)
        modelled[place].append(_entry(proof, newer[place].get(typical), same[place].get(typical)))
    for place, entries in modelled.items():
        path = path_of(*place)
        if entries or path.exists():
            kept = [entry for entry in tables[place].entries if entry.status == "measured"]
            write(tables[place].model_copy(update={"entries": tuple(kept)}).merged(entries), path)
            yield *place, len(entries)


def _proven(work: list[ProofJob], processes: int) -> Iterator[Proof]:
    """Yield the proof of each job; a program that several jobs share is compiled once."""
    programs = {program_of(job): job for job in work}
    proofs = dict(zip(programs, prove_all(programs.values(), processes), strict=True))
    for job in work:
        compiled = proofs[program_of(job)].compiled
        yield proofs[program_of(job)] if compiled is None else Proof(job, compiled, faults(job, compiled))


def missing(kernels: Iterable[str]) -> list[Request]:
    """Return typical requests that no table entry answers; if there are any, run :func:`model` again."""
    return [
        request
        for kernel in kernels
        for architecture in ARCHITECTURES
        for answered in [{_of(entry) for entry in _table(kernel, architecture).entries}]
        for request in KERNELS[kernel].examples(architecture)
        if _typical(request) not in answered
    ]


def _table(kernel: str, architecture: str) -> Table:
    """Return the stored table, or an empty table if none is stored.

    Also returns an empty table if the stored table is invalid and has no measured entries.
    """
    path = path_of(kernel, architecture)
    try:
        return read(path) if path.exists() else Table(kernel=kernel, architecture=architecture)
    except TableError:
        if '"status": "measured"' in path.read_text(encoding="utf-8"):
            raise
        return Table(kernel=kernel, architecture=architecture)


def _same(table: Table) -> dict[_Typical, Entry]:
    """Return the table's modelled entries that were made with the kernel's current source."""
    hashed = source_hash(table.kernel)
    return {_of(entry): entry for entry in table.entries if entry.status == "modelled" and entry.source_hash == hashed}


def _is_newer(entry: Entry) -> bool:
    """Return whether the entry was written by a newer Triton than the installed one."""
    return _number(entry.triton) > _number(triton_version())


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _typical(request: Request) -> _Typical:
    return request.dtypes, request.shape, request.flags, bucket(request.rows)


def _of(entry: Entry) -> _Typical:
    return entry.dtypes, tuple(entry.shape.items()), entry.flags, entry.rows


def _entry(proof: Proof, newer: Entry | None, same: Entry | None) -> Entry:
    if newer is None:
        made = _new(_without_faults(proof))
        others = same.resources if same is not None and same.config == made.config else {}
        return made.model_copy(update={"resources": others | made.resources})
    if proof.compiled is None or _beside_spills(proof):
        # A newer Triton chose the configuration; with this Triton, look-ups rely on the compiler's report, or the proof
        # fails.
        return newer
    return newer.model_copy(update={"resources": newer.resources | _resources(proof.compiled)})


def _without_faults(proof: Proof) -> Proof:
    """Return ``proof`` if it has no faults; otherwise try other configurations of the kernel.

    Returns the first proof without faults; otherwise, of the proofs whose only fault is
    spilling, the proof that spills least. At most ``_TRIED`` other configurations are tried.
    """
    request, proofs = proof.job.request, [proof]
    grid = KERNELS[request.kernel].configs(request)
    while proofs[-1].faults and len(proofs) <= _TRIED:
        config = next(grid, None)
        if config is None:
            break
        proofs.append(prove(ProofJob(request, config)))
    spilled = {
        each.compiled.spilled_bytes: each for each in reversed(proofs) if each.compiled and not _beside_spills(each)
    }
    if not spilled:
        raise NothingRunsError(f"{request}: {'; '.join(proof.faults)}")
    return spilled[min(spilled)]


def _beside_spills(proof: Proof) -> tuple[str, ...]:
    assert proof.compiled is not None
    return faults(proof.job._replace(spilled_bytes=None), proof.compiled)


def _resources(needs: Compiled) -> dict[str, Resources]:
    return {
        triton_version(): Resources(
            shared_bytes=needs.shared_bytes, registers=needs.registers, spilled_bytes=needs.spilled_bytes
        )
    }


def _new(proof: Proof) -> Entry:
    request = proof.job.request
    assert proof.compiled is not None
    return Entry(
        dtypes=request.dtypes,
        shape=request.width,
        rows=bucket(request.rows),
        flags=request.flags,
        triton=triton_version(),
        source_hash=source_hash(request.kernel),
        status="modelled",
        config=Settings.of(proof.job.config),
        resources=_resources(proof.compiled),
    )
