"""Why this layout: reasons, the next best, and what would fit when nothing does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from partool.diagnostics.record import Diagnostic
from partool.layout.capabilities import gaps
from partool.plan.types import Alternative, Layout
from partool.planner.candidates import Candidate, Problem, candidates, fits, layout, micro_batches, needs, price
from partool.planner.checks import check

_GIB = 2**30
_ALTERNATIVES = 3


def summary(work_layout: Layout) -> str:
    """Return a layout in one line."""
    mesh = work_layout.mesh
    parts = [f"ZeRO-{work_layout.zero} over {mesh.dp} rank{'s' * (mesh.dp > 1)}"]
    if mesh.dp_replicate > 1 and work_layout.zero:
        parts[0] = f"ZeRO-{work_layout.zero} over {mesh.dp_shard}, {mesh.dp_replicate} replicas"
    for name, size in (
        ("tensor", mesh.tp),
        ("pipeline", mesh.pp),
        ("sequence", mesh.cp),
        ("expert", work_layout.expert),
    ):
        if size > 1:
            parts.append(f"{name} {size}")
    parts.append(f"micro-batch {work_layout.micro_batch} × {work_layout.accumulation}")
    parts.append(f"recompute {work_layout.recompute[0]}")
    return ", ".join(parts)


def reasons(problem: Problem, best: Candidate, priced: list[Candidate]) -> tuple[str, ...]:
    """Return one sentence per decision."""
    found: list[str] = []
    safe, fitting = sum(candidate.safe for candidate in priced), sum(candidate.fits for candidate in priced)
    if len(priced) == 1:
        found.append("The spec leaves one layout.")
    elif safe or not fitting:
        found.append(f"{safe} of {len(priced)} possible layouts fit safely; this is the fastest of them.")
    else:
        found.append(f"{fitting} of {len(priced)} possible layouts fit, none safely; this is the fastest.")
    chosen = best.work.layout
    parallel = problem.spec.parallel
    if problem.dp > 1:
        found.append(_zero_reason(chosen, priced, pinned=parallel.data.zero != "auto"))
    elif parallel.data.zero == "auto":
        found.append("ZeRO-0: there is one data-parallel rank, so there is nothing to share.")
    found.append(_recompute_reason(best, priced, pinned=parallel.recompute != "auto"))
    if parallel.micro_batch == "auto":
        share = chosen.micro_batch * chosen.accumulation
        found.append(
            f"Micro-batch {chosen.micro_batch}: the fastest way to split the {share} sequences per rank and step."
        )
    return tuple(found)


def _zero_reason(chosen: Layout, priced: list[Candidate], *, pinned: bool) -> str:
    if pinned:
        return f"ZeRO-{chosen.zero}: the spec asks for it."
    fitting = {c.work.layout.zero for c in priced if c.safe}
    lower = [stage for stage in range(chosen.zero) if stage not in fitting]
    if lower:
        return f"ZeRO-{chosen.zero}: stage{'s' * (len(lower) > 1)} {', '.join(map(str, lower))} would not fit safely."
    return f"ZeRO-{chosen.zero}: the fastest of the stages that fit."


def _recompute_reason(best: Candidate, priced: list[Candidate], *, pinned: bool) -> str:
    policy = best.work.layout.recompute[0]
    if pinned:
        return f"Recompute {policy}: the spec asks for it."
    if policy == "none":
        return "Recompute none: all activations fit."
    return f"Recompute {policy}: of the layouts that keep more, none that fits safely is faster."


def alternatives(problem: Problem, best: Candidate, priced: list[Candidate]) -> tuple[Alternative, ...]:
    """Return the next best layouts, one per ZeRO stage and recompute policy, fastest first."""
    by_kind: dict[tuple[object, ...], Candidate] = {}
    # Within a kind the fitting ones come first; of those that do not fit, the one that misses by least says most.
    for candidate in sorted(priced, key=lambda c: (not c.fits, c.time.step_time_s if c.fits else c.memory.total_bytes)):
        by_kind.setdefault(_kind(candidate), candidate)
    others = [candidate for kind, candidate in by_kind.items() if kind != _kind(best)]
    fitting = sorted((c for c in others if c.fits), key=lambda c: c.time.step_time_s)
    too_large = [c for c in others if not c.fits and c.time.step_time_s < best.time.step_time_s]
    chosen = fitting[: _ALTERNATIVES - bool(too_large)] + too_large[:1]
    return tuple(_alternative(problem, best, c) for c in sorted(chosen, key=lambda c: c.time.step_time_s))


def _kind(candidate: Candidate) -> tuple[object, ...]:
    chosen = candidate.work.layout
    return chosen.zero, chosen.recompute[0], chosen.mesh.dp_shard


def _alternative(problem: Problem, best: Candidate, other: Candidate) -> Alternative:
    chosen = other.work.layout
    ratio = other.time.step_time_s / best.time.step_time_s
    if not other.fits:
        over = other.memory.total_bytes - other.memory.capacity_bytes
        why = f"{over / _GIB:.1f} GiB too large"
    elif ratio > 1.0005:
        why = f"{(ratio - 1) * 100:.1f} % slower"
    elif ratio < 0.9995:
        why = f"fits with a probability of {other.memory.fit_probability:.0%} only"
    else:
        more = other.memory.total_bytes - best.memory.total_bytes
        why = f"as fast, with {abs(more) / _GIB:.2f} GiB {'more' if more > 0 else 'less'} memory"
    change = f"parallel: {{data: {{zero: {chosen.zero}"
    if chosen.zero and chosen.mesh.dp_replicate > 1:
        change += f", shard: {chosen.mesh.dp_shard}"
    change += f"}}, recompute: {chosen.recompute[0]}, micro_batch: {chosen.micro_batch}}}"
    return Alternative(
        summary=summary(chosen),
        step_time_s=other.time.step_time_s,
        memory_bytes=other.memory.total_bytes,
        runnable=not gaps(needs(problem, chosen)),
        why_not=why,
        change=change,
    )


def tight(problem: Problem, best: Candidate) -> list[Diagnostic]:
    """Return a warning if the layout may not fit after all."""
    if best.safe:
        return []
    probability = best.memory.fit_probability
    message = (
        f"the plan needs {best.memory.total_bytes / _GIB:.1f} of {problem.devices.memory_bytes / _GIB:.1f} GiB "
        f"per rank; with the uncertainty of the prediction it fits with a probability of {probability:.0%}"
    )
    safer = next(_savings(problem, best), "a smaller sequence_length")
    return [Diagnostic("PT302", message, severity="warning", path=("hardware",), help=f"safer: {safer}")]


def does_not_fit(problem: Problem, priced: list[Candidate]) -> Diagnostic:
    """Return the finding that nothing fits, with the smallest layout's terms and what would fit."""
    smallest = min(priced, key=lambda candidate: candidate.memory.total_bytes)
    memory = smallest.memory
    largest = sorted(memory.terms_bytes.items(), key=lambda item: -item[1])[:3]
    terms = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in largest)
    message = (
        f"no layout fits: the smallest ({summary(smallest.work.layout)}) needs {memory.total_bytes / _GIB:.1f} GiB "
        f"per rank, {memory.capacity_bytes / _GIB:.1f} GiB are there (GiB: {terms})"
    )
    ways = list(_what_would_fit(problem))
    help = "; or ".join(ways) if ways else "use devices with more memory"
    return Diagnostic("PT301", message, path=("hardware",), help=help)


