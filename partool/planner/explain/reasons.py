"""Reasons for a layout, the runners-up and why each of them lost, and the tightest limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from partool.cost.evidence import fit_limit
from partool.cost.time.pipeline import moves_weights
from partool.diagnostics.record import Diagnostic
from partool.plan.types import SearchSummary
from partool.planner.evidence import tier_of
from partool.planner.explain import choice, limits, settings
from partool.planner.explain.choice import MechanismComparison
from partool.planner.explain.expert import expert_reasons
from partool.planner.explain.limits import Limit
from partool.planner.explain.one_bit import one_bit_reasons
from partool.planner.explain.pipeline import pipeline_reasons, pipelined
from partool.planner.explain.sequence import sequence_reasons
from partool.planner.explain.summary import recompute, short_time, summary
from partool.planner.explain.tensor import tensor_reasons
from partool.planner.forms import gathers, tiles
from partool.planner.forms.runnable import runnable
from partool.planner.kernels import fused
from partool.planner.problem import Problem
from partool.planner.rules import adversarial, distill, evaluation, objective
from partool.planner.search import offload
from partool.planner.search.ordered import best_of_kinds
from partool.planner.search.price import Priced
from partool.planner.search.solve import Solution
from partool.spec.numbers import GIB
from partool.strategies.tiers import TIERS


def reasons(
    solution: Solution, best: Priced, counts: SearchSummary, compared: Sequence[MechanismComparison], limited: Limit
) -> tuple[str, ...]:
    """Return the sentences on why the layout was taken: what was searched, and each comparison that was made.

    ``counts`` are those of the search, before other layouts are priced for comparisons.
    """
    sentences = [_searched(solution, best, counts)]
    sentences += [_better(best, solution.better)] if solution.better is not None else []
    sentences += [choice.sentence(best, one) for one in compared]
    # The plan's limit may have named the layout that is faster on paper.
    sentences += filter(None, [choice.on_paper(solution, best)] if limited.kind != "evidence" else [])
    return (*sentences, *limits.sentences(solution, best), *_tier(solution, best))


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
    if (compared := settings.compiled(solution, best)) is not None:
        sentences.append(settings.sentence(best, compared))
    sentences += adversarial.sentences(solution.problem)
    sentences += distill.sentences(solution.problem)
    sentences += objective.sentences(solution.problem)
    sentences += evaluation.sentences(solution.problem)
    sentences += tiles.sentences(solution.problem, layout)
    sentences += fused.words(solution.problem, layout)
    sentences += offload.sentences(solution.problem, best)
    sentences += _host(solution.problem, best)
    if parallel.micro_batch == "auto":
        sentences.append(_micro_batch(solution, best))
    return tuple(sentences)


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


def _searched(solution: Solution, best: Priced, counts: SearchSummary) -> str:
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
        compared = settings.higher_stage(solution, best)
        return settings.sentence(best, compared) if compared else "ZeRO-0: no higher stage is possible on this mesh."
    compared = settings.lower_stage(solution, best)
    if compared is None:
        return f"ZeRO-{layout.data.zero}: the lowest stage that this mesh and this offload allow."
    return settings.sentence(best, compared)


def _recompute(solution: Solution, best: Priced) -> str:
    text = recompute(best.layout)
    if solution.problem.spec.parallel.recompute != "auto":
        return f"Recompute {text}: {solution.problem.why_fixed('recompute')}."
    if moves_weights(best.layout):
        return "Recompute full: WeiPipe keeps the inputs of stages only, and computes the rest again."
    if text == "none":
        where = ", in host memory" if best.layout.offload.activations != "none" else ""
        return f"Recompute none: all activations fit{where}."
    compared = settings.milder_recompute(solution, best)
    if compared is None:
        return f"Recompute {text}: no other policy is possible with this layout."
    return settings.sentence(best, compared)


def _micro_batch(solution: Solution, best: Priced) -> str:
    layout = best.layout
    share = layout.micro_batch * layout.derived.accumulation
    if share == 1:
        return "Micro-batch 1: a rank has one sequence per step."
    compared = settings.other_micro_batch(solution, best)
    if compared is None:
        return f"Micro-batch {layout.micro_batch}: the only size for the {share} sequences of a rank and step."
    return settings.sentence(best, compared)


def tight(solution: Solution, best: Priced) -> Iterator[Diagnostic]:
    """Yield a warning if the layout is not sure to fit in memory.

    It names a layout that is sure to fit, of those that the search has priced.
    """
    if best.safe:
        return
    memory, devices = best.memory, solution.problem.devices
    message = (
        f"the plan needs {memory.total_bytes / GIB:.1f} of {devices.memory_bytes / GIB:.1f} GiB per rank; with the "
        f"uncertainty of the prediction it fits with a probability of {memory.fit_probability:.0%}"
    )
    yield Diagnostic("PT302", message, severity="warning", path=("hardware",), help=f"safer: {_safer(solution)}")


def _safer(solution: Solution) -> str:
    """Return the best priced layout that surely fits; if there is none, the first change of the spec that helps."""
    from partool.planner.explain.changes import single_changes

    def surely_runs(priced: Priced) -> bool:
        return priced.safe and runnable(solution.problem, priced.layout)

    for one in best_of_kinds(solution.search, lambda _: "any", surely_runs):
        size = f"{one.memory.total_bytes / GIB:.1f} GiB per rank"
        return f"on these devices, {summary(one.layout)}: {short_time(one.step_time_s)} per step, {size}"
    for text, changed in single_changes(solution.problem):
        if changed.best is not None and changed.best.safe:
            return text
    return "devices with more memory"
