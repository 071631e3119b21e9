"""Rules that need the resolved model or the machines, as a table of small functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from partool.diagnostics.record import Diagnostic
from partool.planner.candidates import Problem

Check = Callable[[Problem], Iterator[Diagnostic]]


def check(problem: Problem, tokenizer_vocab: int | None) -> list[Diagnostic]:
    """Return every finding of every rule; later rules divide by what earlier ones have checked."""
    found = [*_vocabulary(problem, tokenizer_vocab)]
    for group in (SIZES, BATCHES):
        found += [finding for rule in group for finding in rule(problem)]
        if any(finding.severity == "error" for finding in found):
            break
    return found


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest(wanted: int, legal: list[int], count: int = 2) -> str:
    """Return the legal values nearest to the wanted one, as ``4 or 8``."""
    chosen = sorted(sorted(legal, key=lambda n: (abs(n - wanted), n))[:count])
    return " or ".join(str(n) for n in chosen)


def _vocabulary(problem: Problem, tokenizer_vocab: int | None) -> Iterator[Diagnostic]:
    vocab = problem.model.vocab
    if tokenizer_vocab is not None and vocab < tokenizer_vocab:
        message = f"the tokenizer has {tokenizer_vocab} tokens, the model's vocabulary {vocab}"
        yield Diagnostic(
            "PT258", message, path=("model", "vocab"), help=f"set model.vocab to {tokenizer_vocab} or more"
        )


def _heads(problem: Problem) -> Iterator[Diagnostic]:
    tensor, model = problem.spec.parallel.tensor, problem.model
    if model.heads % tensor:
        legal = [n for n in divisors(model.heads) if n > 1]
        both = [n for n in legal if model.kv_heads % n == 0]
        also = f"; {model.kv_heads} heads for keys and values also divide by {nearest(tensor, both)}" if both else ""
        source = f" (from preset {problem.spec.model.preset})" if problem.spec.model.preset else ""
        yield Diagnostic(
            "PT203",
            f"{model.heads} attention heads cannot be split over tensor: {tensor}",
            path=("parallel", "tensor"),
            label=f"{model.heads} heads{source} leave a remainder of {model.heads % tensor}",
            help=f"use {nearest(tensor, legal)}{also}",
        )
    elif model.kv_heads % tensor and tensor % model.kv_heads:
        message = f"{model.kv_heads} heads for keys and values cannot be split over tensor: {tensor}"
        help = f"use {nearest(tensor, divisors(model.kv_heads))}"
        yield Diagnostic("PT203", message, path=("parallel", "tensor"), help=help)


def _stages(problem: Problem) -> Iterator[Diagnostic]:
    stages, layers = problem.spec.parallel.pipeline.stages, problem.model.layers
    if stages > layers:
        message = f"{layers} layers cannot fill {stages} pipeline stages"
        yield Diagnostic("PT264", message, path=("parallel", "pipeline", "stages"), help=f"use at most {layers}")


def _sequence(problem: Problem) -> Iterator[Diagnostic]:
    degree, length = problem.spec.parallel.sequence.degree, problem.spec.training.sequence_length
    path = ("parallel", "sequence", "degree")
    if length % degree:
        message = f"a sequence of {length} tokens cannot be split over sequence.degree: {degree}"
        yield Diagnostic("PT265", message, path=path, help=f"use {nearest(degree, divisors(length))}")
    elif problem.spec.parallel.sequence.method == "ulysses" and problem.model.heads % degree:
        message = f"{problem.model.heads} attention heads cannot be split over sequence.degree: {degree}"
        yield Diagnostic("PT265", message, path=path, help=f"use {nearest(degree, divisors(problem.model.heads))}")


def _experts(problem: Problem) -> Iterator[Diagnostic]:
    expert, moe = problem.spec.parallel.expert, problem.model.moe
    path = ("parallel", "expert")
    if expert > 1 and moe is None:
        message = f"expert: {expert}, but the model has no experts"
        yield Diagnostic("PT266", message, path=path, help="drop it, or choose a model with experts")
    elif moe is not None and moe.experts % expert:
        message = f"{moe.experts} experts cannot be split over expert: {expert}"
        yield Diagnostic("PT266", message, path=path, help=f"use {nearest(expert, divisors(moe.experts))}")


def _position(problem: Problem) -> Iterator[Diagnostic]:
    length, limit = problem.spec.training.sequence_length, problem.model.max_position
    path = ("training", "sequence_length")
    if length > limit and problem.model.position == "learned":
        message = f"sequence_length: {length} is more than the {limit} positions that the model has learned"
        yield Diagnostic("PT257", message, path=path, help=f"use at most {limit}, or raise model.max_position")
    elif length > limit and problem.model.position == "rope":
        message = f"sequence_length: {length} is beyond the model's max_position: {limit}"
        help = "raise model.max_position, and rope_theta or rope_scaling where weights are loaded"
        yield Diagnostic("PT257", message, severity="warning", path=path, help=help)


def _mesh(problem: Problem) -> Iterator[Diagnostic]:
    world, shared = problem.world_size, problem.model_parallel
    if world % shared:
        parallel = problem.spec.parallel
        message = (
            f"tensor: {parallel.tensor} × stages: {parallel.pipeline.stages} × sequence degree: "
            f"{parallel.sequence.degree} = {shared} does not divide the {world} devices"
        )
        help = f"their product can be {', '.join(map(str, divisors(world)))}"
        yield Diagnostic("PT267", message, path=("parallel",), help=help)


def _zero(problem: Problem) -> Iterator[Diagnostic]:
    data, dp = problem.spec.parallel.data, problem.dp
    if data.zero not in ("auto", 0) and dp == 1:
        message = f"zero: {data.zero} shares the state among data-parallel ranks, and there is only one"
        help = "use zero: 0 or auto, or more devices"
        yield Diagnostic("PT268", message, severity="warning", path=("parallel", "data", "zero"), help=help)
    if data.shard != "auto" and dp % data.shard:
        message = f"shard: {data.shard} does not divide the {dp} data-parallel ranks"
        help = f"use {nearest(data.shard, divisors(dp))}"
        yield Diagnostic("PT269", message, path=("parallel", "data", "shard"), help=help)


def _batch(problem: Problem) -> Iterator[Diagnostic]:
    batch, dp, micro = problem.spec.training.global_batch, problem.dp, problem.spec.parallel.micro_batch
    unit = dp * (1 if micro == "auto" else micro)
    if batch % unit:
        what = f"the {dp} data-parallel ranks" + ("" if micro == "auto" else f" × micro_batch: {micro}")
        message = f"global_batch: {batch} does not divide by {what}"
        legal = [n for n in (batch - batch % unit, batch - batch % unit + unit) if n]
        help = f"use {nearest(batch, legal)}"
        yield Diagnostic("PT259", message, path=("training", "global_batch"), help=help)


def _kernels(problem: Problem) -> Iterator[Diagnostic]:
    if problem.spec.kernels.mode == "native" and problem.devices.backend != "cpu":
        message = (
            f"kernels.mode: native asks for the compiled CPU kernels, the plan is for {problem.devices.accelerator}"
        )
        yield Diagnostic("PT270", message, path=("kernels", "mode"), help="use mode: auto")


SIZES: tuple[Check, ...] = (_kernels, _heads, _stages, _sequence, _experts, _position, _mesh)
"""Rules about single sizes."""
BATCHES: tuple[Check, ...] = (_zero, _batch)
"""Rules that need a mesh that works."""