def _what_would_fit(problem: Problem) -> Iterator[str]:
    """Yield single changes, and then numbers of nodes, under which a layout fits."""
    for text, changed in _single_changes(problem):
        if _any_fits(changed):
            yield text
    for nodes in _more_nodes(problem):
        changed = replace(problem, devices=problem.devices.model_copy(update={"nodes": nodes}))
        if _any_fits(_free(changed)):
            yield f"nodes: {nodes}" + (
                " with parallel.data.zero: auto" if problem.spec.parallel.data.zero != "auto" else ""
            )
            return


def _single_changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    parallel, training = problem.spec.parallel, problem.spec.training
    if parallel.data.zero not in ("auto", 3) and problem.dp > 1:
        yield (
            "parallel.data.zero: 3",
            _with(problem, data=parallel.data.model_copy(update={"zero": 3, "shard": "auto"})),
        )
    if parallel.recompute not in ("auto", "full"):
        yield "parallel.recompute: full", _with(problem, recompute="full")
    if parallel.micro_batch not in ("auto", 1):
        yield "parallel.micro_batch: 1", _with(problem, micro_batch=1)
    length = training.sequence_length // 2
    while length >= 256:
        spec = problem.spec.model_copy(update={"training": training.model_copy(update={"sequence_length": length})})
        shorter = replace(problem, spec=spec)
        if _any_fits(shorter):
            yield f"training.sequence_length: {length}", shorter
            return
        length //= 2


def _with(problem: Problem, **changes: object) -> Problem:
    parallel = problem.spec.parallel.model_copy(update=changes)
    return replace(problem, spec=problem.spec.model_copy(update={"parallel": parallel}))


def _free(problem: Problem) -> Problem:
    data = problem.spec.parallel.data.model_copy(update={"zero": "auto", "shard": "auto"})
    return _with(problem, data=data)


def _any_fits(problem: Problem) -> bool:
    """Return True if the spec is legal and one of its layouts fits."""
    if any(finding.severity == "error" for finding in check(problem, None)):
        return False
    return any(fits(problem, layout) for layout in candidates(problem))


def _more_nodes(problem: Problem) -> Iterator[int]:
    nodes = problem.devices.nodes
    for _ in range(8):
        nodes *= 2
        yield nodes


def _savings(problem: Problem, best: Candidate) -> Iterator[str]:
    """Yield changes that need less memory than the best layout, the cheapest in time first."""
    chosen = best.work.layout
    shard = max(chosen.mesh.dp_shard, problem.dp if problem.dp > 1 else 1)
    for zero in range(chosen.zero, 4 if problem.dp > 1 else chosen.zero + 1):
        for recompute in ("none", "selective", "full"):
            for micro_batch in micro_batches(problem):
                other = price(problem, layout(problem, zero, shard if zero else 1, micro_batch, recompute))  # type: ignore[arg-type]
                if other.safe:
                    yield f"parallel: {{data: {{zero: {zero}}}, recompute: {recompute}, micro_batch: {micro_batch}}}"
