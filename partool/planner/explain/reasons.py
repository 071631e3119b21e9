"""Reasons for a layout, the runners-up and why each of them lost, and the tightest limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from partool.cost.evidence import fit_limit
from partool.cost.time.pipeline import moves_weights
from partool.diagnostics.record import Diagnostic
from partool.planner.evidence import tier_of
from partool.planner.explain import choice
from partool.planner.explain.expert import expert_reasons
from partool.planner.explain.one_bit import one_bit_reasons
from partool.planner.explain.pipeline import pipeline_reasons, pipelined
from partool.planner.explain.sequence import sequence_reasons
from partool.planner.explain.summary import but, recompute, short_time, summary
from partool.planner.explain.tensor import tensor_reasons
from partool.planner.forms import gathers, tiles
from partool.planner.kernels import fused
from partool.planner.problem import Problem
from partool.planner.rules import adversarial, objective
from partool.planner.search import offload
from partool.planner.search.price import TIE, Priced
from partool.planner.search.solve import Solution
from partool.spec.numbers import GIB
from partool.strategies.tiers import TIERS

_EVIDENCE = "evidence."
"""Start of the limit of a plan that a layout with less evidence would beat."""


def reasons(solution: Solution, best: Priced) -> tuple[str, ...]:
    """Return the sentences on why the layout was taken: what was searched, and each comparison that was made."""
    better = [_better(best, solution.better)] if solution.better is not None else []
    compared = [choice.sentence(best, one) for one in choice.comparisons(solution, best)]
    return (_searched(solution, best), *better, *compared, *_paper(solution, best), *_tier(solution, best))


def details(solution: Solution, best: Priced) -> tuple[str, ...]:
    """Return one sentence for each setting that the layout contains."""
    layout, parallel = best.layout, solution.problem.spec.parallel
    sentences = [*_asked(solution, best), _zero(solution, best)]
    sentences += gathers.sentences(solution.problem, layout)
    sentences += tensor_reasons(solution.problem, best)
    sentences += sequence_reasons(solution.problem, best)
    sentences += expert_reasons(best)
    sentences += pipeline_reasons(solution, best)
    sentences += one_bit_reasons(solution.problem, best)
    sentences.append(_recompute(solution, best))
    sentences += adversarial.sentences(solution.problem)
    sentences += objective.sentences(solution.problem)
    sentences += tiles.sentences(solution.problem, layout)
    sentences += fused.words(solution.problem, layout)
    sentences += offload.sentences(solution.problem, best)
    sentences += _host(solution.problem, best)
    if parallel.micro_batch == "auto":
        share = layout.micro_batch * layout.derived.accumulation
        sentences.append(
            f"Micro-batch {layout.micro_batch}: the best way to split {share} sequences per rank and step."
        )
    return tuple(sentences)


def _paper(solution: Solution, best: Priced) -> list[str]:
    """Return the sentence on a layout that is faster on paper, unless the plan's limit names it already."""
    sentence = "" if limit(solution, best).startswith(_EVIDENCE) else choice.on_paper(solution, best)
    return [sentence] if sentence else []


def _asked(solution: Solution, best: Priced) -> list[str]:
    """Return a sentence for each degree of parallelism that the spec sets or implies."""
    problem, layout, mesh = solution.problem, best.layout, best.layout.mesh
    parallel = problem.spec.parallel
    degrees = (
        ("Tensor", problem.tensor_degree, mesh.tp),
        ("Pipeline", parallel.pipeline.stages, mesh.pp),
        ("Sequence", parallel.sequence.degree, mesh.cp),
        ("Expert", parallel.expert, layout.expert),
        ("Expert tensor", parallel.expert_tensor, layout.expert_tensor),
    )
    sentences = [
        f"{name} {degree}: the spec asks for it." for name, field, degree in degrees if degree > 1 and field != "auto"
    ]
    implied = pipelined(problem) if mesh.pp > 1 and parallel.pipeline.stages == "auto" else ""
    return [*sentences, *([f"Pipeline {mesh.pp}: {implied}"] if implied else [])]


