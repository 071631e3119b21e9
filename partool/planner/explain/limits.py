"""What keeps a step from being faster: evidence, memory, the network between nodes, the batch, or compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from partool.cost.training.predict import pipeline_idle_share
from partool.planner.explain.summary import brief, but, summary
from partool.planner.problem import Problem
from partool.planner.search.price import TIE, Priced
from partool.planner.search.solve import Solution
from partool.spec.numbers import GIB

FABRIC_SHARE = 0.10
"""Share of the step time that a network without limits would save from which the network counts as a bottleneck."""
_NO_LIMIT = 1e3
"""Factor on the rate of the network between nodes that stands for a network without limits."""
_IDLE_SHARE = 0.10
"""Share of the passes' time that pipeline ranks idle from which a small batch is named."""


@dataclass(frozen=True)
class Limit:
    """What keeps the step from being faster."""

    kind: str
    """``evidence``, ``memory``, ``network``, ``compute``, or a term of the step time."""
    text: str
    """The rest of the sentence."""
    short: str
    """The same for the first screen, without the settings of layouts."""

    @property
    def sentence(self) -> str:
        """The kind with the text."""
        return f"{self.kind}{self.text}"


def limit(solution: Solution, best: Priced) -> Limit:
    """Return the limit of a layout: the one of evidence, memory and network that costs most, or else a term."""
    fastest, paper = solution.fastest, solution.on_paper
    share = fabric_share(solution.problem, best)
    needs_memory = fastest is not None and not fastest.fits
    paper_gain = 0.0 if paper is None else 1.0 - paper.step_time_s / best.step_time_s
    memory_gain = 0.0 if fastest is None or not needs_memory else 1.0 - fastest.step_time_s / best.step_time_s
    if share >= FABRIC_SHARE and share > max(paper_gain, memory_gain):
        return Limit("network", f": {_fabric(solution.problem, share)}", f": {share:.1%} of the step waits for it")
    if paper is not None and paper_gain > TIE and (fastest is None or 2.0 * paper_gain >= _gain(fastest, best)):
        text = f". {summary(paper.layout)} is predicted {paper_gain:.1%} faster, but {but(best, paper)}."
        risk = f"on paper, risk {paper.factor - 1.0:.1%} (here {best.factor - 1.0:.1%})"
        return Limit("evidence", text, f": {brief(paper.layout, best.layout)} is {paper_gain:.1%} faster {risk}")
    if fastest is not None and memory_gain > TIE:
        return _memory(fastest, best, memory_gain)
    return _term(best)


def _gain(other: Priced, best: Priced) -> float:
    return 1.0 - other.step_time_s / best.step_time_s


def _memory(fastest: Priced, best: Priced, gain: float) -> Limit:
    terms = fastest.memory.terms_bytes
    name = max(terms, key=lambda key: terms[key])
    over = (fastest.memory.total_bytes - fastest.memory.capacity_bytes) / GIB
    saves = f"would take {gain:.1%} less time, but {over:.1f} GiB more than fit"
    return Limit(
        "memory",
        f". {summary(fastest.layout)} {saves}; {terms[name] / GIB:.1f} GiB are {name}.",
        f": {brief(fastest.layout, best.layout)} {saves}",
    )


def _term(best: Priced) -> Limit:
    waits = {name: value for name, value in best.terms_s.items() if name not in ("forward", "backward")}
    name = max(waits, key=lambda key: waits[key])
    share = waits[name] / best.step_time_s
    if share < 0.02:
        passes = "forward and backward pass" if best.job.backward else "forward pass"
        text = f". The step is almost all {passes}; faster devices or more of them would help."
        return Limit("compute", text, f": {1.0 - sum(waits.values()) / best.step_time_s:.1%} of the step is {passes}")
    return Limit(
        name, f", {share:.1%} of the step: more than anything else beside compute.", f": {share:.1%} of the step"
    )


def fabric_share(problem: Problem, best: Priced) -> float:
    """Return the share of the step time that the same layout would save on a network between nodes without limits."""
    devices = problem.devices
    if devices.nodes == 1 or not devices.fabric_bytes_per_s:
        return 0.0
    free = problem.on(fabric_bytes_per_s=_NO_LIMIT * devices.fabric_bytes_per_s)
    return 1.0 - Priced(free, best.layout).step_time_s / best.step_time_s


def sentences(solution: Solution, best: Priced) -> Iterator[str]:
    """Yield sentences on a network that is a bottleneck, and on a small or odd batch that limits the layout."""
    problem = solution.problem
    share = fabric_share(problem, best)
    if share >= FABRIC_SHARE:
        yield f"Network: {_fabric(problem, share)}"
    yield from batch_sentences(problem, best)


def _fabric(problem: Problem, share: float) -> str:
    devices = problem.devices
    rate = f"{devices.fabric_bytes_per_s / 1e9:.3g} GB/s per device"
    name = f" ({devices.fabric})" if devices.fabric else ""
    return f"without the limit of {rate} between nodes{name}, this layout would take {share:.1%} less time."


def batch_sentences(problem: Problem, best: Priced) -> Iterator[str]:
    """Yield a sentence where the batch has too few divisors, or too few micro-batches, for the devices."""
    batch, world, mesh = problem.spec.training.global_batch, problem.world_size, best.layout.mesh
    most = gcd(batch, world)
    if mesh.dp == most < world and not problem.pinned_degrees:
        yield (
            f"Batch: {batch:,} sequences divide among {most:,} of {world:,} devices at most, so {world // most:,} "
            "devices share each sequence."
        )
    count, stages = best.layout.derived.accumulation, mesh.pp
    idle = pipeline_idle_share(best.job, best.layout) if stages > 1 else 0.0
    if idle >= _IDLE_SHARE:
        each = f"{count:,} micro-batch{'es' * (count > 1)}"
        yield f"Batch: {each} for {stages} pipeline ranks leave these idle for {idle:.1%} of the passes' time."
