"""Prove without a GPU that configurations can run: compile each for its architecture and check the limits.

Two kinds of configurations are compiled: the stored entries of tuned tables, and those that each kernel's rule computes
for typical requests. Jobs that differ only in numbers passed at run time share a program, which is compiled once.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import NamedTuple

from partool_kernels.compiled import Compiled, compile_for
from partool_kernels.device import triton_version
from partool_kernels.registry import ARCHITECTURES, KERNELS, Config, Request
from partool_kernels.registry.feasible import obstacle
from partool_kernels.registry.tables import stored

_OTHER_TYPES = ("float16", "float32")


class ProofJob(NamedTuple):
    """A configuration to be proven."""

    request: Request
    config: Config
    spilled_bytes: int | None = 0
    """Largest allowed spill in bytes per thread; None (no spill is recorded for this Triton) allows any spill."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a job."""

    job: ProofJob
    compiled: Compiled | None
    """Resources of the compiled program; None where the compiler failed."""
    faults: tuple[str, ...]
    """Reasons why the configuration cannot be used, in words; empty if it can be used."""


def jobs(kernel: str, architecture: str, *, all_types: bool = False) -> Iterator[ProofJob]:
    """Yield one job per program of a kernel on an architecture; yield nothing if the kernel cannot run on it.

    ``all_types`` adds the same programs in float16 and float32.
    """
    seen: set[tuple[object, ...]] = set()
    for job in _jobs(kernel, architecture, all_types=all_types):
        program = program_of(job)
        if program not in seen:
            seen.add(program)
            yield job


def _jobs(kernel: str, architecture: str, *, all_types: bool) -> Iterator[ProofJob]:
    # Jobs with a record of this Triton come first, as the first of several jobs for a program is kept.
    unknown = []
    for request, config, entry in stored(kernel, architecture):
        needs = entry.resources.get(triton_version())
        if needs is None:
            unknown.append(ProofJob(request, config, None))
        else:
            yield ProofJob(request, config, needs.spilled_bytes)
    yield from unknown
    for request in KERNELS[kernel].examples(architecture):
        yield ProofJob(request, KERNELS[kernel].default(request))
        for dtype in _OTHER_TYPES if all_types else ():
            dtypes = tuple(dtype if name == "bfloat16" else name for name in request.dtypes)
            other = replace(request, dtypes=dtypes)
            yield ProofJob(other, KERNELS[kernel].default(other))


def program_of(job: ProofJob) -> tuple[object, ...]:
    """Return a key of the job's program; two jobs have equal keys if they compile to the same program."""
    request, config = job.request, job.config
    signature = KERNELS[request.kernel].signature(request, config)
    constants = tuple(sorted((name, str(value)) for name, value in signature.constants.items()))
    return (
        request.kernel, request.architecture, tuple(signature.arguments.items()), constants,
        tuple(sorted(signature.divisible)), replace(config, blocks=()),
    )  # fmt: skip


def faults(job: ProofJob, compiled: Compiled) -> tuple[str, ...]:
    """Return the reasons why a compiled configuration cannot be used, in words."""
    kernel, architecture = KERNELS[job.request.kernel], ARCHITECTURES[job.request.architecture]
    limit, hindrance = architecture.shared_bytes, obstacle(job.request, job.config)
    texts = []
    if compiled.shared_bytes > limit:
        texts.append(f"needs {compiled.shared_bytes} bytes of shared memory, {architecture.name} has {limit}")
    if hindrance is not None:
        texts.append(f"look-ups pass it over: {hindrance}")
    if job.spilled_bytes is not None and compiled.spilled_bytes > job.spilled_bytes:
        texts.append(f"spills {compiled.spilled_bytes} bytes per thread, {job.spilled_bytes} are on record")
    if kernel.matrix and not compiled.matrix and not _is_wide(job.request):
        texts.append(f"has none of {', '.join(architecture.matrix)} in its assembly")
    if kernel.matrix and compiled.emulates_fp8:
        texts.append("turns 8-bit products into wider ones")
    return tuple(texts)


def _is_wide(request: Request) -> bool:
    """Return whether a product is in full float32 precision, for which NVIDIA's matrix units have no instruction."""
    exact = request.dtypes[0] == "float32" and "tf32" not in request.flags
    return exact and ARCHITECTURES[request.architecture].backend == "cuda"


def prove(job: ProofJob) -> Proof:
    """Compile a job's configuration and check the architecture's limits; an error of the compiler is a fault."""
    try:
        compiled = compile_for(job.request, job.config)
    except Exception as error:
        return Proof(job, None, (f"does not compile: {type(error).__name__}: {error}",))
    return Proof(job, compiled, faults(job, compiled))


def prove_all(work: Iterable[ProofJob], processes: int) -> Iterator[Proof]:
    """Yield the proof of every job, in order; if the compiler crashes on a job, only this job gets a fault."""
    waiting = list(work)
    while waiting:
        finished = 0
        for proof in _in_a_pool(waiting, processes):
            yield proof
            finished += 1
        waiting = waiting[finished:]
        if waiting:
            # One of the running jobs ended its process; running this one alone shows whether it is the culprit.
            alone = list(_in_a_pool(waiting[:1], 1))
            yield alone[0] if alone else Proof(waiting[0], None, ("its compiler ends the process",))
            waiting = waiting[1:]


def _end_with_parent() -> None:
    """End this process of a pool when its parent process ends, even if the parent is killed."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _in_a_pool(work: Collection[ProofJob], processes: int) -> Iterator[Proof]:
    """Yield the proofs of jobs in order, until all jobs are done or a process of the pool ends."""
    # Processes are spawned, not forked, as Triton's compiler starts threads.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _end_with_parent)
    try:
        futures: list[Future[Proof]] = [pool.submit(prove, job) for job in work]
        for future in futures:
            yield future.result()
    except BrokenProcessPool:
        return
    finally:
        # A consumer that stops early does not wait for the remaining proofs.
        pool.shutdown(wait=False, cancel_futures=True)