def _tier(solution: Solution, best: Priced) -> list[str]:
    """Return a sentence on the published practice behind the layout's mechanisms."""
    if solution.problem.spec.limits.prefer == "fastest":
        return []
    tier = tier_of(best.layout, solution.problem.granted)
    words = TIERS[tier].words if tier else "the mechanisms of most published runs"
    return [f"Evidence tier {tier}: {words}."]


def _searched(solution: Solution, best: Priced) -> str:
    counts = solution.summary()
    if counts.enumerated == 1:
        return "The spec leaves one layout."
    able = " that can run" if solution.able is not None and solution.able.best is best else ""
    results = [one for one in (solution.overall, solution.able) if one is not None]
    ended = "" if all(one.complete for one in results) else " of those that the search came to before its limit of work"
    risk = f", {best.risk:.0%} for what its predictions may err" if best.risk else ""
    return (
        f"{counts.enumerated:,} layouts: {sum(counts.pruned.values()):,} ruled out, {counts.evaluated:,} prices "
        f"computed, {counts.simulated:,} simulated. This is the best{able}{ended}: {short_time(best.step_time_s)}"
        f"{risk}, and it fits with {min(best.memory.fit_probability, fit_limit()[0]):.0%}."
    )


def _host(problem: Problem, best: Priced) -> list[str]:
    """Return a sentence on the figures of the host that are assumed, if the layout uses host memory."""
    devices, hardware = problem.devices, problem.spec.hardware
    if not best.layout.offload.active or devices.backend == "cpu":
        return []
    figures = (
        ("host_memory_gib", (devices.host_memory_bytes or 0) / GIB, "GiB of memory"),
        ("host_cores", devices.host_cores, "cores"),
        ("host_link_gb_per_s", (devices.host_link_bytes_per_s or 0) / 1e9, "GB/s per device"),
    )
    assumed = [
        (name, f"{value:,.0f} {unit}") for name, value, unit in figures if getattr(hardware, name) is None and value
    ]
    if not assumed:
        return []
    listed, names = ", ".join(text for _, text in assumed), ", ".join(name for name, _ in assumed)
    return [f"Host assumed, as such machines usually have it: {listed}; write hardware.{{{names}}} to be sure."]


def _better(best: Priced, better: Priced) -> str:
    gain = 1.0 - better.step_time_s / best.step_time_s
    time = f"take {gain:.1%} less time" if gain > 0 else "be a better choice"
    return f"{summary(better.layout)} would {time}, but cannot run yet."


def _zero(solution: Solution, best: Priced) -> str:
    layout = best.layout
    if solution.problem.spec.parallel.data.zero != "auto":
        return f"ZeRO-{layout.data.zero}: the spec asks for it."
    if layout.mesh.dp * layout.mesh.cp == 1 and layout.data.zero == 3:
        return "ZeRO-3 on one rank: a layer's copies of parameters exist only while it computes."
    if layout.data.zero == 1 and layout.expert_ranks > 1:
        return "ZeRO-1: ranks that share experts need stage 1 or above."
    if layout.mesh.dp * layout.mesh.cp == 1:
        return "ZeRO-0: there is one data-parallel rank, so there is nothing to share."
    if layout.data.zero == 0:
        return "ZeRO-0: copies of the state fit, and sharing it would not be better."
    mesh, groups = layout.mesh, solution.space.groups
    same = (groups.tp == mesh.tp) & (groups.pp == mesh.pp) & (groups.cp == mesh.cp) & (groups.zero < layout.data.zero)
    same = same & (groups.micro_batch == layout.micro_batch)
    lower = range(1 if layout.expert_ranks > 1 else 0, layout.data.zero)
    fits = {zero for zero in lower if _any_fits(solution, same & (groups.zero == zero))}
    none = [str(zero) for zero in lower if zero not in fits]
    if not fits:
        return f"ZeRO-{layout.data.zero}: on this mesh, stage{'s' * (len(none) > 1)} {', '.join(none)} would not fit."
    return f"ZeRO-{layout.data.zero}: the best of the stages that fit."


