"""Table of rules that need the resolved model or the machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod

from partool.diagnostics.record import Diagnostic
from partool.planner.forms import experts, gathers, tiles
from partool.planner.hf import check_hf
from partool.planner.kernels import fused
from partool.planner.problem import Problem, divisors, nearest
from partool.planner.rules import (
    adapter,
    adversarial,
    distill,
    engine,
    evaluation,
    jobs,
    multi_token,
    objective,
    offload,
    optimizer,
    pipeline,
    quantised,
    tensor,
)
from partool.planner.rules.sequence import check_sequence
from partool.planner.rules.tensor_cuts import check_tensor
from partool.planner.rules.weights import check_frozen
from partool.spec.expert_checks import expert_layers
from partool.spec.watched import independent, note_read, watching

Check = Callable[[Problem], Iterator[Diagnostic]]


def check(problem: Problem, tokenizer_vocab: int | None) -> list[Diagnostic]:
    """Return the findings of all rules; later rules rely on values that earlier rules have checked."""
    findings = independent(_vocabulary, problem, tokenizer_vocab) + _of_group((check_hf, check_tensor), problem)
    if wrong := _of_group((jobs.check, engine.check), problem):
        return findings + wrong
    for group in (SIZES, BATCHES):
        findings += _of_group(group, problem)
        if any(finding.severity == "error" for finding in findings):
            break
    return findings


def _of_group(group: tuple[Check, ...], problem: Problem) -> list[Diagnostic]:
    # A problem caches what it computes; a new one for each rule computes it anew, so that the rule's reads are seen.
    return [finding for rule in group for finding in independent(rule, replace(problem) if watching() else problem)]


def _vocabulary(problem: Problem, tokenizer_vocab: int | None) -> Iterator[Diagnostic]:
    note_read(("data",))  # which gives the tokenizer
    vocab = problem.model.vocab
    if tokenizer_vocab is not None and vocab < tokenizer_vocab:
        message = f"the data's vocabulary has {tokenizer_vocab} tokens, the model's {vocab}"
        yield Diagnostic(
            "PT258", message, path=("model", "vocab"), help=f"set model.vocab to {tokenizer_vocab} or more"
        )


def _expert_layers(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the model has experts, but all of its layers are dense."""
    moe, layers = problem.model.moe, problem.model.layers
    if moe is not None and moe.first_dense_layers >= layers:
        message = f"first_dense_layers: {moe.first_dense_layers} leaves none of the {layers} layers with experts"
        help = f"use at most {layers - 1}, or drop moe" if layers > 1 else "use 0, or drop moe"
        yield Diagnostic("PT228", message, path=("model", "moe", "first_dense_layers"), help=help)
    elif moe is not None and problem.spec.model.layers is None:
        # Rules about a spec alone know no number of layers that a preset or a file gives.
        yield from (finding for finding in expert_layers(moe, layers) if finding not in expert_layers(moe, None))


def _recompute(problem: Problem) -> Iterator[Diagnostic]:
    policies, layers = problem.spec.parallel.recompute, problem.model.blocks
    if isinstance(policies, list) and len(policies) != layers:
        message = f"recompute names {len(policies)} policies for {layers} layers"
        help = "name one policy per layer, or write one word for all"
        yield Diagnostic("PT271", message, path=("parallel", "recompute"), help=help)


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
    world, pinned = problem.world_size, problem.pinned_degrees
    shared = prod(pinned.values())
    if world % shared:
        product = " × ".join(f"{name}: {value}" for name, value in pinned.items() if value > 1)
        message = f"{product} = {shared} does not divide the {world} devices"
        if product.count("×") == 0:
            message = f"{product} does not divide the {world} devices"
        help = f"{'their product' if '×' in product else 'it'} can be {nearest(shared, divisors(world), 4)}"
        yield Diagnostic("PT267", message, path=("parallel",), help=help)


def _zero(problem: Problem) -> Iterator[Diagnostic]:
    data, shared = problem.spec.parallel.data, prod(problem.pinned_degrees.values())
    dp = problem.world_size // shared
    # Sequence-parallel ranks have the same parameters, so their state is sharded over them too.
    shared_ranks = problem.pinned_degrees.get("sequence.degree", 1)
    # On a single device ZeRO-3 has only one use: it keeps compute-precision copies of one layer at a time. Tensor ranks
    # share experts from stage 1 on.
    alone = data.zero == 3 and problem.world_size == 1 and problem.host_link
    tensor = problem.pinned_degrees.get("tensor", 1)
    alone = alone or experts.experts_on_tensor_ranks(problem, tensor)
    if data.zero not in ("auto", 0) and dp == 1 and shared_ranks == 1 and not alone:
        message = f"zero: {data.zero} shares the state among data-parallel ranks, and there is only one"
        help = "use zero: 0 or auto, or more devices"
        yield Diagnostic("PT268", message, severity="warning", path=("parallel", "data", "zero"), help=help)
    if data.shard != "auto" and dp % data.shard:
        message = f"shard: {data.shard} does not divide the {dp} data-parallel rank{'s' * (dp > 1)}"
        if shared > 1:
            product = " × ".join(f"{name}: {value}" for name, value in problem.pinned_degrees.items() if value > 1)
            message += f" that {product} leave{'s' * ('×' not in product)} of {problem.world_size} devices"
        help = f"use {nearest(data.shard, divisors(dp))}"
        yield Diagnostic("PT269", message, path=("parallel", "data", "shard"), help=help)


def _batch(problem: Problem) -> Iterator[Diagnostic]:
    """Yield a finding if the number of data-parallel ranks that the spec sets does not divide the global batch."""
    batch, micro = problem.spec.training.global_batch, problem.spec.parallel.micro_batch
    shard = problem.spec.parallel.data.shard
    fixed = len(problem.pinned_degrees) == 3
    dp = problem.world_size // prod(problem.pinned_degrees.values()) if fixed else 1
    ranks = dp if fixed or shard == "auto" else shard
    unit = ranks * (1 if micro == "auto" else micro)
    data_ranks = problem.world_size // prod(problem.pinned_degrees.values())
    # A shard that does not divide is PT269's, and its help would differ.
    if batch % unit == 0 or (shard != "auto" and data_ranks % shard):
        return
    parts = [f"the {dp} data-parallel ranks"] if fixed else [f"shard: {shard}"] if ranks > 1 else []
    parts += [] if micro == "auto" else [f"micro_batch: {micro}"]
    message = f"global_batch: {batch} does not divide by {' × '.join(parts)}"
    legal = [n for n in (batch - batch % unit, batch - batch % unit + unit) if n]
    yield Diagnostic("PT259", message, path=("training", "global_batch"), help=f"use {nearest(batch, legal)}")


SIZES: tuple[Check, ...] = (
    fused.check, *tensor.RULES, pipeline.stages, pipeline.layers, pipeline.lists,
    check_sequence, experts.check, _expert_layers, check_frozen, adapter.check, quantised.check, optimizer.check,
    _recompute, offload.check, _position, _mesh, gathers.check, tiles.check, adversarial.check,
    distill.check, objective.check, evaluation.check, multi_token.check,
)  # fmt: skip
"""Rules that each check one size."""
BATCHES: tuple[Check, ...] = (_zero, _batch, pipeline.micro_batches)
"""Rules that need a valid mesh."""