def _any_fits(solution: Solution, groups: Any) -> bool:
    """Return True if device memory is enough for at least one layout of the given groups of layouts."""
    return solution.search.fastest_that_fits(np.flatnonzero(groups), slack=0.0) is not None


def _recompute(solution: Solution, best: Priced) -> str:
    text = recompute(best.layout)
    if solution.problem.spec.parallel.recompute != "auto":
        return f"Recompute {text}: {solution.problem.why_fixed('recompute')}."
    if moves_weights(best.layout):
        return "Recompute full: WeiPipe keeps the inputs of stages only, and computes the rest again."
    if text == "none":
        where = ", in host memory" if best.layout.offload.activations != "none" else ""
        return f"Recompute none: all activations fit{where}."
    if "keep_attention" in best.layout.recompute:
        return (
            f"Recompute {text}: layouts that keep more do not fit, or are worse for what else they need; attention, "
            "whose work grows with the square of the sequence, is not done twice."
        )
    return f"Recompute {text}: layouts that keep more do not fit, or are worse for what else they need."


def limit(solution: Solution, best: Priced) -> str:
    """Return text on what keeps the step from being faster: evidence, memory, compute, or another term of the time."""
    fastest, paper = solution.fastest, solution.on_paper
    if (
        paper is not None
        and paper.step_time_s < best.step_time_s * (1.0 - TIE)
        and (fastest is None or 2.0 * paper.step_time_s <= fastest.step_time_s + best.step_time_s)
    ):
        gain = 1.0 - paper.step_time_s / best.step_time_s
        return f"{_EVIDENCE} {summary(paper.layout)} is predicted {gain:.1%} faster, but {but(best, paper)}."
    if fastest is not None and not fastest.fits and fastest.step_time_s < best.step_time_s * (1.0 - TIE):
        terms = fastest.memory.terms_bytes
        name = max(terms, key=lambda key: terms[key])
        over = fastest.memory.total_bytes - fastest.memory.capacity_bytes
        gain = 1.0 - fastest.step_time_s / best.step_time_s
        return (
            f"memory. {summary(fastest.layout)} would take {gain:.1%} less time, but {over / GIB:.1f} GiB more than "
            f"fit; {terms[name] / GIB:.1f} GiB are {name}."
        )
    terms_s = best.terms_s
    waits = {name: value for name, value in terms_s.items() if name not in ("forward", "backward")}
    name = max(waits, key=lambda key: waits[key])
    share = waits[name] / best.step_time_s
    if share < 0.02:
        passes = "forward and backward pass" if best.job.backward else "forward pass"
        return f"compute. The step is almost all {passes}; faster devices or more of them would help."
    return f"{name}, {share:.1%} of the step: more than anything else beside compute."


def tight(solution: Solution, best: Priced) -> Iterator[Diagnostic]:
    """Yield a warning if the layout is not sure to fit in memory."""
    if best.safe:
        return
    memory, devices = best.memory, solution.problem.devices
    message = (
        f"the plan needs {memory.total_bytes / GIB:.1f} of {devices.memory_bytes / GIB:.1f} GiB per rank; with the "
        f"uncertainty of the prediction it fits with a probability of {memory.fit_probability:.0%}"
    )
    yield Diagnostic("PT302", message, severity="warning", path=("hardware",), help=f"safer: {_safer(solution)}")


def _safer(solution: Solution) -> str:
    from partool.planner.explain.changes import single_changes

    for text, changed in single_changes(solution.problem):
        if changed.best is not None and changed.best.safe:
            return text
    return "devices with more memory"
